"""Unequal machines: batches by measured speed, so that all workers take equally long per step."""

from collections.abc import Mapping

from demopt.validation import check_count, check_number


def fit_batches(
    speeds: Mapping[str, float], total: int, before: Mapping[str, int] | None = None, tolerance: float = 0.1
) -> dict[str, int]:
    """Returns each worker's sequences per step: whole numbers in proportion to the speeds, `total` together.

    Every worker gets at least one, so with more workers than `total` the sum is their number. Weigh each worker's
    pseudo-gradient by its sequences (`LocalDeMo.samples`). The result depends only on the arguments, so workers that
    know the same speeds need not agree on it.

    Args:
        speeds: each worker's sequences per second while computing; 0 for a worker not measured yet, which counts as
            the mean of the others.
        before: the batches until now. They stay while the slowest step is at most `tolerance` slower than it would be
            with new ones, so that noise in the speeds changes nothing.

    Raises:
        ValueError: no worker, a speed that is negative or not finite, or a total below 1.

    Examples:
        >>> fit_batches({"laptop": 5.0, "desktop": 20.0}, 16)
        {'laptop': 3, 'desktop': 13}
    """
    if not (isinstance(speeds, Mapping) and speeds):
        raise ValueError(f"speeds is {speeds}; give each worker's sequences per second, 0 where it is not known")
    speeds = {w: check_number(f"sequences per second of {w}", speed, high=1e300) for w, speed in speeds.items()}
    check_count("total", total, high=(1 << 32) - 1)
    check_number("tolerance", tolerance)
    if not isinstance(before, Mapping | None):
        raise TypeError(f"before is {before!r}; give a mapping of workers to batches")
    before = {
        worker: check_count(f"the batch of {worker} before", size, low=0) for worker, size in (before or {}).items()
    }
    known = [speed for speed in speeds.values() if speed]
    mean = sum(known) / len(known) if known else 1.0
    filled = {worker: speed or mean for worker, speed in speeds.items()}
    beyond_one, whole = total - len(filled), sum(filled.values())
    found = {worker: max(1, int(beyond_one * (speed / whole))) for worker, speed in filled.items()}
    for _ in range(total - sum(found.values())):  # each remaining sequence goes where it would be done first
        quickest = min(filled, key=lambda w: ((found[w] + 1) / filled[w], type(w).__name__, w))
        found[quickest] += 1
    if before and before.keys() == found.keys() and sum(before.values()) == sum(found.values()):
        slowest, best = (max(batches[each] / filled[each] for each in filled) for batches in (before, found))
        if slowest <= (1 + tolerance) * best:
            return dict(before)
    return found
