"""Workers that train separately and send how far they have moved through DeMo's codec: LocalDeMo, and SparseLoCo."""

from __future__ import annotations

from typing import Any

from demopt.compare.methods.ddp import Maker, adamw_maker, muon_maker
from demopt.simulate.local import LocalWorkers
from demopt.simulate.method import Fleet

INNER = ("muon", "adamw")


def local(
    fleet: Fleet,
    inner: str = "muon",
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    others_share: float = 1.0,
    **settings: Any,
) -> LocalWorkers:
    """LocalDeMo around the optimizers of Muon-DDP or AdamW-DDP; `settings` are its keywords.

    Examples:
        >>> import torch
        >>> workers = local(Fleet(torch.nn.Linear(8, 2), world_size=2), sync_every=3)
        >>> workers.close()
    """
    return LocalWorkers(fleet, _maker(fleet, inner, momentum, weight_decay, others_share), **settings)


def sparseloco(
    fleet: Fleet, every: int = 15, top_k: int = 64, error_decay: float = 0.95, weight_decay: float = 0.1, **more: Any
) -> LocalWorkers:
    """SparseLoCo (arXiv 2508.15706): AdamW inside; the strongest elements of each chunk leave in 2 bits, no momentum.

    Their positions and values travel in this library's format, which is shorter than the published one.

    Examples:
        >>> import torch
        >>> workers = sparseloco(Fleet(torch.nn.Linear(8, 2), world_size=2))
        >>> workers.close()
    """
    how: dict[str, Any] = {"transform": "identity", "values": "2-bit", "reduction": "mean", "outer_lr": 1.0}
    maker = adamw_maker(weight_decay)
    return LocalWorkers(fleet, maker, sync_every=every, top_k=top_k, error_decay=error_decay, **{**how, **more})


def _maker(fleet: Fleet, inner: str, momentum: float, weight_decay: float, others_share: float) -> Maker:
    if inner not in INNER:
        raise ValueError(f"inner is {inner!r}, wanted one of {', '.join(INNER)}")
    if inner == "adamw":
        return adamw_maker(weight_decay)
    return muon_maker(fleet, momentum, weight_decay, others_share)
