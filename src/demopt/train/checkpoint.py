"""Checkpoints of a run: a folder per step, of torch.distributed.checkpoint (DCP), with a record of the run.

The last two are kept. These are for connected ranks; those of a run in a folder are in `demopt/runs/checkpoints.py`.
"""

import json
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

from demopt.checkpoint import LoadPlanner, OptimizerState, Reader
from demopt.errors import first_line
from demopt.optim.demo import DeMo
from demopt.optim.local_demo import LocalDeMo
from demopt.train.config import LAST_FILE, Given, InputError, TrainConfig, check_same_run, checkpoints_in, config_of
from demopt.train.out import sync
from demopt.train.team import Team

KEEP = 2
RUN = "run.json"


@dataclass(frozen=True)
class CheckpointRecord:
    """The record of a checkpoint: the run that wrote it, so that no other run resumes from it by mistake."""

    step: int
    fingerprint: str  # of the data
    settings: Given
    tokens: int  # trained on so far


def whole(folder: Path) -> list[Path]:
    """Returns the checkpoints that have `.metadata`, which DCP writes last: the whole ones, oldest first."""
    return [found for found, is_whole in checkpoints_in(folder).items() if is_whole]


def read(path: Path) -> CheckpointRecord:
    """Reads the record of the checkpoint at `path`; InputError if it, or the checkpoint's table, is damaged."""
    try:
        Reader(path).read_metadata()  # before DCP, which logs tracebacks if it is damaged, and looks for other files
        raw = CheckpointRecord(**json.loads((path / RUN).read_text(encoding="utf-8")))
        return CheckpointRecord(
            int(raw.step), str(raw.fingerprint), config_of(raw.settings, elsewhere=True).record(), int(raw.tokens)
        )
    except Exception as error:  # it may hold anything
        raise _unreadable(path, error) from None


def find(folder: Path, config: TrainConfig, fingerprint: str) -> tuple[Path, CheckpointRecord]:
    """Returns the checkpoint to resume from; InputError if there is none or it belongs to another run."""
    found = whole(folder)
    if not found:
        raise InputError(f"--resume: {folder.parent} holds no whole checkpoint; start anew with --overwrite")
    saved = read(found[-1])
    again = "go on with the same settings or start anew in another --out"
    check_same_run(config, fingerprint, saved.settings, saved.fingerprint, f"the run in {folder.parent}", again)
    return found[-1], saved


def save(folder: Path, saved: CheckpointRecord, model: nn.Module, optimizer: torch.optim.Optimizer, team: Team) -> None:
    """Writes a checkpoint and deletes all but the last two. With LocalDeMo call it inside `shared()`."""
    target = folder / f"step-{saved.step:08d}"
    if team.first:
        for leftover in checkpoints_in(folder).keys() - whole(folder):  # of an interrupted save or deletion
            shutil.rmtree(leftover)
        target.mkdir(parents=True)
        (target / RUN).write_text(json.dumps(vars(saved)) + "\n", encoding="utf-8")
        sync(target / RUN)
    team.barrier()
    try:
        save_state(_state(model, optimizer), checkpoint_id=target)
    except CheckpointException as error:
        raise _cause(error) from error
    if team.first:
        for old in whole(folder)[:-KEEP]:
            (old / LAST_FILE).unlink()  # first: an interrupted deletion must not leave a folder that looks whole
            shutil.rmtree(old)
    team.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restores the model and this rank's optimizer.

    The folder may be a stranger's: only tensors, numbers and text are read from it.
    If another number of workers wrote the checkpoint, each takes over its share, as with `demopt.reshard`.
    """
    state = _state(model, optimizer)
    with warnings.catch_warnings():
        # `part_or_share` warns of shares; `_introduce` in worker.py reports them in its own words
        warnings.filterwarnings("ignore", "the state was saved by .* ranks, and there are")
        try:
            load_state(state, storage_reader=Reader(path), planner=LoadPlanner())
            if not isinstance(optimizer, DeMo | LocalDeMo):  # DCP has loaded these through `OptimizerState`
                set_optimizer_state_dict(model, optimizer, state["optimizer"])
        except (Exception, CheckpointException) as error:  # of pickle, DCP or the optimizer: it may hold anything
            if isinstance(_cause(error), MemoryError | torch.OutOfMemoryError):
                raise
            raise _unreadable(path, error) from None


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns a run's state for DCP, which saves values with equal keys once; without the model's frozen parameters.

    DCP loads tensors in place, then calls `OptimizerState`, which puts this rank's local weights over the global ones.
    """
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}
    if isinstance(optimizer, DeMo | LocalDeMo):
        return {"model": weights, "optimizer": OptimizerState(optimizer)}
    return {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer)}


def _cause(error: BaseException) -> BaseException:
    """Returns the error of the first rank, if torch has wrapped those of all ranks."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _unreadable(path: Path, error: BaseException) -> InputError:
    return InputError(f"--resume: {path} cannot be read: {first_line(_cause(error))}; delete it to take the one before")
