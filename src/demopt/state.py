"""Saved states: reading and checking one rank's; the rank that saved it; consolidating all ranks'; resharding.

A `SavedParameter` is a state's part of one parameter. Some of its entries are equal on all ranks; the others belong to
the rank that `SavedBy` names. A consolidated state has the former once, and the latter per rank under "ranks".

If the number of ranks changes, each new rank takes the mean over the old ranks that overlap with its share
(docs/checkpoints.md): of momenta, of errors, and of pseudo-gradients that no round has carried yet. All other per-rank
state is that of LocalDeMo's inner optimizers. It cannot be averaged without knowing its meaning, so a new rank takes it
from the old rank with the largest overlap.
"""

import io
import math
import zipfile
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, BinaryIO

import torch
from torch import Tensor

from demopt.codec.hyperparameters import Hyperparameters
from demopt.core.chunking import chunking
from demopt.core.rules import RULE_STATE, RULE_WEIGHTS, AdamW
from demopt.core.transform import TRANSFORM_NUMBERS
from demopt.errors import MessageError, SettingsError, first_line
from demopt.exchange.dtensor import is_made_of_others, parts_of, shard_of, to_local, unlike_memory
from demopt.replicator.attach import SAVED_BY, SavedBy, add_owner_error
from demopt.replicator.replicator import Replicator
from demopt.replicator.route import OWNER_ERROR, OWNER_START
from demopt.validation import check_count, check_rank, warn

StateDict = dict[str, Any]
PIECE_BYTES = 1 << 24  # sent at once
_LARGEST = 1e35  # limit of momenta, errors and rules' state: gradients of 1e30 or more count as infinite
_LARGEST_WEIGHT = 1e30  # limit of global weights and starts: local weights minus these are a pseudo-gradient
RANKS = "ranks"
_REMEDY = (
    "Save one file per rank, or call optimizer.consolidate_state_dict() on all ranks before rank 0 saves, or, with "
    "torch.distributed.checkpoint, save demopt.checkpoint.OptimizerState(optimizer). For more or fewer ranks there is "
    "demopt.reshard. See docs/checkpoints.md."
)
#: Our parts that differ between ranks (all others are equal), by their names in `Replicator.state`, in DeMo's state and
#: in `LocalWeights.to_save`. For another number of ranks, `share_of` averages `AVERAGED`, and adds an owner's error to
#: the rank's own.
AVERAGED = ("momentum", "local", "start")
OF_ONE_RANK = (*AVERAGED, OWNER_ERROR, OWNER_START, SAVED_BY)  # not "local_steps": between ranks these are equal
#: The names of our parts in LocalDeMo's state, where an entry also has the inner optimizer's parts, such as a "step".
NAMES_IN_LOCAL = {
    **{name: f"outer_{name}" for name in RULE_STATE},
    "step": "round",
    "momentum": "error",
    **{name: name for name in (OWNER_ERROR, OWNER_START, SAVED_BY)},
    **{name: name for name in ("global", "local_steps", "transform", "local", "start")},  # of `LocalDeMo.state` alone
}
_OF_INNER = "demopt.inner."  # prefix of the inner optimizer's names that one of our parts has there


