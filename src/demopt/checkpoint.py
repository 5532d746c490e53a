"""Checkpoints with torch.distributed.checkpoint (DCP): the state of each rank, whole, under keys of its own.

    state = {"model": model, "optimizer": OptimizerState(optimizer)}
    dcp.save(state, checkpoint_id=path)  # or dcp.async_save
    dcp.load(state, checkpoint_id=path)  # planner=LoadPlanner(), if the number of ranks may have changed

Keys, after the name that the state has in the checkpoint: "rank1.shard0.2" is rank 1's state of parameter 2, and
"rank1.shard0.in_flight" its round in flight. The shard is the process's among those that share parameters (FSDP2).
"""

import re
from collections.abc import Iterator, Mapping
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

_KEY = re.compile(r"rank(\d+)\.shard\d+\.(\w+)")
_IN_FLIGHT = "in_flight"


class OptimizerState:
    """The state of a `DeMo` or `LocalDeMo` in torch.distributed.checkpoint (DCP), which takes it as a `Stateful`.

    Each rank saves and loads its part, bit for bit. Give `async_save` a separate gloo group. `dcp.load` needs a
    `LoadPlanner` for more or fewer ranks than saved.

    `in_flight`: for LocalDeMo with delay=1, as in its `state_dict`. A round in flight is then saved too, and the same
    number of ranks continues with it, bit for bit; with more or fewer ranks, its content is sent later.

    Raises:
        ValueError, when loading: other ranks saved the checkpoint; the text names the `LoadPlanner`.

    Examples:
        >>> import demopt, torch
        >>> optimizer = demopt.DeMo([torch.nn.Parameter(torch.zeros(2, 2))])
        >>> list(OptimizerState(optimizer).state_dict())
        ['world_size', 'param_groups', 'rank0.shard0.0', 'rank0.shard0.in_flight']
    """

    def __init__(self, optimizer: DeMo | LocalDeMo, *, in_flight: bool = False) -> None:
        if in_flight and not isinstance(optimizer, LocalDeMo):
            raise TypeError("in_flight=True is for LocalDeMo: no round of DeMo is in flight between two steps")
        self._optimizer = optimizer
        self._how = {_IN_FLIGHT: True} if in_flight else {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the entries that this rank saves, by key; when loading, those that DCP replaces."""
        rank, world_size = self._optimizer.replicator.rank_and_size
        state = own_part(self._optimizer.state_dict(**self._how), rank, world_size)
        parameters = self._parameters
        own = f"rank{rank}.shard{max((shard_of(parameter)[0] for parameter in parameters), default=0)}"
        found = _Entries(rank, world_size)
        found["world_size"], found["param_groups"] = world_size, state["param_groups"]
        for number in range(len(parameters)):
            found[f"{own}.{number}"] = _Entry(state["state"].get(number, {}))
        found[f"{own}.{_IN_FLIGHT}"] = _Entry(state.get(_IN_FLIGHT, {}))
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the entries that DCP filled in; if other ranks saved them, this rank's share, with a warning."""
        rank, world_size = self._optimizer.replicator.rank_and_size
        before, parameters = state_dict["world_size"], self._parameters
        states: dict[int, StateDict] = {}
        for key, entry in state_dict.items():
            if not (match := _KEY.fullmatch(key)):
                continue
            state = states.setdefault(int(match[1]), {"state": {}, "param_groups": state_dict["param_groups"]})
            if match[2] == _IN_FLIGHT:
                state |= {_IN_FLIGHT: entry.values} if entry.values and before == world_size else {}
            elif entry.values:
                state["state"][int(match[2])] = entry.placed(parameters[int(match[2])])
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
        """Replaces the keys of ranks; called by DCP."""
        known = metadata.state_dict_metadata if metadata is not None else {}
        for prefix, entries in _inside(state_dict, ""):
            found = (_KEY.fullmatch(key.removeprefix(prefix)) for key in known if key.startswith(prefix))
            entries.ask({int(match[1]) for match in found if match})
        super().set_up_planner(state_dict, metadata, is_coordinator)


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


class _Entries(dict[str, Any]):
    """The entries of an OptimizerState, by key."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._world_size = rank, world_size

    def ask(self, saved_by: set[int]) -> None:
        """Replaces the keys of this rank by those of the ranks whose state it takes over, of a checkpoint's ranks."""
        if len(saved_by) in (0, self._world_size):
            return
        for key in [key for key in self if _KEY.fullmatch(key)]:
            entry, own = self.pop(key), key.removeprefix(f"rank{self._rank}")
            self.update({f"rank{old}{own}": entry for old in shares(self._rank, self._world_size, len(saved_by))})


def _inside(state_dict: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, _Entries]]:
    """Yields every OptimizerState's entries in a state dict, with the prefix that DCP gives their keys."""
    for key, value in state_dict.items():
        if isinstance(value, _Entries):
            yield f"{prefix}{key}.", value
        elif isinstance(value, Mapping):
            yield from _inside(value, f"{prefix}{key}.")
