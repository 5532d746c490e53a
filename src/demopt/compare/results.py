"""Turns runs into results: means and spreads over seeds, curves, and the Pareto front."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from demopt.compare.catalogue import METHODS
from demopt.compare.links import network_seconds
from demopt.compare.run import Row
from demopt.compare.store import BYTES
from demopt.compare.studies import Entry
from demopt.compare.sweep import Plan, best_rate, rate, tried


@dataclass(frozen=True)
class Point:
    """A method after `step` steps: its seeds' losses, and the bytes of one worker so far."""

    step: int
    mean: float
    least: float
    most: float
    sent_bytes: float
    received_bytes: float


@dataclass(frozen=True)
class Result:
    """One entry of a study: all seeds at its best learning rate. `tried` holds (rate, loss); None means diverged.

    `step_seconds` is one worker's computing time in a fast step: its own gradient and the method, without network.
    """

    name: str
    method: str
    settings: dict[str, Any]
    workers: int
    batch: int
    steps: int
    lr: float
    tried: list[tuple[float, float | None]]
    seeds: list[int]
    losses: list[float | None]
    payload_bytes: float  # per step, as are the next three
    sent_bytes: float
    received_bytes: float
    exchanges: float
    step_seconds: float
    curve: list[Point] = field(repr=False)
    commands: list[str] = field(repr=False)

    @property
    def mean(self) -> float:
        """Mean loss over seeds; infinite if one diverged."""
        return mean_of(self.losses)

    @property
    def spread(self) -> float:
        """Sample standard deviation over seeds; NaN for a single seed, or if one diverged."""
        known = [loss for loss in self.losses if loss is not None]
        return statistics.stdev(known) if len(known) == len(self.losses) > 1 else math.nan

    def record(self) -> dict[str, Any]:
        """Returns the result as in results.json."""
        plain = {**asdict(self), "mean": self.mean, "spread": self.spread}
        return {name: _json_number(value) for name, value in plain.items()}

    def seconds(self, bits_per_second: float) -> float:
        """Returns the time of a step on a link: computing, then communicating."""
        return self.step_seconds + network_seconds(self.sent_bytes, self.received_bytes, bits_per_second)


def collect(plan: Plan, rows: Mapping[str, Row]) -> list[Result]:
    """Returns the results of the entries whose runs are all there, in the study's order."""
    found = (_result(plan, entry, rows) for entry in plan.study.entries)
    return [result for result in found if result is not None]


def _result(plan: Plan, entry: Entry, rows: Mapping[str, Row]) -> Result | None:
    lr = best_rate(plan, entry, rows)
    if lr is None:
        return None
    runs = [plan.run(entry, lr, seed) for seed in plan.seeds]
    done = [rows[run.key] for run in runs if run.key in rows]
    if len(done) < len(runs):
        return None
    a_step = {name: statistics.mean(row[name] / row["curve"][-1]["step"] for row in done) for name in BYTES}
    losses = [None if row["val_loss"] is None else float(row["val_loss"]) for row in done]
    rates = [(rate(entry, power), _json_number(loss)) for power, loss in tried(plan, entry, rows).items()]
    return Result(
        entry.name, entry.method, entry.settings, runs[0].workers, runs[0].batch, plan.scale.steps, lr,
        [] if plan.lr is not None else rates, list(plan.seeds), losses, **a_step,
        exchanges=exchanges(entry), step_seconds=min(row["step_seconds"] for row in done),
        curve=mean_curve([row["curve"] for row in done]), commands=[run.command() for run in runs],
    )  # fmt: skip


def exchanges(entry: Entry) -> float:
    """Returns how many exchanges an entry makes in a step, in the mean.

    Examples:
        >>> exchanges(Entry("diloco h50", "diloco", {"every": 50}, 0.003))
        0.02
    """
    interval = METHODS[entry.method].interval
    return 1.0 if interval is None else 1 / int(entry.settings[interval])


def mean_curve(curves: Sequence[Sequence[Row]]) -> list[Point]:
    """Averages curves over seeds point by point, up to where the first seed diverged.

    Examples:
        >>> point = {"step": 5, "val_loss": 2.0, "sent_bytes": 10, "received_bytes": 30}
        >>> mean_curve([[point], [{**point, "val_loss": 3.0}]])[0].mean
        2.5
    """
    points = []
    for together in zip(*curves, strict=False):
        losses = [point["val_loss"] for point in together]
        if None in losses:
            break
        sent, received = (statistics.mean(point[name] for point in together) for name in BYTES[1:])
        mean = statistics.mean(losses)
        points.append(Point(together[0]["step"], mean, min(losses), max(losses), sent, received))
    return points


def front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For each (bytes, loss): whether loss is finite and no other point is at most as large in both, smaller in one.

    Examples:
        >>> front([(1, 3.0), (2, 2.0), (3, 2.5)])
        [True, True, False]
    """

    def beaten(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return other != one and other[0] <= one[0] and other[1] <= one[1]

    return [math.isfinite(one[1]) and not any(beaten(one, other) for other in points) for one in points]


def on_front(results: Sequence[Result], name: str) -> list[bool]:
    """Returns which results are on the Pareto front of mean loss against the bytes called `name`."""
    return front([(getattr(result, name), result.mean) for result in results])


def mean_of(losses: Sequence[float | None]) -> float:
    """Returns the mean; infinite if a loss is None.

    Examples:
        >>> mean_of([1.0, 3.0]), mean_of([1.0, None])
        (2.0, inf)
    """
    return statistics.mean(math.inf if loss is None else loss for loss in losses)


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
