"""Checkpoints of a run: a folder per step with torch.distributed.checkpoint's files, a record, and checksums.

A checkpoint is written to a .partial folder, synced, then renamed: a step-* folder is complete. The last two are kept.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Iterable
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
RECORD, CHECKSUMS, METADATA = "run.json", "checksums.json", ".metadata"
PARTIAL = ".partial"
BLOCK = 1 << 22  # bytes hashed at once


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
    """Returns the complete checkpoints in a folder of checkpoints; their bytes may have changed since."""
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
        refuse_damaged(path)
        raise InputError(f"--resume: {path / RECORD} cannot be read: {one_line(error)}") from None


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


# Checksums


def damage(folder: Path) -> str | None:
    """Returns the fault in the files of a checkpoint, None if there is none."""
    try:
        text = (folder / CHECKSUMS).read_text(encoding="utf-8")
        known = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        return f"{folder / CHECKSUMS} cannot be read: {one_line(error)}"
    if not isinstance(known, dict) or text != _text(known):
        return f"{folder / CHECKSUMS} is damaged: it does not read as it was written"
    if missing := sorted(set(known).symmetric_difference(file.name for file in folder.iterdir()) - {CHECKSUMS}):
        return f"{folder / ascii(missing[0])[1:-1]} is missing, or missing among the checksums"
    for name in sorted(known):
        try:
            if _checksum(folder / name) != known[name]:
                return f"{folder / name} is damaged: its bytes are not those that were written"
        except OSError as error:
            return f"{folder / name} cannot be read: {error.strerror}"
    return None


def refuse_damaged(folder: Path) -> None:
    """Raises InputError if a checkpoint is damaged; it names the newest other one that is whole."""
    wrong = damage(folder)
    if wrong is None:
        return
    others = sorted(complete(folder.parent), reverse=True)
    whole = [path for path in others if path != folder and damage(path) is None]
    remedy = f"{whole[0].name} is whole: remove {folder} to go on from that" if whole else "no older one is whole"
    raise InputError(f"--resume: {wrong}; {remedy}")


def _checksum(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as opened:
        while block := opened.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _checksums(files: Iterable[Path]) -> dict[str, str]:
    return {file.name: _checksum(file) for file in files}


def _text(known: dict[str, str]) -> str:
    return json.dumps(dict(sorted(known.items())), indent=1) + "\n"


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
    known = team.gather(_checksums(partial.glob(f"__{team.rank}_*")))  # of the files that this rank has written
    if team.first:
        _finish(partial, target, saved, {name: sum for each in known for name, sum in each.items()})
    team.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, team: Team) -> None:
    """Restores the model, this rank's optimizer and its random numbers.

    If another number of workers wrote the checkpoint, each takes over its share, as with `demopt.reshard`.
    """
    before = parent(shares(team.rank, team.world_size, read(path).workers))
    state = _state(model, optimizer, before)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the state was saved by .* ranks, and there are")  # the caller says so
        load_state(state, checkpoint_id=path, planner=LoadPlanner())
    torch.set_rng_state(state[f"random.rank{before}"])
    if not isinstance(optimizer, DeMo | LocalDeMo):
        set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, random_of: int) -> dict[str, Any]:
    """Returns a run's state for torch.distributed.checkpoint, which saves values with equal keys once.

    `random_of`: the rank whose random numbers are saved or loaded.
    """
    own: Any
    if isinstance(optimizer, DeMo | LocalDeMo):
        own = OptimizerState(optimizer, in_flight=isinstance(optimizer, LocalDeMo))
    else:
        own = get_optimizer_state_dict(model, optimizer)
    return {"model": model, "optimizer": own, f"random.rank{random_of}": torch.get_rng_state()}


def _write(state: dict[str, Any], folder: Path) -> None:
    """Writes this rank's part; OSError with the cause of the first rank that could not, where torch wraps them all."""
    try:
        save_state(state, checkpoint_id=folder)
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise OSError(str(cause)) from cause


def _finish(partial: Path, target: Path, saved: Saved, known: dict[str, str]) -> None:
    (partial / RECORD).write_text(json.dumps(vars(saved)) + "\n", encoding="utf-8")
    known |= _checksums([partial / RECORD, partial / METADATA])
    (partial / CHECKSUMS).write_text(_text(known), encoding="utf-8")
    for each in (partial / RECORD, partial / CHECKSUMS, partial):
        sync(each)
    partial.rename(target)
    sync(target.parent)
    for old in sorted(complete(target.parent))[:-KEEP]:
        # Rename first: an interrupted deletion must not leave a folder that looks complete.
        shutil.rmtree(old.rename(old.with_name(old.name + PARTIAL)))
