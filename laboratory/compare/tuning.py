"""Tunes every method by the same rule: derives the missing runs from the finished ones. Pure functions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from laboratory.compare.run import Row, Run, Scale, Source
from laboratory.compare.studies import Entry, Study

FACTOR = 2.0  # between neighbouring learning rates
FARTHEST = 5  # at most so many powers of the factor away from the default
MOST_RATES = 2 * FARTHEST + 1


@dataclass(frozen=True)
class Plan:
    """A study, and how it is tuned: `rates` learning rates at first, or only `lr`.

    Examples:
        >>> from laboratory.compare.studies import chosen
        >>> Plan(chosen("rivals"), Scale(), Source(""), seeds=(0, 1)).rates
        3
    """

    study: Study
    scale: Scale
    source: Source
    seeds: tuple[int, ...] = (0,)
    rates: int = 3
    lr: float | None = None

    def run(self, entry: Entry, lr: float, seed: int) -> Run:
        """Returns a run of this plan."""
        return Run(self.study.name, entry, lr, seed, self.scale, self.source)


def rate(entry: Entry, power: int) -> float:
    """Returns the default learning rate times a power of FACTOR, to three digits, so that commands can name it.

    Examples:
        >>> rate(Entry("adamw", "adamw", {}, lr=3e-3), -1)
        0.0015
    """
    return float(f"{entry.lr * FACTOR**power:.3g}")


def tried(plan: Plan, entry: Entry, rows: Mapping[str, Row]) -> dict[int, float]:
    """Returns loss by power for the rates tried with the first seed; infinite where a run diverged."""
    found = {}
    for power in range(-FARTHEST, FARTHEST + 1):
        row = rows.get(plan.run(entry, rate(entry, power), plan.seeds[0]).key)
        if row is not None:
            found[power] = math.inf if row["val_loss"] is None else float(row["val_loss"])
    return found


def next_powers(losses: Mapping[int, float], rates: int) -> list[int]:
    """Returns the powers to try next: `rates` around the default, then beyond the best while it is the outermost.

    Examples:
        >>> next_powers({}, rates=3)
        [-1, 0, 1]
        >>> next_powers({-1: 2.0, 0: 1.9, 1: 1.8}, rates=3)
        [2]
        >>> next_powers({-1: 2.0, 0: 1.9, 1: 1.95}, rates=3)
        []
        >>> next_powers({power: math.inf for power in (-1, 0, 1)}, rates=3)
        [-2]
        >>> next_powers({power: -power for power in range(-1, 6)}, rates=3)
        []
    """
    first = range(-((rates - 1) // 2), rates // 2 + 1)
    if missing := [power for power in first if power not in losses]:
        return missing
    best = best_power(losses)
    if rates == 1 or not math.isfinite(losses[best]):
        return [min(losses) - 1] if rates > 1 and min(losses) > -FARTHEST else []
    around = [power for power in (best - 1, best + 1) if power not in losses]
    return [power for power in around if abs(power) <= FARTHEST]


def best_power(losses: Mapping[int, float]) -> int:
    """Returns the power of lowest loss; of equal losses, the smallest."""
    return min(losses, key=lambda power: (losses[power], power))


def best_rate(plan: Plan, entry: Entry, rows: Mapping[str, Row]) -> float | None:
    """Returns the learning rate at which all seeds run; None while rates are still to be tried."""
    if plan.lr is not None:
        return plan.lr
    losses = tried(plan, entry, rows)
    return None if next_powers(losses, plan.rates) else rate(entry, best_power(losses))


def missing(plan: Plan, rows: Mapping[str, Row]) -> list[Run]:
    """Returns the runs that can start now: rates to try, or seeds at the best rate; none when all are there."""
    runs: dict[str, Run] = {}  # by key: two entries may ask for the same run
    for entry in plan.study.entries:
        lr = best_rate(plan, entry, rows)
        if lr is None:
            powers = next_powers(tried(plan, entry, rows), plan.rates)
            todo = [plan.run(entry, rate(entry, power), plan.seeds[0]) for power in powers]
        else:
            todo = [plan.run(entry, lr, seed) for seed in plan.seeds]
        runs |= {run.key: run for run in todo if run.key not in rows}
    return list(runs.values())