@dataclass(frozen=True)
class SavedParameter:
    """A state's part of one parameter. If the parameter is frozen, LocalDeMo's state may hold only `inner`."""

    ours: dict[str, Any]  # from `Replicator.state`; for LocalDeMo also `LocalWeights.to_save` and the error's transform
    inner: dict[Any, Any]  # the inner optimizer's; empty for DeMo
    of_local: bool = True  # whether it is in a state of LocalDeMo

    @staticmethod
    def of(entry: Mapping[Any, Any], of_local: bool) -> "SavedParameter":
        """Reads an entry of a state, LocalDeMo's if `of_local`, without torch's additions."""
        saved_by = SavedBy.of(entry)
        may_have_gained = saved_by is None or len(entry) > saved_by.entries
        if may_have_gained:  # torch's flattening adds an empty dict per name that only the loading optimizer has
            entry = {name: value for name, value in entry.items() if not (isinstance(value, dict) and not value)}
        if not of_local:  # a script's own entries stay, too
            return SavedParameter(dict(entry), {}, of_local)
        ours = {name: entry[there] for name, there in NAMES_IN_LOCAL.items() if there in entry}
        inner = {}
        for name, value in entry.items():
            if name not in NAMES_IN_LOCAL.values():
                inner[name.removeprefix(_OF_INNER) if isinstance(name, str) else name] = value
        return SavedParameter(ours, inner)

    def entry(self) -> dict[Any, Any]:
        """Writes it as an entry of a state."""
        entry = self.shared_entry() | self.unshared_entry()
        if saved_by := SavedBy.of(entry):
            entry[SAVED_BY] = saved_by._replace(entries=len(entry)).tensor()
        return entry

    def shared_entry(self) -> dict[Any, Any]:
        """Writes the parts of the entry that are equal on all ranks."""
        return {self.name_in_entry(name): value for name, value in self.ours.items() if name not in OF_ONE_RANK}

    def unshared_entry(self) -> dict[Any, Any]:
        """Writes the other parts: those that are one rank's own."""
        entry = {self.name_in_entry(name): value for name, value in self.ours.items() if name in OF_ONE_RANK}
        for name, value in self.inner.items():
            # "momentum", too: without "global", as in a rank's part, `entries_of` would take the entry for DeMo's.
            is_taken = name in (*NAMES_IN_LOCAL.values(), "momentum")
            entry[f"{_OF_INNER}{name}" if is_taken else name] = value
        return entry

    def name_in_entry(self, name: str) -> str:
        """Returns the entry's name for one of our parts."""
        return NAMES_IN_LOCAL.get(name, name) if self.of_local else name


# One rank's state, read


def entries_of(state: StateDict) -> dict[Any, SavedParameter]:
    """Reads the entries of a state by number; their names tell whether it is LocalDeMo's."""
    entries = state["state"]
    names = {name for entry in entries.values() for name in entry}
    of_demo = "momentum" in names and "global" not in names  # in old files an inner optimizer may have a "momentum"
    return {number: SavedParameter.of(entry, of_local=not of_demo) for number, entry in entries.items()}


def load_file(file: BinaryIO) -> StateDict:
    """Returns the state in a file of `torch.save`, without running code. ValueError: it is damaged, or another file."""
    try:
        # torch ignores wrong checksums, and can be told to write none
        if torch.serialization.get_crc32_options() and (broken := zipfile.ZipFile(file).testzip()):
            raise ValueError(f"{broken} in it is damaged")
        file.seek(0)
        state: StateDict = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # from zip, pickle or torch, which document none
        raise ValueError(first_line(error)) from None
    return state


def check_form(state: Any) -> None:
    """Raises TypeError unless a state has the form of torch's: groups with parameters, and entries by number."""
    groups = state.get("param_groups", []) if isinstance(state, Mapping) else None
    entries = state.get("state", {}) if isinstance(state, Mapping) else None
    are_groups = isinstance(groups, list) and all(map(_is_group, groups))
    are_entries = isinstance(entries, Mapping) and all(isinstance(each, Mapping) for each in entries.values())
    if not (are_groups and are_entries):
        raise TypeError("this is no optimizer's state: give the result of state_dict(), with param_groups and state")


def _is_group(group: Any) -> bool:
    found = group.get("params") if isinstance(group, Mapping) else None
    return isinstance(found, list | tuple) and all(isinstance(number, Hashable) for number in found)


