"""The saved state of LocalDeMo: the inner optimizers' entries, and beside them the codec's and the weights.

An entry has, besides what the inner optimizer keeps: "shared" weights; "error" and "round", the codec's momentum and
step; "outer_..." for the codec's other state; "local_steps"; and, where this rank's weights are not the shared ones,
"own" and "start"; and "saved_by" (states.py).
"""

from collections.abc import Mapping
from typing import Any

import torch

from demopt.optim.reshard import SAVED_BY

Entry = dict[str, Any]
_NEEDED = ("shared", "error", "round", "local_steps")
_ADDED = (*_NEEDED, "own", "start", SAVED_BY)
_OUTER = "outer_"


def pack_inner(inner: list[torch.optim.Optimizer]) -> tuple[list[Entry], dict[int, Entry]]:
    """Returns all optimizers' groups and states, with parameters numbered from the first to the last.

    Examples:
        >>> parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        >>> groups, state = pack_inner([torch.optim.SGD([parameter], lr=0.1) for parameter in parameters])
        >>> [group["params"] for group in groups], state
        ([[0], [1]], {})
    """
    state: dict[int, Entry] = {}
    groups: list[Entry] = []
    count = 0
    for each in inner:
        packed = each.state_dict()
        numbers = [number for group in packed["param_groups"] for number in group["params"]]
        moved = {number: count + place for place, number in enumerate(numbers)}
        groups += [{**g, "params": [moved[number] for number in g["params"]]} for g in packed["param_groups"]]
        state |= {moved[number]: dict(entry) for number, entry in packed["state"].items()}
        count += len(numbers)
    return groups, state


def check(groups: list[Entry], state: Mapping[int, Entry], mine: list[Entry]) -> list[int]:
    """Returns the saved parameters' numbers, in the order of the groups `mine`; ValueError if they do not fit."""
    sizes = [[len(group["params"]) for group in each] for each in (groups, mine)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the state has parameter groups of {sizes[0]} parameters, this optimizer of {sizes[1]}")
    numbers = [number for group in groups for number in group["params"]]
    for number, parameter in zip(numbers, [p for group in mine for p in group["params"]], strict=True):
        entry = state.get(number, {})
        if not set(_NEEDED) <= set(entry):
            raise ValueError(
                f"the state of parameter {number} has no shared weights and error: another optimizer saved it"
            )
        came = [list(entry[name].shape) for name in ("shared", "own", "start") if name in entry]
        if came != [list(parameter.shape)] * len(came):
            raise ValueError(
                f"the state of parameter {number} has shapes {came}, the parameter {list(parameter.shape)}"
            )
    return numbers


def from_codec(entry: Entry) -> Entry:
    """Returns a parameter's state in the codec, in the words of LocalDeMo.

    Examples:
        >>> from_codec({"momentum": 1, "step": 2, "velocity": 3})
        {'error': 1, 'round': 2, 'outer_velocity': 3}
    """
    names = {"momentum": "error", "step": "round", SAVED_BY: SAVED_BY}
    return {names.get(name, f"{_OUTER}{name}"): value for name, value in entry.items()}


def of_codec(state: Mapping[int, Entry], numbers: list[int]) -> dict[int, Entry]:
    """Returns the codec's part of saved states, by place: the inverse of `from_codec`."""
    found = {}
    for place, number in enumerate(numbers):
        saved = state[number]
        outer = {name.removeprefix(_OUTER): value for name, value in saved.items() if name.startswith(_OUTER)}
        found[place] = {"momentum": saved["error"], "step": saved["round"], **outer}
        if SAVED_BY in saved:
            found[place][SAVED_BY] = saved[SAVED_BY]
    return found


def of_inner(entry: Entry) -> Entry:
    """Returns the inner optimizer's part of a parameter's saved state."""
    return {name: value for name, value in entry.items() if name not in _ADDED and not name.startswith(_OUTER)}
