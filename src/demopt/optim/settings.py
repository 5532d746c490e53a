"""The hyper-parameters of a parameter group: their names, their allowed values, and the errors for others."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from demopt.core.aggregate import REDUCTIONS
from demopt.core.chunk import CHUNKINGS
from demopt.core.exact import TRANSFORMS as EXACT_TRANSFORMS
from demopt.core.limits import check_number
from demopt.core.transform import TRANSFORMS
from demopt.core.update import rule_of
from demopt.optim.keywords import COMMON, refuse, without_switches
from demopt.wire.values import CODECS, VALUES, Stepped

GRADIENT_SCALES = ("ema", "lr", "sum")

#: Hyper-parameters that determine the momentum's shape or meaning, and so cannot change once a group exists.
FIXED = ("chunk", "transform", "chunking")

_CHOICES = {
    "transform": tuple(TRANSFORMS),
    "reduction": REDUCTIONS,
    "values": VALUES,
    "gradient_scale": GRADIENT_SCALES,
    "chunking": CHUNKINGS,
}
_NUMBERS: dict[str, dict[str, Any]] = {  # name: its limits
    "lr": {},
    "momentum": {"high": 1.0},
    "alpha": {"high": 1.0, "open_low": True, "closed_high": True},
    "weight_decay": {},
}
_COUNTS = ("top_k", "relay_top_k", "chunk")

NAMES = (*_NUMBERS, *_COUNTS, "update", *_CHOICES, "exact", "clip_to_median", "maximize")


def check(group: dict[str, Any]) -> None:
    """Raises ValueError or TypeError if a hyper-parameter of the group has a wrong type or value.

    Example:
        >>> check({"params": [], "top_k": 0})
        Traceback (most recent call last):
        ValueError: top_k is 0, but each chunk must keep at least 1 coefficient
    """
    for name, value in group.items():
        if name in _NUMBERS:
            check_number(name, value, **_NUMBERS[name])
        elif name in _COUNTS:
            _check_count(name, value)
        elif name == "update":
            rule_of(value)
        elif name in _CHOICES and value not in _CHOICES[name]:
            raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(repr, _CHOICES[name]))}")
        elif name in ("maximize", "clip_to_median") and not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; give True or False")
        elif name == "exact" and value not in (True, False, None):
            raise TypeError(f"exact is {value!r}; give True, False, or None (where it is possible)")
    if "top_k" in group and "chunk" in group:
        _check_top_k(group["top_k"], group["chunk"])
    if group.get("exact") is True:
        _check_exact(group)


def check_names(group: Mapping[str, Any]) -> None:
    """Raises TypeError if a user's parameter group has a key that is not a hyper-parameter.

    Example:
        >>> check_names({"params": [], "topk": 8})
        Traceback (most recent call last):
        TypeError: a parameter group of DeMo has no topk; give top_k=...
    """
    for name in without_switches(group):
        if name in COMMON:
            raise TypeError(f"a parameter group of DeMo has no {name}, which holds for all: give it to DeMo itself")
        if name not in NAMES and name not in ("params", "param_names", "name", "initial_lr"):
            refuse(name, NAMES, "a parameter group of DeMo")


def check_arguments(unknown: Mapping[str, Any]) -> None:
    """Raises TypeError for arguments of DeMo's constructor that it does not have, if they ask for anything.

    Example:
        >>> check_arguments({"fused": False, "foreach": None})
        >>> check_arguments({"fused": True})
        Traceback (most recent call last):
        TypeError: DeMo has no fused; it takes its compiled kernels by itself where they fit; leave fused out
    """
    for name in without_switches(unknown):
        refuse(name, ("params", *NAMES, *COMMON))


def plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group as checkpoints hold it: its rule as text, and without torch's switches that are off.

    Example:
        >>> from demopt.core.update import Lion
        >>> plain({"lr": 0.1, "update": Lion(beta1=0.5), "fused": None})
        {'lr': 0.1, 'update': 'lion(beta1=0.5, beta2=0.99)'}
    """
    found = without_switches(group)
    return {**found, "update": str(rule_of(found["update"]))} if "update" in found else found


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


def _check_top_k(top_k: int, chunk: int) -> None:
    """Raises ValueError for more coefficients than a full chunk has."""
    if top_k > chunk * chunk:
        raise ValueError(
            f"top_k is {top_k}, but a {chunk} x {chunk} chunk has {chunk * chunk} coefficients; top_k={chunk * chunk} "
            "sends them all"
        )


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
