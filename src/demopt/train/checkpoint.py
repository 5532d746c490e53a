"""Checkpoints of a run: a folder per step with torch.distributed.checkpoint's files, and a record.

A checkpoint is written to a .partial folder, synced, then renamed: a step-* folder is complete. The last two are kept.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from demopt.checkpoint import LoadPlanner, OptimizerState
from demopt.errors import one_line
from demopt.optim.demo import DeMo
from demopt.optim.local_demo import LocalDeMo
from demopt.state.reshard import parent, shares
from demopt.train.config import Given, InputError, TrainConfig, config_of, differences, flag
from demopt.train.folder import sync
from demopt.train.team import Team

KEEP = 2
RECORD = "run.json"
PARTIAL = ".partial"


@dataclass(frozen=True)
class Saved:
    """The record of a checkpoint: the run that wrote it, so that no other run resumes from it by mistake."""

    step: int
    fingerprint: str  # of the data
    settings: Given
    tokens: int  # trained on so far

    @property
    def workers(self) -> int:
        """The number of workers that wrote it."""
        return int(self.settings["workers"])


# Finding one


def place(folder: Path, step: int) -> Path:
    """Returns the place of a step in a folder of checkpoints."""
    return folder / f"step-{step:08d}"


def complete(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in a folder of checkpoints."""
    return [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8}", path.name)]


def newest(folder: Path) -> Path | None:
    """Returns the latest complete checkpoint in a folder of checkpoints, or None."""
    return max(complete(folder), default=None)


def read(path: Path) -> Saved:
    """Reads the record of the checkpoint at `path`."""
    try:
        found = Saved(**json.loads((path / RECORD).read_text(encoding="utf-8")))
        config_of(found.settings)
        if not isinstance(found.step, int) or not isinstance(found.tokens, int):
            raise ValueError("step and tokens must be numbers")
        return found
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise _unreadable(path, error) from None


def find(folder: Path, settings: Given, fingerprint: str) -> Path:
    """Returns the checkpoint to resume from; InputError if there is none or it belongs to another run."""
    found = newest(folder)
    if found is None:
        raise InputError(f"--resume: {folder.parent} holds no whole checkpoint; start anew with --overwrite")
    check_same_run(read(found), settings, fingerprint)
    return found


def check_same_run(saved: Saved, settings: Given, fingerprint: str) -> None:
    """Raises InputError if settings or data differ from those of the checkpoint's run."""
    before = {**TrainConfig().record(), **saved.settings}  # older checkpoints lack newer settings: assume defaults
    if changed := differences(before, settings):
        name = changed[0]
        raise InputError(
            f"--resume: {flag(name)} is {settings[name]}, but the checkpoint was made with {before[name]}; "
            "go on with the same settings or start anew in another --out"
        )
    if saved.fingerprint != fingerprint:
        raise InputError("--resume: the text or tokenizer is not the one that the checkpoint was trained on")


# Saving and loading


def save(folder: Path, saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer, team: Team) -> None:
    """Writes a checkpoint and deletes all but the last two. With LocalDeMo call it inside `shared()`."""
    target = place(folder, saved.step)
    partial = target.with_name(target.name + PARTIAL)
    if team.first:
        for leftover in folder.glob(f"*{PARTIAL}"):  # of an interrupted save or deletion
            shutil.rmtree(leftover)
        partial.mkdir(parents=True)
    team.barrier()
    _write(_state(model, optimizer, team.rank), partial)
    if team.first:
        _finish(partial, target, saved)
    team.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, team: Team) -> None:
    """Restores the model, this rank's optimizer and its random numbers.

    If another number of workers wrote the checkpoint, each takes over its share, as with `demopt.reshard`.
    """
    before = parent(shares(team.rank, team.world_size, read(path).workers))
    state = _state(model, optimizer, before)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the state was saved by .* ranks, and there are")  # the caller says so
        try:
            load_state(state, checkpoint_id=path, planner=LoadPlanner())
        except CheckpointException as error:
            raise _unreadable(path, _cause(error)) from None
    torch.set_rng_state(state[f"random.rank{before}"])
    if not isinstance(optimizer, DeMo | LocalDeMo):
        set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, random_of: int) -> dict[str, Any]:
    """Returns a run's state for torch.distributed.checkpoint, which saves values with equal keys once.

    `random_of`: the rank whose random numbers are saved or loaded.
    """
    own: Any
    if isinstance(optimizer, DeMo | LocalDeMo):
        own = OptimizerState(optimizer)
    else:
        own = get_optimizer_state_dict(model, optimizer)
    return {"model": model, "optimizer": own, f"random.rank{random_of}": torch.get_rng_state()}


def _write(state: dict[str, Any], folder: Path) -> None:
    """Writes this rank's part; OSError if one could not."""
    try:
        save_state(state, checkpoint_id=folder)
    except CheckpointException as error:
        cause = _cause(error)
        raise OSError(str(cause)) from cause


def _cause(error: CheckpointException) -> BaseException:
    """Returns the error of the first rank, where torch wraps those of all."""
    cause, _ = next(iter(error.failures.values()))
    return cause


def _unreadable(path: Path, error: BaseException) -> InputError:
    return InputError(f"--resume: {path} cannot be read: {one_line(error)}; without it, an older one is taken")


def _finish(partial: Path, target: Path, saved: Saved) -> None:
    (partial / RECORD).write_text(json.dumps(vars(saved)) + "\n", encoding="utf-8")
    for each in (partial / RECORD, partial):
        sync(each)
    partial.rename(target)
    sync(target.parent)
    for old in sorted(complete(target.parent))[:-KEEP]:
        # Rename first: an interrupted deletion must not leave a folder that looks complete.
        shutil.rmtree(old.rename(old.with_name(old.name + PARTIAL)))
