"""Checkpoints with torch.distributed.checkpoint (DCP): the state of each rank, whole, under keys of its own.

    state = {"model": model, "optimizer": OptimizerState(optimizer)}
    dcp.save(state, checkpoint_id=path)  # or dcp.async_save
    dcp.load(state, checkpoint_id=path)  # planner=LoadPlanner(), if the number of ranks may have changed

Keys, after the name that the state has in the checkpoint: "rank1.shard0.2" is rank 1's state of parameter 2. The shard
is the process's of the parameters that are sharded inside a node (FSDP2), one number for each way to shard them.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from demopt.exchange.dtensor import placed_as, shard_of, to_local
from demopt.optim.demo import DeMo
from demopt.optim.local_demo import LocalDeMo
from demopt.state.reshard import StateDict, shares
from demopt.state.saved import among, own_part

__all__ = ["LoadPlanner", "OptimizerState"]

_KEY = re.compile(r"(.*\.|)rank(\d+)(\.shard[\d_]+\.(\d+))")


class OptimizerState:
    """The state of a `DeMo` or `LocalDeMo` in torch.distributed.checkpoint (DCP), which takes it as a `Stateful`.

    Each rank saves and loads its part, bit for bit. Give `async_save` a separate gloo group. `dcp.load` needs a
    `LoadPlanner` for more or fewer ranks than saved.

    Raises:
        ValueError, when loading: other ranks saved the checkpoint; the text names the `LoadPlanner`.

    Examples:
        >>> import demopt, torch
        >>> optimizer = demopt.DeMo([torch.nn.Parameter(torch.zeros(2, 2))])
        >>> list(OptimizerState(optimizer).state_dict())
        ['world_size', 'param_groups', 'rank0.shard0.0']
    """

    def __init__(self, optimizer: DeMo | LocalDeMo) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Returns the entries that this rank saves, by key; when loading, those that DCP replaces."""
        rank, world_size = self._optimizer.replicator.rank_and_size
        state = own_part(self._optimizer.state_dict(), rank, world_size)
        parameters = self._parameters
        shards = dict.fromkeys(shard for shard in map(shard_of, parameters) if shard[1] > 1)
        own = f"rank{rank}.shard{'_'.join(str(number) for number, _ in shards) or 0}"
        found = {"world_size": world_size, "param_groups": state["param_groups"]}
        for number in range(len(parameters)):
            found[f"{own}.{number}"] = _Entry(state["state"].get(number, {}))
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the entries that DCP filled in; if other ranks saved them, this rank's share, with a warning."""
        rank, world_size = self._optimizer.replicator.rank_and_size
        before, parameters = state_dict["world_size"], self._parameters
        states: dict[int, StateDict] = {}
        for key, entry in state_dict.items():
            if not (match := _KEY.fullmatch(key)) or entry is None:  # None: a key that the checkpoint does not have
                continue
            state = states.setdefault(int(match[2]), {"state": {}, "param_groups": state_dict["param_groups"]})
            if entry.values:
                state["state"][int(match[4])] = entry.placed(parameters[int(match[4])])
        if not shares(rank, world_size, before).keys() <= states.keys():
            raise ValueError(
                f"{before} ranks saved the checkpoint, and there are {world_size} now: give dcp.load "
                "planner=demopt.checkpoint.LoadPlanner()"
            )
        self._optimizer.load_state_dict(among(states, rank, world_size, before))

    @property
    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


class LoadPlanner(DefaultLoadPlanner):
    """A planner for `dcp.load` that requests of each `OptimizerState` this rank's share, if other ranks saved it.

    All other objects are loaded as by DCP's default planner, whose arguments it takes.

    Examples:
        >>> LoadPlanner(allow_partial_load=True).allow_partial_load
        True
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Adds the keys of other ranks; called by DCP."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        known = metadata.state_dict_metadata if metadata is not None else {}
        for key, entry in list(self.state_dict.items()):
            if not (match := _KEY.fullmatch(key)):
                continue
            place, rank, rest = match[1], int(match[2]), match[3]
            before = sum(f"{place}rank{old}{rest}" in known for old in range(len(known)))
            for old in shares(rank, self.state_dict[f"{place}world_size"], before) if before else ():
                self.state_dict[f"{place}rank{old}{rest}"] = entry
                self.mappings[f"{place}rank{old}{rest}"] = (*self.mappings[key][:-1], f"rank{old}{rest}")
            if before and key not in known:
                del self.state_dict[key]


class _Entry:
    """A rank's state of one parameter. DCP pickles it when it writes it, so that no more than that is copied.

    Shards of DTensors are saved as they lie here; `sharded` has their names.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.sharded: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        local = {
            name: to_local(value).detach().cpu().clone() if isinstance(value, Tensor) else value  # a clone: of a view
            for name, value in self.values.items()  # pickle would write all that it looks at
        }
        return {
            "values": local,
            "sharded": [name for name, value in self.values.items() if to_local(value) is not value],
        }

    def placed(self, parameter: Tensor) -> dict[str, Any]:
        """Returns the values, those of DTensors placed as the parameter is."""
        return {
            name: placed_as(value, parameter) if name in self.sharded else value for name, value in self.values.items()
        }
