"""Saves and loads what every rank has: written to a .partial folder, synced, then renamed.

So a step-* folder is complete. `records` reads what is there, without torch.distributed.checkpoint, which is slow to
import.
"""

from __future__ import annotations

import copy
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from demopt.optim.local import LocalDeMo
from demopt.optim.reshard import KEPT_BACK, SAVED_BY, StateDict, parent, shares, take
from demopt.train.config import InputError
from demopt.train.folder import sync
from demopt.train.integrity import checksums, write_checksums
from demopt.train.records import KEEP, PARTIAL, RECORD, Saved, complete, place, read
from demopt.train.team import Team

METADATA = ".metadata"  # of torch.distributed.checkpoint: which tensor is where
IN_FLIGHT = "in_flight"  # with --delay: the state_dict entry that holds the round in flight
SHARED = "shared"  # of LocalDeMo: equal to the model's weights, which are saved once, inside `shared()`


def save(
    folder: Path, saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer, team: Team, private: bool
) -> None:
    """Write one checkpoint and delete all but the last two. `private`: each rank has its own optimizer state.

    With LocalDeMo call it inside `shared()`: the model's weights are then the shared ones, which are written once.
    """
    target = place(folder, saved.step)
    partial = target.with_name(target.name + PARTIAL)
    if team.first:
        clean(folder)
        partial.mkdir(parents=True)
    team.barrier()
    state = _model_state(model) | _optimizer_state(optimizer, team, private)
    _write(state, partial)
    known = team.gather(checksums(partial.glob(f"__{team.rank}_*")))  # the files that this rank has written
    if team.first:
        _finish(partial, target, saved, {name: sum for each in known for name, sum in each.items()})
    team.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, team: Team, private: bool) -> None:
    """Restore the model, this rank's optimizer and its random number generator from a checkpoint.

    If another number of workers wrote it, each takes over its share, as with `demopt.reshard`.
    """
    reader, before = FileSystemReader(path), read(path).workers
    mine = shares(team.rank, team.world_size, before)
    owners = [f"rank{rank}" for rank in mine] if private else ["replicated"]
    wanted = (*(f"{owner}.optimizer." for owner in owners), f"rank{parent(mine)}.random")
    state: dict[str, Any] = _model_state(model)
    for key, about in reader.read_metadata().state_dict_metadata.items():
        if key.startswith(wanted) or key.rpartition(".")[2] in KEPT_BACK:  # a rank takes over rows from all
            if not isinstance(about, TensorStorageMetadata):
                raise InputError(f"--resume: {path} holds {key}, which is not a tensor")
            state[key] = torch.empty(about.size, dtype=about.properties.dtype)
    load_sharded(state, storage_reader=reader)
    torch.set_rng_state(state[f"rank{parent(mine)}.random"])
    if not private:
        _restore(optimizer, _optimizer_states(state)["replicated"])
    elif before == team.world_size:
        _restore(optimizer, _optimizer_states(state)[f"rank{team.rank}"])
    else:
        _restore(optimizer, _taken_over(optimizer, _optimizer_states(state), team, before))


def _write(state: dict[str, Tensor], folder: Path) -> None:
    """Write this rank's part; OSError with the cause of the first rank that could not, where torch wraps them all."""
    try:
        save_sharded(state, storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise OSError(str(cause)) from cause


def clean(folder: Path) -> None:
    """Remove what an interrupted save or deletion left behind."""
    for leftover in folder.glob(f"*{PARTIAL}"):
        shutil.rmtree(leftover)


def _finish(partial: Path, target: Path, saved: Saved, known: dict[str, str]) -> None:
    record = partial / RECORD
    record.write_text(json.dumps(vars(saved)) + "\n", encoding="utf-8")
    sync(record)
    sync(write_checksums(partial, {**known, **checksums([record, partial / METADATA])}))
    sync(partial)
    partial.rename(target)
    sync(target.parent)
    for old in sorted(complete(target.parent))[:-KEEP]:
        # Rename first: an interrupted deletion must not leave a folder that looks complete.
        shutil.rmtree(old.rename(old.with_name(old.name + PARTIAL)))


def _owner(team: Team, private: bool) -> str:
    return f"rank{team.rank}" if private else "replicated"


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": value for name, value in model.state_dict().items()}


def _optimizer_state(optimizer: torch.optim.Optimizer, team: Team, private: bool) -> dict[str, Tensor]:
    owner = _owner(team, private)
    flat: dict[str, Tensor] = {f"rank{team.rank}.random": torch.get_rng_state()}
    found = optimizer.state_dict(in_flight=True) if private else optimizer.state_dict()  # type: ignore[call-arg]
    for index, entries in [*found["state"].items(), (IN_FLIGHT, found.get(IN_FLIGHT, {}))]:
        for name, value in entries.items():
            if name in (SHARED, SAVED_BY):  # the keys say whose they are
                continue
            flat[f"{owner}.optimizer.{index}.{name}"] = value
    return flat


def _optimizer_states(flat: dict[str, Any]) -> dict[str, StateDict]:
    """Return each owner's optimizer state; without parameter groups, because hyper-parameters come from the config."""
    states: dict[str, StateDict] = {}
    for key, value in flat.items():
        owner, kind, rest = (*key.split(".", 2), "", "")[:3]
        if kind == "optimizer" and not key.startswith("model."):
            index, name = rest.split(".", 1)
            state = states.setdefault(owner, {"state": {}})
            entries = (
                state.setdefault(IN_FLIGHT, {}) if index == IN_FLIGHT else state["state"].setdefault(int(index), {})
            )
            entries[name] = value
    return states


def _taken_over(optimizer: Any, states: dict[str, StateDict], team: Team, before: int) -> StateDict:
    """Return this rank's share of the states of `before` ranks."""
    by_rank = {int(owner.removeprefix("rank")): state for owner, state in states.items()}
    for state in by_rank.values():
        if IN_FLIGHT in state:  # which other ranks cannot go on with: loading it puts what was sent back
            _restore(optimizer, state)
            with optimizer.shared() if isinstance(optimizer, LocalDeMo) else nullcontext():
                undone = copy.deepcopy(optimizer.state_dict()["state"])
            del state[IN_FLIGHT]
            for number, entry in state["state"].items():
                entry |= {name: undone[number][name] for name in ("momentum", "error") if name in undone[number]}
    return take(by_rank, team.rank, team.world_size, before)


def _restore(optimizer: torch.optim.Optimizer, state: StateDict) -> None:
    if isinstance(optimizer, LocalDeMo):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            state["state"][number][SHARED] = parameter.detach().clone()  # the model has been loaded
    optimizer.load_state_dict({**optimizer.state_dict(), **state})