def read_state(state: StateDict, groups: Sequence[Any], of_local: bool) -> list[tuple[Any, SavedParameter]]:
    """Returns each parameter's number in an optimizer's state (LocalDeMo's if `of_local`) and its `SavedParameter`.

    ValueError unless the state has as many groups as the optimizer, each with as many parameters.
    """
    if "param_groups" not in state:  # such as a whole checkpoint, or a model's state
        has = ", ".join(map(str, [*state][:3])) or "nothing"
        raise ValueError(f"the state has {has}, and no param_groups; give the result of the optimizer's state_dict()")
    entries, saved_groups = state.get("state", {}), state["param_groups"]
    saved, mine = ([len(group["params"]) for group in each] for each in (saved_groups, groups))
    if saved != mine:
        raise ValueError(f"the state has parameter groups of {saved} parameters, this optimizer of {mine}")
    numbers = [number for group in saved_groups for number in group["params"]]
    return [(number, SavedParameter.of(entries.get(number, {}), of_local)) for number in numbers]


def check_saved(
    numbered: Sequence[tuple[Any, SavedParameter]],
    settings_of: Mapping[Tensor, Hyperparameters],
    rank_and_size: tuple[int, int],
    of_local: bool,
) -> dict[Tensor, SavedParameter]:
    """Checks the result of `read_state`, so that loading changes nothing or succeeds; returns it by parameter.

    `settings_of` are the parameters' settings after loading, in the order of `numbered`. Parameters that the state
    lacks are left out, with a warning if they train. Warns, too, if the state is not this rank's own.

    Raises:
        ValueError: another optimizer saved it, or it is of another model, or damaged.
    """
    by_parameter, lacking = dict[Tensor, SavedParameter](), list[str]()
    found = any("global" in saved.ours if of_local else saved.ours for _, saved in numbered)
    if not found and any(parameter.requires_grad for parameter in settings_of):
        lacks = "global weights and error" if of_local else "momentum"
        is_of_torch = of_local and not any(SAVED_BY in saved.ours for _, saved in numbered)  # DeMo's has SAVED_BY
        inner = "; optimizer.inner[0].load_state_dict takes that of its inner optimizer" if is_of_torch else ""
        raise ValueError(f"the state has no {lacks} of any parameter: another optimizer saved it{inner}")
    for (parameter, settings), (number, saved) in zip(settings_of.items(), numbered, strict=True):
        if not saved.ours:  # it was frozen
            lacking += [str(number)] if parameter.requires_grad else []
            continue
        where = f"the state of parameter {number}"
        if of_local and not {"global", "momentum", "step", "local_steps"} <= saved.ours.keys():
            raise ValueError(f"{where} has no global weights and error: another optimizer saved it")
        if not of_local and "global" in saved.ours:
            raise ValueError(f"{where} was saved by another optimizer, a LocalDeMo")
        _check_counts(saved, number)
        if of_local:
            _check_weights(saved.ours, parameter, settings.transform, number)
        _check_replicator(saved, parameter, settings, number)
        by_parameter[parameter] = saved
    held = (saved.ours.get(name) for saved in by_parameter.values() for name in ("global", "momentum"))
    if narrow := {each.dtype for each in held if each is not None and each.itemsize < 4}:
        warn(
            f"the state was converted to {', '.join(map(str, narrow))} since it was saved, so that weights and momenta "
            "are rounded: save it in its own dtypes"
        )
    if lacking:
        warn(
            f"the state has nothing of parameter {', '.join(lacking)}, where the momentum or error then starts at "
            "zero: right for a parameter that was frozen when it was saved"
        )
    _warn_unless_own(by_parameter, *rank_and_size)
    return by_parameter


def _check_counts(saved: SavedParameter, number: int) -> None:
    """Raises ValueError unless the counters in a parameter's state are whole numbers."""
    for name in ("step", "local_steps", "transform", OWNER_START):
        value = saved.ours.get(name, 0)
        is_plain = isinstance(value, Tensor) and not (unlike_memory(value) or value.dim())
        count = value.item() if is_plain else value
        if not (isinstance(count, int | float) and 0 <= count < 1 << 62 and float(count).is_integer()):
            named = saved.name_in_entry(name)
            raise ValueError(f"the state of parameter {number} holds a {named} that is no whole number, or below 0")


