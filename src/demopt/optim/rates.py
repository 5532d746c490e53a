"""Notices a script that writes its own learning rate over the one that an inner optimizer was built with."""

from collections.abc import Sequence
from typing import Any

_SMALL = 0.25  # of the rate that a group was built with; AdamW's best is about a tenth of Muon's
_STILL_ROUNDS = 3  # without a rise: a warm-up is over


class Rates:
    """The learning rates of parameter groups from round to round, until they are known to be sound.

    A group is suspect while no rate of it came near the one it was built with, unless it has a scheduler of torch: that
    scales the rate it finds, and marks the group with `initial_lr`.

    Examples:
        >>> group = {"lr": 0.015}
        >>> rates = Rates([group])
        >>> group["lr"] = 0.002
        >>> [rates.hint([group]) is not None for _ in range(5)]
        [False, False, False, True, False]
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._built = [_rate(group) for group in groups]
        self._last = [0.0] * len(groups)
        self._still = 0

    def hint(self, groups: Sequence[dict[str, Any]]) -> str | None:
        """After a round: returns a hint about a group, once, if its rates stay far below the one it was built with."""
        if not self._built:
            return None
        now = [_rate(group) for group in groups[: len(self._built)]]
        suspects = [
            (number, rate, built)
            for number, (rate, built) in enumerate(zip(now, self._built, strict=False))
            if rate < _SMALL * built and "initial_lr" not in groups[number]
        ]
        if not suspects:
            self._built = []
            return None
        self._still = 0 if any(rate > last for rate, last in zip(now, self._last, strict=False)) else self._still + 1
        self._last = now
        if self._still < _STILL_ROUNDS:
            return None
        self._built = []
        number, rate, built = suspects[0]
        return (
            f"the learning rate of inner group {number} is {rate:g}; it was built with {built:g}, and no scheduler of "
            "torch lowered it. If the script writes its own rate into param_groups, write the optimizer's (Muon's is "
            "about 10 times AdamW's) there, and likewise wherever the script has a rate, such as min_lr"
        )


def _rate(group: dict[str, Any]) -> float:
    return float(group.get("lr", 0.0))
