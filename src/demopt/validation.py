"""Checks of arguments, and warnings that point at the user's line.

Every error names the given value, the allowed ones and, for a misspelt name, the closest known one.
"""

import contextlib
import difflib
import operator
import sys
import warnings
from collections.abc import Iterable, Mapping
from math import inf, nan
from pathlib import Path
from typing import Any


def check_number(
    name: str, value: Any, low: float = 0.0, high: float = inf, *, open_low: bool = False, closed_high: bool = False
) -> float:
    """Returns the value as a float; TypeError if it is not a number, ValueError if it is outside [low, high).

    `open_low` excludes the lower end, `closed_high` includes the upper one. A tensor with one element is a number.
    """
    try:
        if isinstance(value, str | bytes | bytearray | bool):  # float() would take it
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several elements
        raise TypeError(f"{name} is {value!r}; give a number") from None
    except OverflowError:  # a whole number that is beyond all floats, so in no interval
        number = nan
    above = number > low if open_low else number >= low
    below = number <= high if closed_high else number < high
    if not (above and below):
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}{']' if closed_high else ')'}"
        raise ValueError(f"{name} is {value!r}; it must lie in {interval}")
    return number


def check_count(name: str, value: Any, low: int = 1, high: int | None = None) -> int:
    """Returns a whole number from `low` to `high`; TypeError or ValueError otherwise."""
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)  # also of numpy, and of a tensor with one element
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} is {value!r}; give a whole number") from None
    if count < low:
        raise ValueError(f"{name} is {count}; it must be at least {low}")
    if high is not None and count > high:
        raise ValueError(f"{name} is {count}; it must be at most {high}")
    return count


def check_yes_or_no(name: str, value: Any) -> bool:
    """Returns the value; TypeError if it is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; give True or False")
    return value


def check_rank(name: str, value: Any, world_size: int) -> None:
    """Raises TypeError or ValueError unless a value is the number of a rank."""
    if check_count(name, value, low=0) >= world_size:
        raise ValueError(f"{name} is {value}; there are ranks 0 to {world_size - 1}")


def check_choice(name: str, value: Any, known: Iterable[str]) -> Any:
    """Returns the value; ValueError unless it is one of the known names."""
    known = tuple(known)
    if not (isinstance(value, str) and value in known):
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(repr, known))}{suggestion(value, known)}")
    return value


def suggestion(name: object, known: Iterable[str]) -> str:
    """Returns the end of an error about an unknown name: the closest known name, or nothing. Ignores case."""
    if not isinstance(name, str):
        return ""
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower, 1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Returns the first name whose values differ, and both ("nothing" for an absent one); None if all are equal."""
    for name in {**one, **other}:
        if one.get(name, "nothing") != other.get(name, "nothing"):
            return name, one.get(name, "nothing"), other.get(name, "nothing")
    return None


def warn(text: str) -> None:
    """Issues a UserWarning that points at the nearest caller outside demopt and torch."""
    import torch

    # torch wraps `step` and functions without gradients, so its frames also lie between the user's line and ours
    inside = (str(Path(__file__).parent), str(Path(torch.__file__).parent), contextlib.__file__)
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
