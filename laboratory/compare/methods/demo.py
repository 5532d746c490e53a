"""The methods of this library beside `DeMoWorkers`: the published settings of DeMo, LocalDeMo; and SparseLoCo."""

from dataclasses import replace
from typing import Any

import demopt
from laboratory.compare.methods.averaged import MAKERS, adamw_maker
from laboratory.simulation.demo import DeMoWorkers
from laboratory.simulation.local_demo import LocalDeMoWorkers
from laboratory.simulation.workers import Cost, SimulatedWorkers, all_gather_bytes

VERSIONS = {"v1": demopt.V1, "v2": demopt.V2}
PUBLISHED_BYTES = 12  # per coefficient: a 64-bit index and a 32-bit value


class Published(DeMoWorkers):
    """DeMo at the settings of the paper's version 1 or 2; bytes are those of its format, not of this library's.

    Examples:
        >>> import torch
        >>> workers = SimulatedWorkers(torch.nn.Linear(2, 2), world_size=2)
        >>> Published(workers, version="v2", top_k=8).optimizers[0].defaults["alpha"]
        0.2
    """

    bytes_rule = "published format: 96 bits per kept coefficient, all-gathered: (W-1) 12 C K bytes each way"

    def __init__(self, workers: SimulatedWorkers, version: str, **settings: Any) -> None:
        super().__init__(workers, **{**VERSIONS[version], "route": "gather", **settings})

    def finish(self) -> Cost:
        cost = super().finish()
        payload = PUBLISHED_BYTES * self.optimizers[0].stats.kept
        others = all_gather_bytes(payload, self.workers.world_size)
        return replace(cost, payload_bytes=payload, sent_bytes=others, received_bytes=others)


def local(workers: SimulatedWorkers, inner: str = "muon", **settings: Any) -> LocalDeMoWorkers:
    """LocalDeMo around an optimizer of `averaged.MAKERS`; `settings` are its keywords, or of the optimizer's maker.

    Examples:
        >>> import torch
        >>> local(SimulatedWorkers(torch.nn.Linear(8, 2), world_size=2), sync_every=3).close()
    """
    inner_settings = {name: settings.pop(name) for name in ("momentum", "weight_decay") if name in settings}
    return LocalDeMoWorkers(workers, MAKERS[inner](**inner_settings), **settings)


def sparseloco(
    workers: SimulatedWorkers,
    every: int = 15,
    top_k: int = 64,
    error_decay: float = 0.95,
    weight_decay: float = 0.1,
    **more: Any,
) -> LocalDeMoWorkers:
    """SparseLoCo (arXiv 2508.15706): AdamW inside; the strongest elements of each chunk leave in 2 bits, no momentum.

    Their positions and values travel in this library's format, which is shorter than the published one.

    Examples:
        >>> import torch
        >>> sparseloco(SimulatedWorkers(torch.nn.Linear(8, 2), world_size=2)).close()
    """
    fixed: dict[str, Any] = {"transform": "identity", "values": "2-bit", "reduction": "mean", "outer_lr": 1.0}
    settings = {**fixed, "sync_every": every, "top_k": top_k, "error_decay": error_decay, **more}
    return LocalDeMoWorkers(workers, adamw_maker(weight_decay), **settings)
