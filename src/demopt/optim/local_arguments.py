"""The arguments of LocalDeMo, and the errors for those that cannot be used."""

from collections.abc import Mapping
from typing import Any

import torch

from demopt.core.limits import check_number
from demopt.optim.demo import DeMo
from demopt.optim.gradients import check_parameters
from demopt.optim.keywords import LOCAL_ANSWERS, refuse
from demopt.optim.local_parts import LocalParts

_CODEC_SETTINGS = (
    "alpha", "chunk", "transform", "values", "reduction", "exact", "clip_to_median", "relay_top_k", "route",
    "fingerprint_every", "kernels",
)  # fmt: skip
_ARGUMENTS = (
    "inner", "sync_every", "top_k", "error_decay", "outer_lr", "outer_momentum", "delay", "process_group",
    *_CODEC_SETTINGS,
)  # fmt: skip


_SYNCHRONISING = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")  # of torch.distributed, not imported here


def answered(top_k: int) -> int:
    """Returns how many coefficients an owner sends back on route relay: an answer is then about 1.4 messages long.

    Examples:
        >>> answered(224)
        336
    """
    return max(1, 3 * top_k // 2)


def check_settings(settings: Mapping[str, Any], error_decay: Any, outer_lr: Any, outer_momentum: Any) -> None:
    """Raises TypeError or ValueError for those that LocalDeMo does not have; DeMo checks the values of `settings`.

    Examples:
        >>> check_settings({"route": "gather"}, error_decay=0.5, outer_lr=1.0, outer_momentum=0.0)
    """
    for name in settings:
        if name not in _CODEC_SETTINGS:
            refuse(name, _ARGUMENTS, "LocalDeMo", LOCAL_ANSWERS)
    if settings.get("route") == "owner":
        raise ValueError(
            "route 'owner' sends back signs, and a movement needs its sizes; use route 'auto', 'gather' or 'relay'"
        )
    check_number("error_decay", error_decay, high=1.0)
    check_number("outer_momentum", outer_momentum, high=1.0)
    check_number("outer_lr", outer_lr, open_low=True)


def checked_steps(sync_every: Any) -> int:
    """Returns H; ValueError if it is no number of steps.

    Examples:
        >>> checked_steps(0)
        Traceback (most recent call last):
        ValueError: sync_every is 0; give a number of steps from a round to the next, 1 or more
    """
    if not isinstance(sync_every, int) or isinstance(sync_every, bool) or sync_every < 1:
        raise ValueError(f"sync_every is {sync_every!r}; give a number of steps from a round to the next, 1 or more")
    return sync_every


def checked_inner(inner: Any) -> list[torch.optim.Optimizer]:
    """Returns the inner optimizers; TypeError or ValueError if they cannot take local steps.

    Examples:
        >>> len(checked_inner(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)))
        1
    """
    found = list(inner) if isinstance(inner, list | tuple) else [inner]
    for each in found:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(
                f"inner is a {type(each).__name__}; give a torch optimizer, such as "
                "torch.optim.AdamW(model.parameters(), lr=3e-4), or a list of them"
            )
        if isinstance(each, torch.optim.LBFGS):
            raise TypeError("inner is LBFGS, which evaluates the loss several times a step; give another optimizer")
        if isinstance(each, DeMo | LocalParts) or any(kind.__name__ in _SYNCHRONISING for kind in type(each).__mro__):
            raise TypeError(f"inner is a {type(each).__name__}, which synchronises the ranks itself; give a local one")
    if not found:
        raise ValueError("inner is an empty list; give at least one torch optimizer")
    holders: dict[int, int] = {}
    for number, each in enumerate(found):
        for group in each.param_groups:
            check_parameters(group["params"])
        for parameter in [p for group in each.param_groups for p in group["params"]]:
            if holders.setdefault(id(parameter), number) != number:
                raise ValueError(
                    f"inner[{holders[id(parameter)]}] and inner[{number}] both have a parameter of shape "
                    f"{list(parameter.shape)}; give each parameter to one optimizer"
                )
    return found
