"""The check of a number that a user gave: one message for hyper-parameters of groups and of update rules."""

import math
from typing import Any


def check_number(
    name: str,
    value: Any,
    low: float = 0.0,
    high: float = math.inf,
    *,
    open_low: bool = False,
    closed_high: bool = False,
) -> float:
    """Returns the value as a float; TypeError if it is no number, ValueError if it is outside [low, high).

    `open_low` excludes the lower end, `closed_high` includes the upper one. A tensor of one element is a number.

    Examples:
        >>> check_number("momentum", 0, high=1.0)
        0.0
        >>> check_number("momentum", 1.0, high=1.0)
        Traceback (most recent call last):
        ValueError: momentum is 1.0; it must lie in [0, 1)
    """
    try:
        if isinstance(value, str):  # float() would read it
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # of a tensor with several elements
        raise TypeError(f"{name} is {value!r}; give a number") from None
    above = number > low if open_low else number >= low
    below = number <= high if closed_high else number < high
    if not (above and below):
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}{']' if closed_high else ')'}"
        raise ValueError(f"{name} is {value!r}; it must lie in {interval}")
    return number
