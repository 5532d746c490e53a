"""The hyper-parameters of a parameter group: their names, their allowed values, and the errors for others."""

import math
from typing import Any

import torch

from demopt.core.aggregate import REDUCTIONS
from demopt.core.chunk import CHUNKINGS
from demopt.core.exact import TRANSFORMS as EXACT_TRANSFORMS
from demopt.core.transform import TRANSFORMS
from demopt.core.update import UPDATES
from demopt.wire.values import CODECS, VALUES, Stepped

GRADIENT_SCALES = ("ema", "lr")

#: Hyper-parameters that determine the momentum's shape or meaning, and so cannot change once a group exists.
FIXED = ("chunk", "transform", "chunking")

_CHOICES = {
    "transform": tuple(TRANSFORMS),
    "update": UPDATES,
    "reduction": REDUCTIONS,
    "values": VALUES,
    "gradient_scale": GRADIENT_SCALES,
    "chunking": CHUNKINGS,
}
_NUMBERS = {  # name: (lowest, highest, is the highest allowed, is the lowest allowed)
    "lr": (0.0, math.inf, False, True),
    "momentum": (0.0, 1.0, False, True),
    "alpha": (0.0, 1.0, True, False),
    "weight_decay": (0.0, math.inf, False, True),
    "beta1": (0.0, 1.0, False, True),
    "beta2": (0.0, 1.0, False, True),
    "eps": (1e-30, math.inf, False, True),  # smaller ones vanish in float32
}
_COUNTS = ("top_k", "relay_top_k", "chunk")

NAMES = (*_NUMBERS, *_COUNTS, *_CHOICES, "exact", "clip_to_median", "maximize")


def check(group: dict[str, Any]) -> None:
    """Raises ValueError or TypeError if a hyper-parameter of the group has a wrong type or value.

    Example:
        >>> check({"params": [], "top_k": 0})
        Traceback (most recent call last):
        ValueError: top_k is 0, but each chunk must keep at least 1 coefficient
    """
    for name, value in group.items():
        if name in _NUMBERS:
            _check_number(name, value)
        elif name in _COUNTS:
            _check_count(name, value)
        elif name in _CHOICES and value not in _CHOICES[name]:
            raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(repr, _CHOICES[name]))}")
        elif name in ("maximize", "clip_to_median") and not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; give True or False")
        elif name == "exact" and value not in (True, False, None):
            raise TypeError(f"exact is {value!r}; give True, False, or None (where it is possible)")
    if group.get("exact") is True:
        _check_exact(group)


def check_names(group: dict[str, Any]) -> None:
    """Raises TypeError if a user's parameter group has a key that is not a hyper-parameter.

    Example:
        >>> check_names({"params": [], "topk": 8})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        TypeError: a parameter group has the unknown key 'topk'; known are lr, momentum, alpha, ...
    """
    for name in group:
        if name not in NAMES and name not in ("params", "param_names", "name", "initial_lr"):
            known = f"{', '.join(NAMES[:-1])} and {NAMES[-1]}"
            raise TypeError(f"a parameter group has the unknown key {name!r}; known are {known}")


def _check_number(name: str, value: Any) -> None:
    low, high, high_allowed, low_allowed = _NUMBERS[name]
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}; give a number") from None
    above = number > low or (low_allowed and number == low)
    below = number < high or (high_allowed and number == high)
    if not (above and below):
        interval = f"{'[' if low_allowed else '('}{low:g}, {high:g}{']' if high_allowed else ')'}"
        raise ValueError(f"{name} is {value!r}; it must lie in {interval}")


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; give a whole number")
    if value < 1:
        what = (
            "each chunk must keep at least 1 coefficient"
            if name.endswith("top_k")
            else "chunks have at least 1 element"
        )
        raise ValueError(f"{name} is {value}, but {what}")


def _check_exact(group: dict[str, Any]) -> None:
    """Raises ValueError if a group with exact=True cannot be decoded in integers."""
    if not isinstance(CODECS[group["values"]], Stepped):
        raise ValueError(
            f"exact=True needs integers on the wire: values 'sign', '2-bit' or 'int8', not {group['values']!r}"
        )
    if group["transform"] not in EXACT_TRANSFORMS:
        raise ValueError(
            f"exact=True has no integer basis for transform {group['transform']!r}; use 'dct' or 'hadamard'"
        )


def is_exact(group: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether the inverse path runs in integers: if it can and exact is not False."""
    if dtype == torch.float64:
        if group["exact"] is True:
            raise ValueError("exact=True computes in float32; use exact=None or False for float64 parameters")
        return False
    possible = isinstance(CODECS[group["values"]], Stepped) and group["transform"] in EXACT_TRANSFORMS
    return possible and group["exact"] is not False


def keep_count(top_k: int, group: dict[str, Any], length: int) -> int:
    """Returns K for a chunk of `length` elements, under the group's chunk, chunking and values.

    "divisor" keeps top_k for any length, as the published code does. "padded" scales top_k, which is meant for
    chunk x chunk elements, with the length. If K coefficients with their indices would take as many bits as all N
    values without, it keeps all N, so that no chunk takes more bits than its dense values.

    Example:
        >>> group = {"chunk": 64, "chunking": "padded", "values": "float32"}
        >>> [keep_count(32, group, length) for length in (4096, 64)]
        [32, 1]
        >>> keep_count(32, {**group, "chunking": "divisor"}, 64)
        32
    """
    if group["chunking"] == "divisor":
        return min(top_k, length)
    keep = min(length, max(1, math.floor(top_k * length / group["chunk"] ** 2 + 0.5)))
    index_bits, value_bits = (length - 1).bit_length(), CODECS[group["values"]].bits
    return length if keep * (index_bits + value_bits) >= length * value_bits else keep
