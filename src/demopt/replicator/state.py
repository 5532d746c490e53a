"""The state of parameters: entries that are views of a wiring's buffers, and the rank that they belong to."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from demopt.core.rules import RULE_STATE
from demopt.exchange.dtensor import shard_of
from demopt.replicator.route import OWNER_ERROR, OWNER_START
from demopt.replicator.wiring import Wiring

State = MutableMapping[Tensor, dict[str, Any]]
SAVED_BY = "saved_by"  # in a parameter's state: the rank that it belongs to, world size, shard, shards, entries
_OF_OWNERS = (OWNER_ERROR, OWNER_START)


def attach(state: State, wiring: Wiring, round_number: Tensor) -> None:
    """Moves each parameter's state into the wiring's buffers, of which it becomes a view.

    A parameter that does not train has no state, unless it has trained before. `round_number` is the counter that all
    entries share; it takes the newest of theirs.
    """
    rank, world_size = wiring.inputs.rank, wiring.inputs.world_size
    before = {parameter: state.get(parameter, {}) for parameter in wiring.parameters}
    counters = [torch.as_tensor(entry["step"], device="cpu") for entry in before.values() if "step" in entry]
    round_number.copy_(max(counters, default=round_number))
    for parameter, entry in before.items():
        if entry and parameter.requires_grad:
            state[parameter] = {}
        elif entry:  # apart from the old buffer, which nothing else needs any more
            own = {name: entry[name].clone() for name in ("momentum", *RULE_STATE) if name in entry}
            state[parameter] = {**entry, **own}
    for chunk_group in wiring.chunk_groups:
        for name, buffer in (("momentum", chunk_group.momentum), *chunk_group.rule_state.items()):
            for parameter, rows in chunk_group.rows(buffer):
                _adopt(before[parameter].get(name), rows)
                state.setdefault(parameter, {})[name] = _apart(rows)
    mine = (rank, world_size)
    kept = {parameter: own for parameter, own in wiring.route.own_state() if _keeps(before[parameter], own, mine)}
    for parameter, entry in before.items():
        if OWNER_ERROR in entry and parameter not in kept:
            _hand_over(entry, state[parameter]["momentum"], world_size)
            state[parameter] = {k: v for k, v in state[parameter].items() if k not in _OF_OWNERS}
    for parameter, own in wiring.route.own_state():
        _adopt(before[parameter].get(OWNER_ERROR) if parameter in kept else None, own[OWNER_ERROR])
        state[parameter] |= {name: _apart(value) for name, value in own.items()}
    for parameter in wiring.parameters:
        if state.get(parameter):
            entry = state[parameter]
            entry |= {"step": round_number, SAVED_BY: None}
            entry[SAVED_BY] = torch.tensor([rank, world_size, *shard_of(parameter), len(entry)], device="cpu")


def _apart(rows: Tensor) -> Tensor:
    """Returns the same memory as a tensor of which a copy, or a file, takes no more than it holds.

    A view takes the whole buffer along. Elsewhere than on a CPU `state_dict` copies views.
    """
    return torch.from_dlpack(rows) if rows.is_cpu and rows.numel() else rows  # type: ignore[attr-defined]


def _keeps(entry: Mapping[str, Any], own: Mapping[str, Tensor], rank_and_size: tuple[int, int]) -> bool:
    """Whether this rank owned the same chunks of a parameter before."""
    if OWNER_ERROR not in entry or SAVED_BY not in entry:
        return False
    same = int(entry[OWNER_START]) == int(own[OWNER_START]) and entry[OWNER_ERROR].shape == own[OWNER_ERROR].shape
    return same and tuple(entry[SAVED_BY][:2].tolist()) == rank_and_size


def _hand_over(entry: Mapping[str, Any], momentum_CN: Tensor, world_size: int) -> None:
    """Moves an owner's error into its own momentum, W times as large, because rounds apply the mean over W ranks."""
    start, error = int(entry[OWNER_START]), entry[OWNER_ERROR]
    momentum_CN[start : start + len(error)].add_(error, alpha=world_size)


def _adopt(value: Tensor | None, rows: Tensor) -> None:
    """Copies an earlier value into its new place; zeros if there is none or its shape differs."""
    if value is None or value.shape != rows.shape:
        rows.zero_()
    elif value.data_ptr() != rows.data_ptr():  # otherwise the buffer was handed over
        rows.copy_(value)