def _check_weights(ours: Mapping[str, Any], parameter: Tensor, transform: str, number: int) -> None:
    """Raises ValueError unless a LocalDeMo's error is of this transform, and its weights fit the parameter.

    Local weights need not be finite: if not, their rank drops its steps since the start (`LocalWeights.follow`).
    """
    saved = int(ours.get("transform", TRANSFORM_NUMBERS[transform]))
    if saved != TRANSFORM_NUMBERS[transform]:
        named = {value: name for name, value in TRANSFORM_NUMBERS.items()}.get(saved, saved)
        raise ValueError(
            f"the error of parameter {number} is in the domain of transform {named!r}, and this LocalDeMo has "
            f"{transform!r}; build it with the transform that the state was saved with"
        )
    came = [_shape_of(ours[name]) for name in ("global", "local", "start") if name in ours]
    mine = _shape_of(parameter)
    if came != [mine] * len(came):
        raise ValueError(f"the state of parameter {number} has shapes {came}, the parameter has {mine}")
    if not all((ours[name].abs() < _LARGEST_WEIGHT).all() for name in ("global", "start") if name in ours):
        raise ValueError(f"the weights of parameter {number} in the state are not finite, or out of range")


def _shape_of(value: Any) -> list[int] | str:
    """Returns the shape of a tensor of real floats; for anything else, its type."""
    if not isinstance(value, Tensor):
        return "none" if value is None else f"a {type(value).__name__}"
    local = to_local(value)  # of a DTensor this process's part
    unlike = unlike_memory(local)
    is_plain = not unlike and local.is_floating_point() and local.itemsize > 1
    return list(local.shape) if is_plain else f"{unlike or local.layout}, {local.dtype}"


def _check_replicator(saved: SavedParameter, parameter: Tensor, settings: Hyperparameters, number: int) -> None:
    """Raises ValueError unless momentum and rule's state are finite and fit a parameter with these settings."""
    cut = chunking(tuple(to_local(parameter).shape), settings.chunk, settings.chunking)
    length = math.prod(cut.chunk_shape)
    entry, where = saved.ours, f"the state of parameter {number}"
    rules_state = [name for name in RULE_STATE if name in entry]  # of a frozen parameter, also former rules' state
    for name in ("momentum", *rules_state):
        expected = [cut.chunks, 1 if name in RULE_WEIGHTS else length]
        if (came := _shape_of(entry.get(name))) != expected:
            named = saved.name_in_entry(name)
            raise ValueError(
                f"{where} (shape {list(parameter.shape)}) should hold a {named} of shape {expected}, but holds {came}: "
                "it was saved by another optimizer or for another model"
            )
    if OWNER_ERROR in entry:
        _check_owner(entry, cut.chunks, length, where)
    for name in ("momentum", *rules_state, OWNER_ERROR):
        least = 0.0 if name in (*AdamW.moments, *AdamW.weights) else -_LARGEST
        if name in entry and not ((entry[name] >= least) & (entry[name] <= _LARGEST)).all():
            told = "in the state is not finite, or out of range"
            raise ValueError(f"the {saved.name_in_entry(name)} of parameter {number} {told}")


def _check_owner(ours: Mapping[str, Any], chunks: int, length: int, where: str) -> None:
    """Raises ValueError unless an owner's error covers a range of the parameter's chunks."""
    came, start = _shape_of(ours[OWNER_ERROR]), int(ours.get(OWNER_START, -1))
    if len(came) != 2 or came[1] != length or not 0 <= start <= chunks - int(came[0]):
        raise ValueError(
            f"{where} has an owner's error of shape {came} from chunk {start} on, but there are {chunks} "
            f"chunks of {length}: it was saved for another model"
        )


