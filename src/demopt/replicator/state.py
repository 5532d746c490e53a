"""The state of parameters: what is saved of one, and the replicator's entries, views of a wiring's buffers."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
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
_OF_WEIGHTS = ("global", "local", "start", "local_steps", "transform")  # of LocalDeMo
_OWN = ("momentum", "local", "start", SAVED_BY, *_OF_OWNERS)
# An entry of LocalDeMo is its inner optimizer's, too, which may have a "step" or "momentum" there. So the replicator's
# parts have other names in it: name in LocalDeMo -> name in the replicator. All others are the inner optimizer's.
_FROM_LOCAL = {"error": "momentum", "round": "step", **{f"outer_{name}": name for name in RULE_STATE}}
_FROM_LOCAL |= {name: name for name in (*_OF_WEIGHTS, SAVED_BY, *_OF_OWNERS)}
_TO_LOCAL = {name: in_local for in_local, name in _FROM_LOCAL.items()}


@dataclass(frozen=True)
class SavedParameter:
    """What an optimizer's state holds of one parameter: equal on all ranks, one rank's, and its inner optimizer's."""

    shared: dict[str, Any]
    own: dict[str, Any]
    inner: dict[str, Any]

    @staticmethod
    def of(entry: Mapping[str, Any]) -> SavedParameter:
        """Reads an entry of the state of a DeMo, which has a momentum, or LocalDeMo, which has global weights."""
        if "global" not in entry and "momentum" not in entry:  # of neither: another optimizer's
            return SavedParameter({}, {}, dict(entry))
        names = _FROM_LOCAL if "global" in entry else {name: name for name in entry}
        known = {names[given]: value for given, value in entry.items() if given in names}
        own = {name: value for name, value in known.items() if name in _OWN}
        shared = {name: value for name, value in known.items() if name not in _OWN}
        return SavedParameter(shared, own, {name: value for name, value in entry.items() if name not in names})

    def entry(self) -> dict[str, Any]:
        """Writes it as an entry of a state."""
        entry = {**self.inner, **{self.name_there(name): value for name, value in {**self.shared, **self.own}.items()}}
        if SAVED_BY in entry:
            entry[SAVED_BY] = torch.tensor([*entry[SAVED_BY].tolist()[:4], len(entry)], device="cpu")
        return entry

    def name_there(self, name: str) -> str:
        """Returns the name that the entry has for a shared or own part."""
        return _TO_LOCAL[name] if "global" in self.shared else name

    @property
    def of_replicator(self) -> dict[str, Any]:
        """The replicator's part."""
        return {name: each for name, each in {**self.shared, **self.own}.items() if name not in _OF_WEIGHTS}

    def shared_entry(self) -> dict[str, Any]:
        """What of the entry is equal on all ranks."""
        return SavedParameter(self.shared, {}, {}).entry()


def attach(state: State, wiring: Wiring, round_number: Tensor) -> None:
    """Moves each parameter's state into the wiring's buffers, of which it becomes a view.

    A parameter that does not train has no state, unless it has trained before. `round_number` is the counter that all
    entries share; it takes the newest of theirs.
    """
    entries = {parameter: state.get(parameter, {}) for parameter in wiring.parameters}
    counters = [torch.as_tensor(entry["step"], device="cpu") for entry in entries.values() if "step" in entry]
    round_number.copy_(max(counters, default=round_number))
    for parameter, entry in entries.items():
        if entry and parameter.requires_grad:
            state[parameter] = {}
        elif entry:  # apart from the old buffer, which nothing else needs any more
            own = {name: entry[name].clone() for name in ("momentum", *RULE_STATE) if name in entry}
            state[parameter] = {**entry, **own}
    for chunk_group in wiring.chunk_groups:
        for name, buffer in (("momentum", chunk_group.momentum), *chunk_group.rule_state.items()):
            for parameter, rows in chunk_group.rows(buffer):
                _copy_into(entries[parameter].get(name), rows)
                state.setdefault(parameter, {})[name] = _alone_in_storage(rows)
    _attach_owners(state, entries, wiring)
    rank_and_size = wiring.inputs.rank, wiring.inputs.world_size
    for parameter in wiring.parameters:
        if state.get(parameter):
            entry = state[parameter]
            entry |= {"step": round_number, SAVED_BY: None}  # which counts as an entry, too
            entry[SAVED_BY] = torch.tensor([*rank_and_size, *shard_of(parameter), len(entry)], device="cpu")


def _attach_owners(state: State, entries: Mapping[Tensor, dict[str, Any]], wiring: Wiring) -> None:
    """The same for this rank's errors as an owner; those of chunks that it owns no more go into its momentum."""
    rank_and_size = wiring.inputs.rank, wiring.inputs.world_size
    owned = dict(wiring.route.owner_state())
    kept = {parameter for parameter, own in owned.items() if _keeps(entries[parameter], own, rank_and_size)}
    for parameter, entry in entries.items():
        if OWNER_ERROR in entry and parameter not in kept:
            # Rounds apply the mean over the ranks of now, so the error enters this rank's momentum that many times.
            start, error = int(entry[OWNER_START]), entry[OWNER_ERROR]
            state[parameter]["momentum"][start : start + len(error)].add_(error, alpha=rank_and_size[1])
            state[parameter] = {k: v for k, v in state[parameter].items() if k not in _OF_OWNERS}
    for parameter, own in owned.items():
        _copy_into(entries[parameter].get(OWNER_ERROR) if parameter in kept else None, own[OWNER_ERROR])
        state[parameter] |= {name: _alone_in_storage(value) for name, value in own.items()}


def _alone_in_storage(rows: Tensor) -> Tensor:
    """Returns the same memory as a tensor that is no view: a copy or file of a view would take the whole buffer along.

    Elsewhere than on a CPU, `state_dict` copies views.
    """
    return torch.from_dlpack(rows) if rows.is_cpu and rows.numel() else rows  # type: ignore[attr-defined]


def _keeps(entry: Mapping[str, Any], own: Mapping[str, Tensor], rank_and_size: tuple[int, int]) -> bool:
    """Whether this rank owned the same chunks of a parameter before."""
    if OWNER_ERROR not in entry or SAVED_BY not in entry:
        return False
    same = int(entry[OWNER_START]) == int(own[OWNER_START]) and entry[OWNER_ERROR].shape == own[OWNER_ERROR].shape
    return same and tuple(entry[SAVED_BY][:2].tolist()) == rank_and_size


def _copy_into(value: Tensor | None, rows: Tensor) -> None:
    """Copies an earlier value into its new place; zeros if there is none or its shape differs."""
    if value is None or value.shape != rows.shape:
        rows.zero_()
    elif value.data_ptr() != rows.data_ptr():  # otherwise the buffer was handed over
        rows.copy_(value)
