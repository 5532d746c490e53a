"""The optimizer's state: momentum and update rule's state, as views of the chunk groups' buffers, and one step counter.

Shapes: C chunks of one parameter, N elements in a chunk.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from demopt.core.update import RULE_STATE, rule_of
from demopt.optim.chunk_group import ChunkGroup, group_key
from demopt.optim.settings import FIXED

#: The entries of a parameter's state that are views of large buffers.
SHARED = ("momentum", "relay", *RULE_STATE)


def signature(groups: list[dict[str, Any]], team: Any) -> list[Any]:
    """Returns what determines chunk groups, layout and route; it is cheap enough to compare at every step."""
    return [
        (
            team,
            {name: group[name] for name in (*FIXED, "top_k", "relay_top_k", "values", "exact", "update")},
            [(id(p), p.dtype, p.device, p.requires_grad) for p in group["params"]],
        )
        for group in groups
    ]


def check_fixed(before: list[Any] | None, after: list[Any]) -> None:
    """Raises ValueError if a hyper-parameter that determines the momentum's layout changed."""
    for number, ((_, old, _), (_, new, _)) in enumerate(zip(before or [], after, strict=False)):
        for name in FIXED:
            if old[name] != new[name]:
                raise ValueError(
                    f"param_groups[{number}][{name!r}] was changed from {old[name]!r} to {new[name]!r}, but the "
                    "momentum is laid out by it; make a new optimizer instead"
                )


def attach(state: MutableMapping[Tensor, dict[str, Any]], chunk_groups: list[ChunkGroup]) -> Tensor:
    """Moves each parameter's state into its chunk group, of which it becomes a view; returns the step counter."""
    counters = [entry["step"] for entry in state.values() if "step" in entry]
    step = (
        torch.as_tensor(counters[0]).to("cpu", torch.int64).clone() if counters else torch.zeros((), dtype=torch.int64)
    )
    for chunk_group in chunk_groups:
        before = {parameter: state[parameter] for parameter, _ in chunk_group.members}
        for parameter, rows in chunk_group.momenta():
            _adopt(before[parameter], "momentum", rows)
            state[parameter] = {"momentum": rows, "step": step}
        for parameter, rows, first in chunk_group.relays():
            state[parameter] |= {"relay": rows, "relay_start": torch.tensor(first)}
            _adopt_relay(state[parameter], before[parameter])
        for name, tensor in chunk_group.rule_state.items():  # after a change of rule: zeros
            for parameter, rows in chunk_group.rows(tensor):
                _adopt(before[parameter], name, rows)
                state[parameter][name] = rows
    return step


def restore(entry: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Copies a parameter's saved state into its chunk group's buffers, in their dtype."""
    for name in SHARED:
        if name in entry and name != "relay":
            _adopt(saved, name, entry[name])
    if "relay" in entry:
        _adopt_relay(entry, saved)


def _adopt(old: Mapping[str, Any], name: str, rows: Tensor) -> None:
    """Copies an earlier value into its new place; zeros if there is none or its shape differs."""
    value = old.get(name)
    if value is not None and value.shape == rows.shape:
        rows.copy_(value)
    else:
        rows.zero_()


def _adopt_relay(entry: dict[str, Any], old: Mapping[str, Any]) -> None:
    """Copies what this rank kept back for chunks that it still owns; zeros for chunks that another rank owned."""
    rows, start = entry["relay"], int(entry["relay_start"])
    rows.zero_()
    if "relay" not in old or "relay_start" not in old or old["relay"].shape[1:] != rows.shape[1:]:
        return
    value, first = old["relay"], int(old["relay_start"])
    low, high = max(start, first), min(start + len(rows), first + len(value))
    if low < high:
        rows[low - start : high - start].copy_(value[low - first : high - first])


def replicated(state: Mapping[Tensor, dict[str, Any]]) -> list[Tensor]:
    """Returns the update rules' state of all parameters, which must be the same on all ranks.

    Example:
        >>> replicated({torch.zeros(1): {"momentum": torch.zeros(1, 1), "velocity": torch.ones(1, 1)}})
        [tensor([[1.]])]
    """
    return [entry[name] for entry in state.values() for name in RULE_STATE if name in entry]


def loadable(state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Returns the saved states by parameter number; ValueError if one is missing or does not fit this model."""
    saved: dict[int, dict[str, Any]] = {}
    number = 0
    for index, (group, saved_group) in enumerate(zip(groups, state_dict["param_groups"], strict=False)):
        merged = {
            **group,
            **{name: saved_group[name] for name in group if name in saved_group and name != "params"},
        }
        for parameter, key in zip(group["params"], saved_group["params"], strict=False):
            entry, (kind, whole) = state_dict["state"].get(key, {}), group_key(parameter, index, merged)
            rule, where = rule_of(merged["update"]), f"{number} (shape {list(parameter.shape)})"
            for name in ("momentum", *rule.state_names()):
                if name == "momentum" or name in entry:  # a rule that was just chosen has no state yet
                    side = 1 if name in rule.weights else kind.length
                    _check_shape(entry.get(name), name, (whole.chunks, side), where)
            saved[number] = state_dict["state"][key]
            number += 1
    return saved


def _check_shape(found: Any, name: str, expected: tuple[int, int], parameter: str) -> None:
    if not isinstance(found, Tensor) or tuple(found.shape) != expected:
        came = list(found.shape) if isinstance(found, Tensor) else "none"
        raise ValueError(
            f"the state of parameter {parameter} should hold a {name} of shape {list(expected)}, but holds {came}: it "
            "was saved by another optimizer or for another model"
        )


def unshared(state: Mapping[Tensor, dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """Returns a copy whose tensors do not share storage: pickle would write a shared buffer once per parameter."""
    return {
        parameter: {name: value.clone() if name in SHARED else value for name, value in entry.items()}
        for parameter, entry in state.items()
    }