# The rank that saved a state


def _warn_unless_own(saved_of: Mapping[Tensor, SavedParameter], rank: int, world_size: int) -> None:
    """Warns if the parameters' states are another rank's or a mixture, have no mark, or lost entries on the way."""
    marked = [(parameter, saved, mark) for parameter, saved in saved_of.items() if (mark := SavedBy.of(saved.ours))]
    savers = {(mark.rank, mark.world_size) for *_, mark in marked}
    is_own = all(mark == SavedBy(rank, world_size, *shard_of(p), mark.entries) for p, _, mark in marked)
    entries = [(p, len(saved.ours) + len(saved.inner), mark.entries) for p, saved, mark in marked]
    has_lost = [(parameter, now, before) for parameter, now, before in entries if now < before]
    me = f"this is rank {rank} of {world_size}"
    lost = "The part that this rank had not sent yet, its momenta or errors, is lost"
    if len(marked) < len(saved_of) and world_size > 1:
        warn(f"the state does not say which rank saved it, and {me}. If it is another's: {lost}. {_REMEDY}")
    elif not is_own:
        named = " and ".join(f"rank {saver} of {count}" for saver, count in sorted(savers))
        shards = ", shard by shard" if savers == {(rank, world_size)} else ""
        warn(f"the state was saved by {named}{shards}, and {me}. {lost}. {_REMEDY}")
    elif has_lost:
        parameter, now, before = has_lost[0]
        warn(
            f"the state of a parameter of shape {list(parameter.shape)} has {now} of {before} entries that were "
            "saved: torch.distributed.checkpoint and torch's set_optimizer_state_dict load only the names that an "
            "optimizer has already, and a new LocalDeMo has no state of its inner optimizers. Save "
            "demopt.checkpoint.OptimizerState(optimizer)"
        )


def unmarked(state: StateDict) -> StateDict:
    """Returns a state without "saved_by", for torchft, where a rank is a worker's place in one round only."""
    entries = state["state"].items()
    return {**state, "state": {n: {k: v for k, v in entry.items() if k != SAVED_BY} for n, entry in entries}}


def savers_of(state: StateDict) -> list[SavedBy]:
    """Returns the `SavedBy` of each entry of a state that has one."""
    return [saved_by for entry in state["state"].values() if (saved_by := SavedBy.of(entry))]


# All ranks' states in one


def collect(replicator: Replicator, state: StateDict, to: int) -> dict[int, StateDict] | None:
    """Returns, on rank `to`, each rank's part of the state by rank, on the CPU; on other ranks None.

    All ranks call it together. They send the bytes of `torch.save` in pieces. `torch.load` reads them with
    `weights_only`, so no code travels. Afterwards the replicator's stats hold the cost.

    Raises:
        ValueError: there is no rank `to`. TypeError: an inner optimizer has state that cannot be consolidated.
            SettingsError: ranks, or nodes, are at different rounds. MessageError: the data of a rank is damaged.
    """
    exchange, wiring = replicator.session.exchange, replicator.wiring()
    check_rank("to", to, exchange.world_size)
    file = io.BytesIO()
    torch.save(_unshared_entries(state), file)  # before the others wait: it may fail on this rank alone
    exchange.await_all("consolidate_state_dict()")
    moved_before = exchange.sent_bytes + exchange.received_bytes
    mine = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    facts = torch.tensor([len(mine), int(replicator.round_number)], device="cpu").view(torch.uint8).to(wiring.device)
    lengths, rounds = exchange.all_gather(facts).cpu().contiguous().view(torch.int64).T.tolist()
    if apart := [rank for rank, number in enumerate(rounds) if number != rounds[0]]:
        raise SettingsError(
            f"rank {apart[0]} has applied {rounds[apart[0]]} rounds and rank 0 {rounds[0]}, as after a Ctrl-C within a "
            f"step: call resync(src={rounds.index(max(rounds))}) on all ranks, then save"
        )
    receives = exchange.rank == to and exchange.is_leader
    received = [bytearray(length) for length in lengths] if receives else []
    for start in range(0, max(lengths), PIECE_BYTES):
        piece = torch.zeros(min(PIECE_BYTES, max(lengths) - start), dtype=torch.uint8, device=wiring.device)
        part = mine[start : start + len(piece)]
        piece[: len(part)] = part
        rows = exchange.gather(piece, to)
        for row, data in zip(rows if rows is not None else (), received, strict=True):
            left = torch.frombuffer(data, dtype=torch.uint8)[start : start + len(piece)]
            left.copy_(row[: len(left)])
    moved = exchange.sent_bytes + exchange.received_bytes - moved_before
    replicator.stats = replace(replicator.stats, consolidated_bytes=moved)
    if not receives:
        return None
    found = {}
    for rank, data in enumerate(received):
        try:
            found[rank] = load_file(io.BytesIO(data))
        except ValueError as error:
            raise MessageError(f"the state that came to be consolidated is damaged ({error})", rank) from None
    return found


