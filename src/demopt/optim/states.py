"""Saved states of several ranks: which entries are a rank's own, who saved them, and all ranks' states in one.

A state holds, for each parameter, what is replicated (equal on all ranks) and what is a rank's own; the entry
"saved_by" says whose: rank, world size, and, for a parameter that is sharded inside a node, number of the shard and of
shards.
In a consolidated state, the names of own entries have the rank in front: "rank0.momentum", "rank1.momentum".
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from demopt.exchange.collective import shard_of
from demopt.optim._warnings import warn
from demopt.optim.reshard import SAVED_BY, Entry, StateDict, take

_OF_DEMO = ("momentum", "relay", "relay_start", SAVED_BY)  # its own; the rest is replicated
_SHARED_BY_LOCAL = ("shared", "round", "local_steps")  # replicated; and "outer_...", but for what owners keep back
_RANK = re.compile(r"rank(\d+)\.(.+)")
_HOW = (
    "Save one file a rank, or call optimizer.consolidate_state_dict() on all ranks before rank 0 saves, or, with "
    "torch.distributed.checkpoint, save demopt.checkpoint.OptimizerState(optimizer); see docs/checkpoints.md."
)


def is_own(name: str, entry: Mapping[str, Any]) -> bool:
    """Whether an entry of a parameter's state differs between the ranks.

    Examples:
        >>> [is_own(name, {"momentum": 0}) for name in ("momentum", "step", "exp_avg_sq")]
        [True, False, False]
        >>> [is_own(name, {"shared": 0}) for name in ("error", "own", "exp_avg", "shared", "outer_velocity")]
        [True, True, True, False, False]
    """
    if "shared" not in entry:
        return name in _OF_DEMO
    outer = name.startswith("outer_") and not name.startswith("outer_relay")
    return not outer and name not in _SHARED_BY_LOCAL


# Who saved a state


def mark(members: tuple[int, int], parameter: Tensor) -> Tensor:
    """Returns "saved_by" of a parameter's state: rank, world size, shard and shards, int64 [4].

    Examples:
        >>> mark((1, 4), torch.zeros(3)).tolist()
        [1, 4, 0, 1]
    """
    return torch.tensor([*members, *shard_of(parameter)])


def warn_unless_own(saved: Mapping[Tensor, Entry], members: tuple[int, int]) -> None:
    """Warns if a state by parameter is another rank's, or a mixture; says nothing about older ones, without a mark."""
    found = {
        (tuple(entry[SAVED_BY].tolist()), tuple(mark(members, parameter).tolist()))
        for parameter, entry in saved.items()
        if isinstance(entry.get(SAVED_BY), Tensor) and entry[SAVED_BY].numel() == 4
    }
    savers = sorted({theirs[:2] for theirs, _ in found})
    if all(theirs == mine for theirs, mine in found):
        return
    rank, world_size = members
    me = f"this is rank {rank} of {world_size}"
    if len(savers) > 1:
        ranks = ", ".join(str(saver) for saver, _ in savers)
        what = f"the state is a mixture of what ranks {ranks} saved, and {me}: a checkpoint keeps one value for a key"
    elif savers[0] == members:
        what = f"the state has shards of another process, and {me}"
    elif savers[0][1] != world_size:
        what = f"the state was saved by rank {savers[0][0]} of {savers[0][1]}, and {me}"
        if world_size == 1:
            what += " (call torch.distributed.init_process_group before loading, if there are others)"
        what += "; demopt.reshard makes the states of more or fewer ranks"
    else:
        what = f"the state was saved by rank {savers[0][0]}, and {me}"
    warn(f"{what}. What this rank had not sent yet, its momenta or errors, is lost. {_HOW}")


def unmarked(state: StateDict) -> StateDict:
    """Returns a state without "saved_by": where members come and go, a rank is a member's place in one round only.

    Examples:
        >>> unmarked({"state": {0: {"saved_by": 0, "momentum": 1}}, "param_groups": []})
        {'state': {0: {'momentum': 1}}, 'param_groups': []}
    """
    entries = {
        key: {name: value for name, value in entry.items() if name != SAVED_BY} for key, entry in state["state"].items()
    }
    return {**state, "state": entries}


# All ranks' states in one


def joined(states: Mapping[int, StateDict], mine: StateDict) -> StateDict:
    """Returns a consolidated state: replicated entries from `mine`, own ones from `states`, by rank."""
    entries: dict[Any, Entry] = {}
    for number, entry in mine["state"].items():
        entries[number] = {name: value for name, value in entry.items() if not is_own(name, entry)}
        for rank in sorted(states):
            own = states[rank]["state"].get(number, {})
            entries[number] |= {f"rank{rank}.{name}": own[name] for name in own if is_own(name, entry)}
    return {**mine, "state": entries}


def separated(state: StateDict) -> dict[int, StateDict]:
    """Returns the states of all ranks in a consolidated one; nothing if it is a rank's own. The inverse of `joined`."""
    found: dict[int, dict[Any, Entry]] = {}
    for number, entry in state.get("state", {}).items():
        parts = [(_RANK.fullmatch(name) if isinstance(name, str) else None, name) for name in entry]
        replicated = {name: entry[name] for match, name in parts if match is None}
        for match, name in parts:
            if match is not None:
                of_rank = found.setdefault(int(match[1]), {}).setdefault(number, dict(replicated))
                of_rank[match[2]] = entry[name]
    return {rank: {**state, "state": entries} for rank, entries in sorted(found.items())}


def own_part(state: StateDict, members: tuple[int, int]) -> StateDict:
    """Returns what a rank takes of a state, which may be consolidated; of another number of ranks', its share.

    ValueError if a rank's part is missing.
    """
    states = separated(state)
    return among(states, *members) if states else state


def among(states: Mapping[int, StateDict], rank: int, world_size: int, before: int | None = None) -> StateDict:
    """Returns this rank's of the states of all ranks, by rank; if other ranks saved them, its share: rank 0 warns."""
    before = before or _world_size(states)
    if before == world_size:
        return states[rank]
    if rank == 0:  # the same on all ranks
        warn(
            f"the state was saved by {before} ranks, and there are {world_size} now: each takes over its share of what "
            "the others had not sent yet, so that the mean over the ranks stays the same (docs/checkpoints.md)"
        )
    return take(states, rank, world_size, before)


def _world_size(states: Mapping[int, StateDict]) -> int:
    """Returns how many ranks saved `states`; ValueError if some of them are missing."""
    marks: Iterable[Any] = (entry.get(SAVED_BY) for state in states.values() for entry in state["state"].values())
    saved_by = max((int(mark[1]) for mark in marks if mark is not None), default=len(states))
    missing = [str(rank) for rank in range(saved_by) if rank not in states]
    if missing:
        raise ValueError(f"the state was saved by {saved_by} ranks, but has nothing of rank {', '.join(missing)}")
    return saved_by
