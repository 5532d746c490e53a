"""From runs to figures: means and spreads over seeds, and curves."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from laboratory.compare.run import Row
from laboratory.compare.store import COUNTS
from laboratory.compare.studies import Entry
from laboratory.compare.tuning import Plan, best_rate

SIGMAS = 3.09  # standard errors, from which a difference of means counts, as in the NanoGPT speed-runs: p < .001


@dataclass(frozen=True)
class Figures:
    """One entry of a study: all seeds at its best learning rate. Bytes are per step."""

    name: str
    lr: float
    losses: list[float | None]  # None: diverged
    payload_bytes: float
    sent_bytes: float
    received_bytes: float
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


def difference(one: Figures, other: Figures) -> tuple[float, float]:
    """Returns how far one's mean loss is above the other's, in nats and in standard errors; NaN for a single seed.

    The standard deviation of a run is pooled over the seeds of both. From `SIGMAS` on, the gap is more than chance.

    Examples:
        >>> worse = Figures("a", 1e-3, [1.75, 1.76, 1.77], 0, 0, 0, [])
        >>> better = Figures("b", 1e-3, [1.71, 1.72, 1.73], 0, 0, 0, [])
        >>> [round(value, 2) for value in difference(worse, better)]
        [0.04, 4.9]
    """
    nats, counts = one.mean - other.mean, [len(each.losses) for each in (one, other)]
    if min(counts) < 2 or not math.isfinite(nats):
        return nats, math.nan
    squares = sum((count - 1) * each.spread**2 for count, each in zip(counts, (one, other), strict=True))
    error = math.sqrt(squares / (sum(counts) - 2) * sum(1 / count for count in counts))
    return nats, nats / error if error else math.inf


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
    losses = [row["val_loss"] for row in runs]
    curve = mean_curve([row["curve"] for row in runs])
    return Figures(entry.name, lr, losses, **per_step, curve=curve, beside=entry.beside)


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