def _unshared_entries(state: StateDict) -> StateDict:
    """Returns a rank's entries without the shared parts, on the CPU.

    TypeError for a value other than a plain tensor, a number, a text or None.
    """
    own = {number: saved.unshared_entry() for number, saved in entries_of(state).items()}
    for number in own:
        for name, value in own[number].items():
            if isinstance(value, Tensor) and not is_made_of_others(value):  # possibly of the parameter's own class
                plain = value.detach().as_subclass(Tensor)
                own[number][name] = plain.cpu().clone()  # of a view, torch.save would write the whole storage
            elif not (value is None or isinstance(value, bool | int | float | str)):
                raise TypeError(
                    f"the state of parameter {number} holds {name}, a {type(value).__name__}, which cannot be "
                    "consolidated; save demopt.checkpoint.OptimizerState(optimizer), or one file per rank"
                )
    return {"state": own}


def consolidated(states: Mapping[int, StateDict], mine: StateDict) -> StateDict:
    """Returns a consolidated state: the shared entries of `mine` and, by rank under "ranks", the others."""
    shared = {number: saved.shared_entry() for number, saved in entries_of(mine).items()}
    return {**mine, "state": shared, RANKS: states}


def _is_shared_alone(state: StateDict) -> bool:
    """Whether a state has only the shared entries of a consolidated one, and no rank's own."""
    names = {name for entry in state.get("state", {}).values() for name in entry}
    has_settings = any("momentum_decay" in group for group in state.get("param_groups", ()))  # of DeMo
    is_of_demo = has_settings and {"step"} <= names <= {"step", *RULE_STATE}
    return is_of_demo or ("global" in names and "error" not in names)


# A rank's part of them


def own_part(state: StateDict, rank: int, world_size: int) -> StateDict:
    """Returns a rank's part of a state, which may be consolidated; its share, if more or fewer ranks saved it.

    ValueError if a rank's part is missing, TypeError if a part does not have the form of a state.
    """
    parts = state.get(RANKS, {})
    if not (isinstance(parts, Mapping) and all(isinstance(each, int) for each in parts)):
        raise TypeError(f"the state's entry {RANKS!r} is {type(parts).__name__}; give states by rank")
    if not parts:
        if _is_shared_alone(state):
            raise ValueError(
                f"the state was consolidated, and its entry {RANKS!r}, with each rank's own part, is gone: torch's "
                "get_optimizer_state_dict leaves it out. Save optimizer.state_dict() itself"
            )
        return state
    for part in parts.values():
        check_form(part)
    states = separated(state)
    old_size = max((mark.world_size for each in states.values() for mark in savers_of(each)), default=len(states))
    most = min(old_size, len(states) + 1)  # enough to find a missing one: a damaged mark may name a huge number
    if missing := [str(old) for old in range(most) if old not in states]:
        raise ValueError(f"the state was saved by {old_size} ranks, but has nothing of rank {', '.join(missing)}")
    return part_or_share(states, rank, world_size, old_size)


