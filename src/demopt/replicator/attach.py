"""The state of the replicator's parameters: views of a wiring's buffers, into which earlier entries are copied."""

from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from demopt.core.rules import RULE_STATE
from demopt.exchange.dtensor import shard_of, unlike_memory
from demopt.replicator.route import OWNER_ERROR, OWNER_START
from demopt.replicator.wiring import Wiring

State = MutableMapping[Tensor, dict[str, Any]]
SAVED_BY = "saved_by"  # in a parameter's state: `SavedBy`, as a tensor


class SavedBy(NamedTuple):
    """The rank and shard of a parameter's state, and the number of its entries: a saved state may lose or gain some.

    It is part of the state, because torch's functions for flattened states load only names that are already there.
    """

    rank: int
    world_size: int
    shard: int  # of a parameter that is sharded inside a node
    shards: int
    entries: int  # ours, this one included; in a state of LocalDeMo all of them, as `SavedParameter.entry` counts

    @staticmethod
    def of(entry: Mapping[str, Any]) -> "SavedBy | None":
        """Reads it from a parameter's state; None if it is missing, or is something else."""
        value = entry.get(SAVED_BY)
        if not isinstance(value, Tensor) or unlike_memory(value) or (value.dtype, value.shape) != (torch.int64, (5,)):
            return None
        found = SavedBy(*value.tolist())
        return found if 0 <= found.rank < found.world_size else None

    def tensor(self) -> Tensor:
        """Returns it as int64 [5]."""
        return torch.tensor(self, device="cpu")


def attach(state: State, wiring: Wiring, round_number: Tensor) -> None:
    """Moves each parameter's state into the wiring's buffers; the state becomes views of them.

    A parameter that does not train has no state, unless it has trained before. `round_number` is the counter that all
    entries share; it takes the highest value among them.
    """
    earlier = {parameter: state.get(parameter, {}) for parameter in wiring.parameters}
    counters = [torch.as_tensor(entry["step"], device="cpu") for entry in earlier.values() if "step" in entry]
    round_number.copy_(max(counters, default=round_number))
    for parameter, entry in earlier.items():
        if parameter.requires_grad:
            state[parameter] = {}  # its entries are made anew below
        elif entry:  # copies, so that the old buffer can go
            state[parameter] = {name: entry[name].clone() for name in ("momentum", *RULE_STATE) if name in entry}
    for chunk_group in wiring.chunk_groups:
        for name, buffer in (("momentum", chunk_group.momentum), *chunk_group.rule_state.items()):
            for parameter, rows in chunk_group.rows(buffer):
                _copy_into(earlier[parameter].get(name), rows)
                state[parameter][name] = _alone_in_storage(rows)
    _attach_owners(state, earlier, wiring)
    rank, world_size = wiring.inputs.rank, wiring.inputs.world_size
    for parameter in wiring.parameters:
        if new := state.get(parameter):
            new["step"] = round_number
            new[SAVED_BY] = SavedBy(rank, world_size, *shard_of(parameter), entries=len(new) + 1).tensor()


def _attach_owners(state: State, earlier: Mapping[Tensor, dict[str, Any]], wiring: Wiring) -> None:
    """Moves this rank's errors as an owner to the route's buffers; those of chunks now another's, to its momentum."""
    rank_and_size = wiring.inputs.rank, wiring.inputs.world_size
    owned = dict(wiring.route.owner_state())
    for parameter, entry in earlier.items():
        own = owned.get(parameter, {})
        kept = bool(own) and _owned_before(entry, own, rank_and_size)
        if OWNER_ERROR in entry and not kept:
            add_owner_error(entry, state[parameter]["momentum"], mean_over=rank_and_size[1])
        if own:
            _copy_into(entry[OWNER_ERROR] if kept else None, own[OWNER_ERROR])
            state[parameter] |= {name: _alone_in_storage(value) for name, value in own.items()}


def add_owner_error(entry: Mapping[str, Any], momentum: Tensor, mean_over: int) -> None:
    """Adds an owner's error to its own momentum [chunks, N], in place, because the chunks get another owner.

    It is an error of the mean, so it counts once per rank: `mean_over` is the number of ranks in the mean that it goes
    into. In `attach` these are the current ones, in `share_of` the old ones.
    """
    start, error = int(entry[OWNER_START]), entry[OWNER_ERROR]
    rows = momentum[start : start + len(error)]
    rows.add_(error.to(rows.device), alpha=mean_over)  # a file's tensors may be on the host


def _alone_in_storage(rows: Tensor) -> Tensor:
    """Returns the same memory as a tensor that is no view: a copy or file of a view would take the whole buffer along.

    On other devices than CPUs, `state_dict` copies views.
    """
    return torch.from_dlpack(rows) if rows.is_cpu and rows.numel() else rows  # type: ignore[attr-defined]


def _owned_before(entry: Mapping[str, Any], own: Mapping[str, Tensor], rank_and_size: tuple[int, int]) -> bool:
    """Whether this rank owned the same chunks of a parameter before."""
    if OWNER_ERROR not in entry or (saved_by := SavedBy.of(entry)) is None:
        return False
    same = int(entry[OWNER_START]) == int(own[OWNER_START]) and entry[OWNER_ERROR].shape == own[OWNER_ERROR].shape
    return same and (saved_by.rank, saved_by.world_size) == rank_and_size


def _copy_into(value: Tensor | None, rows: Tensor) -> None:
    """Copies an earlier value into its new place; zeros if there is none."""
    if value is None:
        rows.zero_()
    elif value.data_ptr() != rows.data_ptr():  # otherwise `make_wiring` has kept the earlier buffer
        rows.copy_(value)
