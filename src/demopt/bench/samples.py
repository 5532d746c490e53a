"""What was measured of one method, and the samples of all ranks put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from demopt.bench.traffic import Traffic
from demopt.optim.demo import DeMo
from demopt.train.team import Team

Turn = dict[str, float]  # "seconds" of the whole, and of each stage where there are stages


@dataclass
class Samples:
    """One method's rounds on this rank, and its figures that need no repetition."""

    name: str
    figures: dict[str, Any] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)

    def add(self, seconds: float, optimizer: Optimizer) -> None:
        """Keep a round; DeMo says itself how long its stages took."""
        stages = optimizer.stats.seconds if isinstance(optimizer, DeMo) else {}
        self.turns.append({"seconds": seconds, **stages})

    def together(self, team: Team) -> dict[str, Any]:
        """Rounds by the slowest rank of each, for which the others wait; figures are the first rank's."""
        return {"name": self.name, **self.figures, **columns(slowest(team.gather(self.turns)))}


def slowest(by_rank: list[list[Turn]]) -> list[Turn]:
    """Each round as the rank saw it that took longest.

    Example:
        >>> slowest([[{"seconds": 1.0}, {"seconds": 4.0}], [{"seconds": 2.0}, {"seconds": 3.0}]])
        [{'seconds': 2.0}, {'seconds': 4.0}]
    """
    return [max(turn, key=lambda one: one["seconds"]) for turn in zip(*by_rank, strict=True)]


def columns(turns: list[Turn]) -> dict[str, Any]:
    """Rounds by name: all seconds, and all seconds of each stage.

    Example:
        >>> columns([{"seconds": 2.0, "extract": 1.0}, {"seconds": 4.0, "extract": 3.0}])
        {'seconds': [2.0, 4.0], 'stages': {'extract': [1.0, 3.0]}}
    """
    names = [name for name in turns[0] if name != "seconds"]
    stages = {name: [turn[name] for turn in turns] for name in names}
    return {"seconds": [turn["seconds"] for turn in turns], "stages": stages}


def traffic_figures(traffic: Traffic, optimizer: Optimizer) -> dict[str, Any]:
    """Bytes and calls of one step; None for bytes where not all collectives could be counted.

    DeMo's payload is its message, which exists whether or not there is anybody to send it to.
    """
    known = not traffic.unknown
    payload = optimizer.stats.payload_bytes if isinstance(optimizer, DeMo) else traffic.payload_bytes
    return {
        "collectives": traffic.collectives,
        "payload_bytes": payload if known else None,
        "sent_bytes": traffic.sent_bytes if known else None,
        "received_bytes": traffic.received_bytes if known else None,
    }