def separated(state: StateDict) -> dict[int, StateDict]:
    """Undoes `consolidated`: returns all ranks' states, by rank; none if the state is one rank's."""
    shared, rest = state.get("state", {}), {name: value for name, value in state.items() if name != RANKS}
    return {
        rank: {**rest, "state": {n: {**shared.get(n, {}), **own.get(n, {})} for n in {**shared, **own}}}
        for rank, own in ((rank, each.get("state", {})) for rank, each in state.get(RANKS, {}).items())
    }


def part_or_share(states: Mapping[int, StateDict], rank: int, world_size: int, old_size: int) -> StateDict:
    """Returns a rank's part of the states of `old_size` ranks: its own, or, among more or fewer, its share.

    For a share, rank 0 warns. `states`, by rank, need only hold the old ranks that this rank takes over from.
    """
    if old_size == world_size:
        return states[rank]
    if rank == 0:  # all ranks would say the same
        warn(
            f"the state was saved by {old_size} ranks, and there are {world_size} now: each takes over its share of "
            "the unsent part, so that the mean over the ranks stays the same (docs/checkpoints.md)"
        )
    return share_of(states, rank, world_size, old_size)


# Another number of ranks


def reshard(states: Sequence[StateDict], world_size: int) -> list[StateDict]:
    """Returns the states that `world_size` ranks load, made of those that all old ranks saved; both in rank order.

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
    check_count("world_size", world_size)
    if not (isinstance(states, Sequence) and states):
        raise ValueError("there are no states; give those of all ranks, in the order of the ranks")
    if not all(isinstance(each, Mapping) and {"state", "param_groups"} <= each.keys() for each in states):
        raise ValueError("states has something that is no optimizer's state; give each rank's result of state_dict()")
    try:
        for rank, state in enumerate(states):
            savers, counts = {mark.rank for mark in savers_of(state)}, {mark.world_size for mark in savers_of(state)}
            if savers and savers != {rank}:
                raise ValueError(
                    f"states[{rank}] was saved by rank {', '.join(map(str, sorted(savers)))}; give the states of all "
                    "ranks in the order of the ranks"
                )
            if counts and counts != {len(states)}:
                raise ValueError(
                    f"{len(states)} states came, and states[{rank}] was saved by one of {max(counts)} ranks; give the "
                    "states of all ranks"
                )
            if _model_and_round(state) != _model_and_round(states[0]):
                raise ValueError(f"the states of rank 0 and rank {rank} are of different models or steps")
    except (LookupError, AttributeError, RuntimeError, TypeError, OverflowError) as error:
        raise ValueError(f"the states are damaged: {first_line(error)}") from None
    by_rank = dict(enumerate(states))
    return [share_of(by_rank, rank, world_size, len(states)) for rank in range(world_size)]


def _model_and_round(state: StateDict) -> dict[Any, Any]:
    """Returns the shape of each parameter's momentum, and the number of rounds: the same in the states of all ranks."""
    found = {}
    for number, saved in entries_of(state).items():
        kept = saved.ours
        found[number] = (list(kept["momentum"].shape), int(kept.get("step", 0))) if "momentum" in kept else ()
    return found


