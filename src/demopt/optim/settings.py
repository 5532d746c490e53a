"""The hyper-parameters of a parameter group: their names, their allowed values, and the errors for others."""

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch

from demopt.core.aggregate import REDUCTIONS
from demopt.core.chunk import CHUNKINGS
from demopt.core.exact import TRANSFORMS as EXACT_TRANSFORMS
from demopt.core.limits import check_number
from demopt.core.names import suggestion
from demopt.core.transform import TRANSFORMS
from demopt.core.update import rule_of
from demopt.optim.keywords import COMMON, refuse, without_switches
from demopt.wire.bits import index_code
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

    Examples:
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
            known = _CHOICES[name]
            raise ValueError(
                f"{name} is {value!r}; choose one of {', '.join(map(repr, known))}{suggestion(value, known)}"
            )
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

    Examples:
        >>> check_names({"params": [], "topk": 8})
        Traceback (most recent call last):
        TypeError: a parameter group of DeMo has no topk; give top_k=...
    """
    for name in without_switches(group):
        if name in COMMON:
            raise TypeError(f"a parameter group of DeMo has no {name}, which holds for all: give it to DeMo itself")
        if name not in NAMES and name not in ("params", "param_names", "name", "initial_lr"):
            refuse(name, NAMES, "a parameter group of DeMo")


def check_caller() -> None:
    """Raises TypeError inside torch's ZeroRedundancyOptimizer: its ranks have different parameters, often of one shape.

    Examples:
        >>> check_caller()
    """
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_code.co_filename.endswith("zero_redundancy_optimizer.py"):
            raise TypeError(
                "ZeroRedundancyOptimizer gives each rank a part of the parameters, and DeMo wants the same ones on all "
                "ranks; give DeMo all of the model's parameters, without ZeroRedundancyOptimizer"
            )
        frame = frame.f_back


def check_arguments(unknown: Mapping[str, Any]) -> None:
    """Raises TypeError for arguments of DeMo's constructor that it does not have, if they ask for anything.

    Examples:
        >>> check_arguments({"fused": False, "foreach": None})
        >>> check_arguments({"fused": True})
        Traceback (most recent call last):
        TypeError: DeMo has no fused; it takes its compiled kernels by itself where they fit; leave fused out
    """
    for name in without_switches(unknown):
        refuse(name, ("params", *NAMES, *COMMON))


def plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group as checkpoints hold it: its rule as text, and without torch's switches that are off.

    Examples:
        >>> from demopt.core.update import Lion
        >>> plain({"lr": 0.1, "update": Lion(beta1=0.5), "fused": None})
        {'lr': 0.1, 'update': 'lion(beta1=0.5, beta2=0.99)'}
    """
    found = without_switches(group)
    return {**found, "update": str(rule_of(found["update"]))} if "update" in found else found


#: (base_momentum, max_momentum) of torch's OneCycleLR and CyclicLR, which cycle momentum unless told otherwise.
_CYCLES_UNASKED = ((0.85, 0.95), (0.8, 0.9))


def keep_momentum(groups: list[dict[str, Any]], momenta: list[float]) -> str:
    """Undoes what OneCycleLR or CyclicLR do to `momentum` if nobody asked; returns what to say, if it undid anything.

    They write their own defaults, which are SGD's, into the groups of every optimizer that has a momentum, with the
    limits that they cycle between. Limits that the user gives are a wish, and stay. `momenta`: of before, by group.

    Examples:
        >>> group = {"momentum": 0.95, "base_momentum": 0.85, "max_momentum": 0.95}
        >>> keep_momentum([group], [0.99])[:46], group["momentum"]
        ('a scheduler (OneCycleLR, CyclicLR) would cycle', 0.99)
    """
    said = ""
    for group, before in zip(groups, momenta, strict=False):
        limits = group.get("base_momentum"), group.get("max_momentum")
        if limits in _CYCLES_UNASKED and group["momentum"] != before:
            group["momentum"] = before
            said = (
                "a scheduler (OneCycleLR, CyclicLR) would cycle the momentum of this optimizer, which nobody asked it "
                f"to; it stays {before}. Give the scheduler cycle_momentum=False; or, to have it cycled, base_momentum "
                "and max_momentum"
            )
    return said


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
    chunk x chunk elements, with the length. If K coefficients with their positions take as many bits as all N values
    without, it keeps all N, so that no chunk takes more bits than its dense values.

    Examples:
        >>> group = {"chunk": 64, "chunking": "padded", "values": "float32"}
        >>> [keep_count(32, group, length) for length in (4096, 64)]
        [32, 1]
        >>> [keep_count(top_k, {**group, "values": "sign"}, 4096) for top_k in (768, 769)]  # 4095 and 4099 bits
        [768, 4096]
        >>> keep_count(32, {**group, "chunking": "divisor"}, 64)
        32
    """
    if group["chunking"] == "divisor":
        return min(top_k, length)
    keep = min(length, max(1, math.floor(top_k * length / group["chunk"] ** 2 + 0.5)))
    value_bits = CODECS[group["values"]].bits
    return length if index_code(keep, length).bits + keep * value_bits >= length * value_bits else keep
