"""The methods by name. A new method is a class in methods/ and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from demopt.compare.methods import ddp, demo, galore, local, movement, powersgd, sparse
from demopt.simulate.demo import DeMoWorkers
from demopt.simulate.local import LocalWorkers
from demopt.simulate.method import Averaged, Method


@dataclass(frozen=True)
class Kind:
    """A method: its constructor make(fleet, **settings), the bytes a worker sends, in words, and its source.

    `interval` names the setting that says how many steps lie between exchanges; None: one in every step.
    `ours`: what this library does, which pages mark.
    """

    make: Callable[..., Method]
    bytes_rule: str
    source: str
    interval: str | None = None
    ours: bool = False


METHODS: dict[str, Kind] = {
    "adamw": Kind(ddp.adamw, Averaged.bytes_rule, "torch.optim.AdamW"),
    "sgd": Kind(ddp.sgd, Averaged.bytes_rule, "torch.optim.SGD"),
    "muon": Kind(ddp.muon, Averaged.bytes_rule, "Muon; AdamW for embedding and vectors"),
    "demo": Kind(DeMoWorkers, DeMoWorkers.bytes_rule, "this library", ours=True),
    "demo-delayed": Kind(demo.Delayed, demo.Delayed.bytes_rule, "this library at delay=1", ours=True),
    "published": Kind(demo.Published, demo.Published.bytes_rule, "this library at demopt.V1 or demopt.V2"),
    "powersgd": Kind(
        powersgd.PowerSGD, powersgd.PowerSGD.bytes_rule, "arXiv 1905.13727, as torch's hook; AdamW on its result"
    ),
    "local-sgd": Kind(
        local.local_sgd, local.Local.bytes_rule, "torch.optim.SGD inside, mean of weights (FedAvg)", interval="every"
    ),
    "diloco": Kind(
        local.diloco, local.Local.bytes_rule, "arXiv 2311.08105: AdamW inside, Nesterov outside", interval="every"
    ),
    "muloco": Kind(
        local.muloco,
        f"{local.Local.bytes_rule}; bits=2: {local.QuantisedLocal.bytes_rule}",
        "arXiv 2505.23725: Muon inside, Nesterov outside, 32 or 2 bits",
        interval="every",
    ),
    "local": Kind(
        movement.local, LocalWorkers.bytes_rule, "this library's LocalDeMo", interval="sync_every", ours=True
    ),
    "sparseloco": Kind(
        movement.sparseloco, LocalWorkers.bytes_rule, "arXiv 2508.15706: AdamW inside", interval="every"
    ),
    "dgc": Kind(sparse.DGC, sparse.DGC.bytes_rule, "arXiv 1712.01887, without warm-up of the density"),
    "random-k": Kind(sparse.RandomK, sparse.RandomK.bytes_rule, "as dgc, at shared random positions"),
    "galore": Kind(galore.GaLore, galore.GaLore.bytes_rule, "arXiv 2403.03507, torch.optim.AdamW on the projection"),
}
