"""LocalDeMo, and SparseLoCo by its settings."""

from typing import Any

from laboratory.compare.methods.averaged import adamw_maker, maker_of
from laboratory.simulation.demo import LocalDeMoWorkers
from laboratory.simulation.workers import SimulatedWorkers


def local(workers: SimulatedWorkers, inner: str = "muon", **settings: Any) -> LocalDeMoWorkers:
    """LocalDeMo around an optimizer of `averaged.MAKERS`; `settings` are its keywords, or the maker's."""
    return LocalDeMoWorkers(workers, maker_of(inner, settings), **settings)


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
    """
    fixed: dict[str, Any] = {"transform": "identity", "values": "2-bit", "reduction": "mean", "outer_lr": 1.0}
    settings = {**fixed, "sync_every": every, "top_k": top_k, "error_decay": error_decay, **more}
    return LocalDeMoWorkers(workers, adamw_maker(weight_decay), **settings)
