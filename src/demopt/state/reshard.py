"""Another number of ranks: the part that each of W' ranks takes over from the saved states of W.

Rounds apply the mean of the ranks' messages, so the mean over the ranks of their unsent part is preserved:
sum(M') / W' = sum(M) / W, for momenta, for errors, and for pseudo-gradients that no round has carried so far. Each new
rank takes the overlap-weighted mean of the old ranks, both laid out as equal intervals on [0, 1]. So 4 ranks become 2
by means of pairs, and 2 become 4 by copies: equal messages, whose mean is the message of one.

All other per-rank state, that of LocalDeMo's inner optimizers, cannot be averaged without knowing its
meaning: a new rank takes that of the old rank with the largest overlap.

Shapes: W ranks before, W' ranks now.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from demopt.replicator.route import OWNER_ERROR, OWNER_START
from demopt.replicator.state import SAVED_BY, SavedParameter

Entry = dict[str, Any]
StateDict = dict[str, Any]
AVERAGED = ("momentum", "local", "start")  # of what a rank has of its own


def shares(rank: int, world_size: int, before: int) -> dict[int, Fraction]:
    """Returns which of `before` old ranks a rank of `world_size` takes over from, with weights whose sum is 1.

    Examples:
        >>> shares(0, 2, before=4), shares(3, 4, before=2)
        ({0: Fraction(1, 2), 1: Fraction(1, 2)}, {1: Fraction(1, 1)})
        >>> shares(1, 2, before=3)
        {1: Fraction(1, 3), 2: Fraction(2, 3)}
    """
    found = {}
    for old in range(rank * before // world_size, before):
        low = max(Fraction(rank, world_size), Fraction(old, before))
        high = min(Fraction(rank + 1, world_size), Fraction(old + 1, before))
        if high <= low:
            break
        found[old] = (high - low) * world_size
    return found


def share_of(states: Mapping[int, StateDict], rank: int, world_size: int, before: int) -> StateDict:
    """Returns the state of one new rank from those of the old ranks in `shares`, by rank."""
    mine = shares(rank, world_size, before)
    largest = max(mine, key=lambda old: mine[old])  # the first, if several have it
    taken: dict[Any, Entry] = {}
    for number in states[largest]["state"]:
        parts = {old: SavedParameter.of(states[old]["state"][number]) for old in mine}
        if world_size != before:
            parts = {old: _without_owner(saved, before) for old, saved in parts.items()}
        chosen = parts[largest]
        own = dict(chosen.own)
        for name in AVERAGED:
            if any(name in saved.own for saved in parts.values()):
                instead = {} if name == "momentum" else {name: chosen.shared["global"]}  # of those that left it out
                own[name] = _mean([({**instead, **saved.own}[name], mine[old]) for old, saved in parts.items()])
        if SAVED_BY in own:
            own[SAVED_BY] = torch.tensor([rank, world_size, *own[SAVED_BY].tolist()[2:4]], device="cpu")
        taken[number] = replace(chosen, own=own).entry()
    return {**states[largest], "state": taken}


def _without_owner(saved: SavedParameter, before: int) -> SavedParameter:
    """Puts the owner's error into the rank's own, because the chunks get other owners.

    It becomes `before` times as large, because rounds apply the mean over the ranks.
    """
    if OWNER_ERROR not in saved.own:
        return saved
    own = dict(saved.own)
    start, owned, error = int(own.pop(OWNER_START)), own.pop(OWNER_ERROR), own["momentum"].clone()
    error[start : start + len(owned)].add_(owned, alpha=before)
    return replace(saved, own={**own, "momentum": error})


def reshard(states: Sequence[StateDict], world_size: int) -> list[StateDict]:
    """Returns the states that `world_size` ranks load, from those that other ranks saved, in the order of the ranks.

    For `DeMo` and `LocalDeMo`; it does not cover the parameters. The mean over the ranks of their unsent part stays the
    same, so no gradient is lost or counted twice (docs/checkpoints.md). Tensors may be shared with `states`.

    Raises:
        ValueError: `states` are not those of all ranks of one run, in their order.

    Examples:
        >>> import demopt
        >>> one = demopt.DeMo([torch.nn.Parameter(torch.zeros(2, 2))])
        >>> len(demopt.reshard([one.state_dict()], world_size=2))
        2
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; give the number of ranks that will load the states")
    if not states:
        raise ValueError("there are no states; give those of all ranks, in the order of the ranks")
    _check_alike(states)
    by_rank = dict(enumerate(states))
    return [share_of(by_rank, rank, world_size, len(states)) for rank in range(world_size)]


def _check_alike(states: Sequence[StateDict]) -> None:
    for rank, state in enumerate(states):
        savers = {int(entry[SAVED_BY][0]) for entry in state["state"].values() if SAVED_BY in entry}
        if savers and savers != {rank}:
            raise ValueError(
                f"states[{rank}] was saved by rank {', '.join(map(str, sorted(savers)))}; give the states of all ranks "
                "in the order of the ranks"
            )
        counts = {int(entry[SAVED_BY][1]) for entry in state["state"].values() if SAVED_BY in entry}
        if counts and counts != {len(states)}:
            raise ValueError(
                f"{len(states)} states came, and states[{rank}] was saved by one of {max(counts)} ranks; give the "
                "states of all ranks"
            )
        if _outline(state) != _outline(states[0]):
            raise ValueError(f"the states of rank 0 and rank {rank} are of different models or steps")


def _outline(state: StateDict) -> dict[Any, Any]:
    """Returns the parts that the states of all ranks have in common."""
    found = {number: SavedParameter.of(entry) for number, entry in state["state"].items()}
    return {
        number: (list(saved.own["momentum"].shape), int(saved.shared.get("step", 0))) if "momentum" in saved.own else ()
        for number, saved in found.items()
    }


def _mean(parts: list[tuple[Tensor, Fraction]]) -> Tensor:
    """Returns a weighted mean, in float32 or wider; a single part is not copied."""
    (first, _), *more = parts
    if not more:
        return first
    wide = torch.promote_types(first.dtype, torch.float32)
    total = torch.zeros_like(first, dtype=wide)
    for value, share in parts:
        total.add_(value.to(total.device, wide), alpha=float(share))
    return total.to(first.dtype)