def share_of(states: Mapping[int, StateDict], rank: int, world_size: int, old_size: int) -> StateDict:
    """Returns one new rank's state, made of the states, by rank, of the old ranks in `overlaps`.

    `reshard` may call it with as many new ranks as old ones.
    """
    shares = overlaps(rank, world_size, old_size)
    largest = max(shares, key=lambda old: shares[old])  # the first, if several have it
    taken, read = {}, {old: entries_of(states[old]) for old in shares}
    for number in read[largest]:
        saved_of = {old: entries.get(number, SavedParameter({}, {})) for old, entries in read.items()}
        try:
            _check_addable(saved_of.values())
            if len({int(saved.ours["step"]) for saved in saved_of.values() if "step" in saved.ours}) > 1:
                raise ValueError("the ranks saved at different rounds, as after a Ctrl-C within a step")
            if world_size != old_size:  # chunks get other owners
                saved_of = {old: _without_owner(saved, old_size) for old, saved in saved_of.items()}
            ours = dict(saved_of[largest].ours)
            for name in AVERAGED:
                if any(name in saved.ours for saved in saved_of.values()):
                    ours[name] = _mean([(_part_of(saved.ours, name), shares[old]) for old, saved in saved_of.items()])
        except (LookupError, AttributeError, RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"the state of parameter {number} is damaged in some rank: {first_line(error)}") from None
        if saved_by := SavedBy.of(ours):
            ours[SAVED_BY] = saved_by._replace(rank=rank, world_size=world_size).tensor()
        taken[number] = replace(saved_of[largest], ours=ours).entry()
    return {**states[largest], "state": taken}


def overlaps(rank: int, world_size: int, old_size: int) -> dict[int, Fraction]:
    """Returns which of `old_size` old ranks a rank of `world_size` takes over from, with weights whose sum is 1."""
    begin, end = rank * old_size, (rank + 1) * old_size  # an old rank's interval has length world_size
    olds = range(begin // world_size, -(-end // world_size))
    return {old: Fraction(min(end, (old + 1) * world_size) - max(begin, old * world_size), old_size) for old in olds}


def _check_addable(old: Iterable[SavedParameter]) -> None:
    """Raises ValueError unless the old ranks' parts of a parameter are dense, and of one shape.

    The sums come before `check_saved`. torch trusts a sparse tensor's indices, and an expanded one can have any size.
    """
    shapes: dict[bool, Any] = {}  # of the momenta, and of all weights
    for saved in old:
        for name, value in saved.ours.items():
            if name not in ("global", *AVERAGED):
                continue
            came = _shape_of(value)
            differs = isinstance(came, str) or came != shapes.setdefault(name == "momentum", came)
            if differs or any(part.untyped_storage().nbytes() < part.nbytes for part in parts_of([value])):
                named = saved.name_in_entry(name)
                raise ValueError(f"the {named} is {came}; expected dense ones, of one shape in all ranks")
        if OWNER_ERROR in saved.ours:
            chunks, length = saved.ours["momentum"].shape
            _check_owner(saved.ours, chunks, length, "it")


def _without_owner(saved: SavedParameter, old_size: int) -> SavedParameter:
    """Puts the owner's error into the rank's own."""
    if OWNER_ERROR not in saved.ours:
        return saved
    ours = {**saved.ours, "momentum": saved.ours["momentum"].clone()}
    add_owner_error(ours, ours["momentum"], mean_over=old_size)
    del ours[OWNER_ERROR], ours[OWNER_START]
    return replace(saved, ours=ours)


def _part_of(ours: Mapping[str, Any], name: str) -> Any:
    """Returns a part of `AVERAGED`; local weights and starts that the state left out equal the global weights.

    Local weights that are not finite count as their start: otherwise they would spoil the other ranks' in the mean.
    """
    if name == "local" and "local" in ours and not bool(ours["local"].isfinite().all()):
        name = "start"
    return ours[name] if name == "momentum" else ours.get(name, ours["global"])


def _mean(parts: list[tuple[Any, Fraction]]) -> Any:
    """Returns a weighted mean, in float32 or wider; a single part is not copied."""
    (first, _), *more = parts
    if not more:
        return first
    wide = torch.promote_types(first.dtype, torch.float32)
    total = torch.zeros_like(first, dtype=wide)
    for value, share in parts:
        total.add_(value.to(total.device, wide), alpha=float(share))
    return total.to(first.dtype)
