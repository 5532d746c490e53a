"""From runs to figures: means and spreads over seeds, curves, and the Pareto front."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from laboratory.compare.run import Row
from laboratory.compare.store import COUNTS
from laboratory.compare.studies import Entry
from laboratory.compare.tuning import Plan, best_rate

SIGMAS = 3.09  # from which a difference of means counts, as in the NanoGPT speed-runs: p < .001
LINK, BITS_PER_SECOND = "100 Mbit/s", 1e8  # the link of the table


@dataclass(frozen=True)
class Figures:
    """One entry of a study: all seeds at its best learning rate. Bytes are per step.

    `step_seconds` is one worker's computing time in a fast step: its gradient and the method, without network.
    """

    name: str
    lr: float
    losses: list[float | None]  # None: diverged
    payload_bytes: float
    sent_bytes: float
    received_bytes: float
    step_seconds: float
    curve: list[tuple[int, float]] = field(repr=False)  # step, mean loss
    beside: str = ""  # the entry that it is compared with

    @property
    def mean(self) -> float:
        """Mean loss over seeds; infinite if one diverged."""
        return statistics.mean(math.inf if loss is None else loss for loss in self.losses)

    @property
    def spread(self) -> float:
        """Sample standard deviation over seeds; NaN for a single seed, or if one diverged."""
        known = [loss for loss in self.losses if loss is not None]
        return statistics.stdev(known) if len(known) == len(self.losses) > 1 else math.nan

    @property
    def seconds_on_link(self) -> float:
        """Seconds per step: computing, then the larger direction of its bytes on the link; no latency, no overlap."""
        return self.step_seconds + 8 * max(self.sent_bytes, self.received_bytes) / BITS_PER_SECOND


@dataclass(frozen=True)
class Difference:
    """The distance of an entry's mean loss above another's, in nats and in standard errors; NaN for a single seed."""

    nats: float
    errors: float

    @property
    def counts(self) -> bool:
        """Whether it is more than chance."""
        return abs(self.errors) >= SIGMAS


def difference(one: Figures, other: Figures) -> Difference:
    """Compares two entries; the standard deviation of a run is pooled over the seeds of both.

    Examples:
        >>> worse = Figures("a", 1e-3, [1.75, 1.76, 1.77], 0, 0, 0, 0.0, [])
        >>> better = Figures("b", 1e-3, [1.71, 1.72, 1.73], 0, 0, 0, 0.0, [])
        >>> found = difference(worse, better)
        >>> round(found.nats, 3), round(found.errors, 1), found.counts
        (0.04, 4.9, True)
    """
    nats, counts = one.mean - other.mean, [len(each.losses) for each in (one, other)]
    freedom = sum(counts) - 2
    if min(counts) < 2 or not math.isfinite(nats):
        return Difference(nats, math.nan)
    squares = sum((count - 1) * each.spread**2 for count, each in zip(counts, (one, other), strict=True))
    error = math.sqrt(squares / freedom * sum(1 / count for count in counts))
    return Difference(nats, nats / error if error else math.inf)


def collect(plan: Plan, rows: Mapping[str, Row]) -> list[Figures]:
    """Returns the figures of the entries whose runs are all there, best loss first."""
    found = [figures for entry in plan.study.entries if (figures := _figures(plan, entry, rows)) is not None]
    return sorted(found, key=lambda each: each.mean)


def _figures(plan: Plan, entry: Entry, rows: Mapping[str, Row]) -> Figures | None:
    lr = best_rate(plan, entry, rows)
    done = [rows.get(plan.run(entry, lr, seed).key) for seed in plan.seeds] if lr is not None else []
    runs = [row for row in done if row is not None]
    if lr is None or len(runs) < len(plan.seeds):
        return None
    per_step = {name: statistics.mean(row[name] / row["curve"][-1]["step"] for row in runs) for name in COUNTS}
    seconds = min(row["step_seconds"] for row in runs)
    losses = [row["val_loss"] for row in runs]
    curve = mean_curve([row["curve"] for row in runs])
    return Figures(entry.name, lr, losses, **per_step, step_seconds=seconds, curve=curve, beside=entry.beside)


def mean_curve(curves: Sequence[Sequence[Row]]) -> list[tuple[int, float]]:
    """Averages curves over seeds point by point, up to where the first seed diverged.

    Examples:
        >>> point = {"step": 5, "val_loss": 2.0}
        >>> mean_curve([[point], [{**point, "val_loss": 3.0}]])
        [(5, 2.5)]
    """
    points = []
    for together in zip(*curves, strict=False):
        losses = [point["val_loss"] for point in together]
        if None in losses:
            break
        points.append((together[0]["step"], statistics.mean(losses)))
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
