"""Checkpoints of every rank: written to a .partial folder, synced, then renamed, so a step-* folder is complete."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from demopt.optim.local import LocalDeMo
from demopt.train.config import Given, InputError, TrainConfig, differences, flag
from demopt.train.folder import sync
from demopt.train.team import Team

KEEP = 2
RECORD = "run.json"
PARTIAL = ".partial"
IN_FLIGHT = "in_flight"  # with --delay: the state_dict entry that holds the round in flight
SHARED = "shared"  # of LocalDeMo: equal to the model's weights, which are saved once, inside `shared()`


@dataclass(frozen=True)
class Saved:
    """Identifies the run that wrote a checkpoint, so that no other run resumes from it by mistake."""

    step: int
    fingerprint: str  # of the data
    settings: Given


def newest(folder: Path) -> Path | None:
    """Return the latest complete checkpoint in a folder of checkpoints, or None."""
    whole = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8}", path.name)]
    return max(whole, default=None)


def read(path: Path) -> Saved:
    """Read which run, and which step of it, the checkpoint at `path` belongs to."""
    return Saved(**json.loads((path / RECORD).read_text(encoding="utf-8")))


def find(folder: Path, settings: Given, fingerprint: str) -> Path:
    """Return the checkpoint to resume from; InputError if there is none or it belongs to another run."""
    found = newest(folder)
    if found is None:
        raise InputError(f"--resume: {folder.parent} holds no whole checkpoint; start anew with --overwrite")
    check_same_run(read(found), settings, fingerprint)
    return found


def check_same_run(saved: Saved, settings: Given, fingerprint: str) -> None:
    """Raise InputError if settings or data differ from those of the checkpoint's run."""
    before = {**TrainConfig().record(), **saved.settings}  # older checkpoints lack newer settings: assume defaults
    if changed := differences(before, settings):
        name = changed[0]
        raise InputError(
            f"--resume: {flag(name)} is {settings[name]}, but the checkpoint was made with {before[name]}; "
            "go on with the same settings or start anew in another --out"
        )
    if saved.fingerprint != fingerprint:
        raise InputError("--resume: the text or tokenizer is not the one that the checkpoint was trained on")


def save(
    folder: Path, saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer, team: Team, private: bool
) -> None:
    """Write one checkpoint and delete all but the last two. `private`: each rank has its own optimizer state.

    With LocalDeMo call it inside `shared()`: the model's weights are then the shared ones, which are written once.
    """
    target = folder / f"step-{saved.step:08d}"
    partial = target.with_name(target.name + PARTIAL)
    if team.first:
        clean(folder)
        partial.mkdir(parents=True)
    team.barrier()
    state = _model_state(model) | _optimizer_state(optimizer, team, private)
    save_sharded(state, storage_writer=FileSystemWriter(partial))
    if team.first:
        _finish(partial, target, saved)
    team.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, team: Team, private: bool) -> None:
    """Restore the model, this rank's optimizer and its random number generator from a checkpoint."""
    reader = FileSystemReader(path)
    owner = _owner(team, private)
    state: dict[str, Any] = _model_state(model)
    for key, about in reader.read_metadata().state_dict_metadata.items():
        if key.startswith((f"{owner}.optimizer.", f"rank{team.rank}.random")):
            if not isinstance(about, TensorStorageMetadata):
                raise InputError(f"--resume: {path} holds {key}, which is not a tensor")
            state[key] = torch.empty(about.size, dtype=about.properties.dtype)
    load_sharded(state, storage_reader=reader)
    _restore_optimizer(optimizer, state, f"{owner}.optimizer.")
    torch.set_rng_state(state[f"rank{team.rank}.random"])


def clean(folder: Path) -> None:
    """Remove what an interrupted save or deletion left behind."""
    for leftover in folder.glob(f"*{PARTIAL}"):
        shutil.rmtree(leftover)


def _finish(partial: Path, target: Path, saved: Saved) -> None:
    record = partial / RECORD
    record.write_text(json.dumps(vars(saved)) + "\n", encoding="utf-8")
    sync(record)
    sync(partial)
    partial.rename(target)
    sync(target.parent)
    for old in sorted(target.parent.glob("step-????????"))[:-KEEP]:
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
            if name == SHARED:
                continue
            flat[f"{owner}.optimizer.{index}.{name}"] = value
    return flat


def _restore_optimizer(optimizer: torch.optim.Optimizer, flat: dict[str, Any], prefix: str) -> None:
    """Restore only the state: hyper-parameters come from the config."""
    state: dict[int, dict[str, Tensor]] = {}
    late: dict[str, Tensor] = {}
    for key, value in flat.items():
        if key.startswith(prefix):
            index, name = key.removeprefix(prefix).split(".", 1)
            entries = late if index == IN_FLIGHT else state.setdefault(int(index), {})
            entries[name] = value
    if isinstance(optimizer, LocalDeMo):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            state[number][SHARED] = parameter.detach().clone()  # the model has been loaded
    restored = {**optimizer.state_dict(), "state": state}
    optimizer.load_state_dict({**restored, IN_FLIGHT: late} if late else restored)
