"""The measurements of one method, and the samples of all ranks combined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from demopt.bench.traffic import Traffic
from demopt.optim.demo import DeMo
from demopt.optim.local import LocalDeMo
from demopt.train.team import Team

Turn = dict[str, float]  # "seconds" of the whole, and of each stage if there are any


@dataclass
class Samples:
    """One method's timed rounds on this rank, and the figures that are measured once."""

    name: str
    figures: dict[str, Any] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)

    def add(self, seconds: float, optimizer: Optimizer) -> None:
        """Add a round; DeMo reports the seconds of its stages."""
        stages = optimizer.stats.seconds if isinstance(optimizer, DeMo | LocalDeMo) else {}
        self.turns.append({"seconds": seconds, **stages})

    def together(self, team: Team) -> dict[str, Any]:
        """Return each round's times on its slowest rank, for which the others wait; figures are this rank's own."""
        return {"name": self.name, **self.figures, **columns(slowest(team.gather(self.turns)))}


def slowest(by_rank: list[list[Turn]]) -> list[Turn]:
    """Return each round as its slowest rank measured it.

    Examples:
        >>> slowest([[{"seconds": 1.0}, {"seconds": 4.0}], [{"seconds": 2.0}, {"seconds": 3.0}]])
        [{'seconds': 2.0}, {'seconds': 4.0}]
    """
    return [max(turn, key=lambda one: one["seconds"]) for turn in zip(*by_rank, strict=True)]


def columns(turns: list[Turn]) -> dict[str, Any]:
    """Turn rounds into lists: all seconds, and all seconds of each stage by name.

    Examples:
        >>> columns([{"seconds": 2.0, "extract": 1.0}, {"seconds": 4.0, "extract": 3.0}])
        {'seconds': [2.0, 4.0], 'stages': {'extract': [1.0, 3.0]}}
    """
    names = [name for name in turns[0] if name != "seconds"]
    stages = {name: [turn[name] for turn in turns] for name in names}
    return {"seconds": [turn["seconds"] for turn in turns], "stages": stages}


def traffic_figures(traffic: Traffic, optimizer: Optimizer) -> dict[str, Any]:
    """Return the bytes and calls of one step; bytes are None if the bytes of some collective are unknown.

    DeMo's payload is its message, which exists even where there is no other rank to send it to.
    """
    known = not traffic.unknown
    payload = optimizer.stats.payload_bytes if isinstance(optimizer, DeMo | LocalDeMo) else traffic.payload_bytes
    return {
        "collectives": traffic.collectives,
        "payload_bytes": payload if known else None,
        "sent_bytes": traffic.sent_bytes if known else None,
        "received_bytes": traffic.received_bytes if known else None,
    }
