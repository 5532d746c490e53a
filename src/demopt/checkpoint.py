"""Checkpoints with torch.distributed.checkpoint: per-rank state under keys of each rank, shared state once.

    state = {"model": model, "optimizer": OptimizerState(optimizer)}
    dcp.save(state, checkpoint_id=path)  # or dcp.async_save
    dcp.load(state, checkpoint_id=path, planner=LoadPlanner())

Keys, after the name that the state has in the checkpoint: "rank1.state.0.momentum" is rank 1's momentum of
parameter 0; "state.0.step" is shared. If a parameter is sharded inside a node (FSDP2), a plain tensor has the number of
the shard before "state": "rank1.shard0.state.0.momentum".
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from demopt.exchange.dtensor import shard_of
from demopt.optim.demo import DeMo
from demopt.optim.local_demo import LocalDeMo
from demopt.state.reshard import StateDict, shares
from demopt.state.saved import among, is_own, own_part

__all__ = ["LoadPlanner", "OptimizerState"]

_KEY = re.compile(r"(?:rank(\d+)\.)?(?:shard(\d+)\.)?state\.(\d+)\.(.+)")
_NAMES = re.compile(r"rank(\d+)\.shard(\d+)\.names")  # of the values that a process alone keeps, as JSON
_ADVICE = "give dcp.load planner=demopt.checkpoint.LoadPlanner()"


class OptimizerState:
    """The state of a `DeMo` or `LocalDeMo` in torch.distributed.checkpoint (DCP), which takes it as a `Stateful`.

    Each rank saves and loads its part, bit for bit. Give `async_save` a separate gloo group. `dcp.load` needs a
    `LoadPlanner` for a new LocalDeMo, whose inner optimizers have no state yet, and for more or fewer ranks than saved.

    Raises:
        ValueError, when loading: a key of the checkpoint was not requested; the text names the `LoadPlanner`.

    Examples:
        >>> import demopt
        >>> optimizer = demopt.DeMo([torch.nn.Parameter(torch.zeros(2, 2))])
        >>> [key for key in OptimizerState(optimizer).state_dict() if key.endswith(("momentum", "step"))]
        ['rank0.state.0.momentum', 'state.0.step']
    """

    def __init__(self, optimizer: DeMo | LocalDeMo) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Returns the entries that this rank saves, by key; when loading, those that DCP fills in."""
        rank, world_size = self._optimizer.replicator.rank_and_size
        state = own_part(self._optimizer.state_dict(), rank, world_size)
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        found = _Entries(rank, world_size, parameters)
        found["world_size"], found["param_groups"] = world_size, state["param_groups"]
        names = []
        for number, entry in state["state"].items():
            for name, value in entry.items():
                owner = rank if is_own(name, entry) else None
                found[_key(parameters[number], number, name, value, owner)] = value
                names += [f"{number}.{name}"] if owner is not None else []
        found[_own_key(rank, parameters, "names")] = json.dumps(names)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the entries that DCP filled in; if other ranks saved them, this rank's share, with a warning."""
        rank, world_size = self._optimizer.replicator.rank_and_size
        before = state_dict["world_size"]
        states: dict[int, StateDict] = {
            owner: {"state": {}, "param_groups": state_dict["param_groups"]} for owner in range(before)
        }
        wanted = {owner: set[str]() for owner in range(before)}
        for key, value in state_dict.items():
            if match := _NAMES.fullmatch(key):
                wanted[int(match[1])] |= set(json.loads(value))
            elif match := _KEY.fullmatch(key):
                for owner in range(before) if match[1] is None else [int(match[1])]:
                    states[owner]["state"].setdefault(int(match[3]), {})[match[4]] = value
        for owner in shares(rank, world_size, before):
            there = {f"{number}.{name}" for number, entry in states[owner]["state"].items() for name in entry}
            if not wanted[owner] or not wanted[owner] <= there:
                raise ValueError(
                    f"the checkpoint, which {before} ranks saved, has more of rank {owner} than rank {rank} of "
                    f"{world_size} has asked for; {_ADVICE}"
                )
        self._optimizer.load_state_dict(among(states, rank, world_size, before))


class LoadPlanner(DefaultLoadPlanner):
    """A planner for `dcp.load` that requests the checkpoint's keys of each `OptimizerState`, not its present ones.

    So a new LocalDeMo gets its inner states, and each of more or fewer ranks its share. All other objects are loaded as
    by DCP's default planner, whose arguments it takes.

    Examples:
        >>> LoadPlanner(allow_partial_load=True).allow_partial_load
        True
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Adds the missing keys, with new tensors to load into; called by DCP."""
        for prefix, entries in _inside(state_dict, ""):
            known = metadata.state_dict_metadata if metadata is not None else {}
            entries.ask({key.removeprefix(prefix): known[key] for key in known if key.startswith(prefix)})
        super().set_up_planner(state_dict, metadata, is_coordinator)


class _Entries(dict[str, Any]):
    """The entries of an OptimizerState, by key."""

    def __init__(self, rank: int, world_size: int, parameters: list[Tensor]) -> None:
        super().__init__()
        self._rank, self._world_size, self._parameters = rank, world_size, parameters

    def ask(self, known: Mapping[str, Any]) -> None:
        """Replaces the keys of ranks by those that this rank needs of a checkpoint that has the keys `known`."""
        saved_by = {int(match[1]) for match in map(_NAMES.fullmatch, known) if match}
        needed = shares(self._rank, self._world_size, len(saved_by)) if saved_by else {}
        same = len(saved_by) == self._world_size
        for key in [key for key in self if key.startswith("rank") and not (same and key in known)]:
            del self[key]
        for key, about in known.items():
            if key in self:
                continue
            if match := _NAMES.fullmatch(key):
                if int(match[1]) in needed and key == _own_key(int(match[1]), self._parameters, "names"):
                    self[key] = ""
            elif match := _KEY.fullmatch(key):
                number, name = int(match[3]), match[4]
                owner = None if match[1] is None else int(match[1])
                if (owner is None or owner in needed) and number < len(self._parameters):
                    value = self._room(number, about, match[2] is None)
                    if key == _key(self._parameters[number], number, name, value, owner):  # of this shard
                        self[key] = value

    def _room(self, number: int, about: Any, whole: bool) -> Any:
        """Returns the value that an entry of the state is loaded into; `whole`: its key has no number of a shard."""
        if not isinstance(about, TensorStorageMetadata):
            return None
        parameter, dtype = self._parameters[number].detach(), about.properties.dtype
        if whole and shard_of(parameter)[1] > 1 and about.size == parameter.shape:
            return torch.empty_like(parameter, dtype=dtype)
        return torch.empty(about.size, dtype=dtype, device="cpu" if not about.size else parameter.device)


def _key(parameter: Tensor, number: int, name: str, value: Any, owner: int | None) -> str:
    shard, shards = shard_of(parameter)
    rank = "" if owner is None else f"rank{owner}."
    local = shards > 1 and not hasattr(value, "placements")
    return f"{rank}{f'shard{shard}.' if local else ''}state.{number}.{name}"


def _own_key(rank: int, parameters: list[Tensor], name: str) -> str:
    shard = max((shard_of(parameter)[0] for parameter in parameters), default=0)
    return f"rank{rank}.shard{shard}.{name}"


def _inside(state_dict: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, _Entries]]:
    """Yields every OptimizerState's entries in a state dict, with the prefix that DCP gives their keys."""
    for key, value in state_dict.items():
        if isinstance(value, _Entries):
            yield f"{prefix}{key}.", value
        elif isinstance(value, Mapping):
            yield from _inside(value, f"{prefix}{key}.")
