"""Checkpoints of a run whose workers come and go: weights, written by one replica of a folder, and each one's own.

checkpoints/step-00000200/weights.pt         weights, and the writer's optimizer state
checkpoints/step-00000200/HOST-SLOT.pt       a replica's own optimizer state, round, and place in its data
checkpoints/step-00000200/run.json           last: with it, the weights are whole
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from demopt.state.saved import unmarked
from demopt.train.checkpoint import KEEP, RECORD, Saved, place
from demopt.train.config import TrainConfig
from demopt.train.folder import sync

WEIGHTS = "weights.pt"


@dataclass(frozen=True)
class Own:
    """What a replica saves beside its state: rounds done, messages applied in them, and batches that it has drawn.

    Examples:
        >>> Own(round=7, messages=20, drawn=35).drawn
        35
    """

    round: int
    messages: int
    drawn: int


def save(
    folder: Path,
    step: int,
    name: str,
    writer: bool,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    own: Own,
    config: TrainConfig,
    fingerprint: str,
    tokens: int,
) -> None:
    """Write what is this replica's own, and, for the writer, the weights; delete all but the last two steps."""
    target = place(folder, step)
    _clear(folder, target, name)
    mine = {"optimizer": unmarked(optimizer.state_dict()), **asdict(own)}
    _write(target / f"{name}.pt", mine)
    if not writer:
        return
    _write(target / WEIGHTS, {"model": model.state_dict(), **mine})
    record = target / f".{RECORD}"
    record.write_text(json.dumps(vars(Saved(step, fingerprint, config.record(), tokens))) + "\n", encoding="utf-8")
    sync(record)
    record.rename(target / RECORD)
    sync(target)
    for old in sorted(path for path in folder.glob("step-*") if path < target)[: -(KEEP - 1)]:
        shutil.rmtree(old, ignore_errors=True)


def _clear(folder: Path, target: Path, name: str) -> None:
    """Delete this replica's part of older steps whose weights never became whole: on a full disk they would add up."""
    for old in folder.glob("step-*"):
        if old < target and not (old / RECORD).exists():
            (old / f"{name}.pt").unlink(missing_ok=True)
            with suppress(OSError):  # somebody else's part is in it, or somebody else has deleted it
                old.rmdir()


def newest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint, or None.

    Examples:
        >>> newest(Path("nothing here"))
    """
    return max((path.parent for path in folder.glob(f"step-*/{RECORD}")), default=None)


def load(folder: Path, name: str, model: nn.Module, optimizer: Any) -> Own | None:
    """Load the newest checkpoint, and this replica's own part if it is there; otherwise it starts as a new one."""
    found = newest(folder)
    if found is None:
        return None
    weights = _read(found / WEIGHTS)
    model.load_state_dict(weights["model"])
    own = found / f"{name}.pt"
    mine = _read(own) if own.exists() else None
    if mine is not None and mine["round"] != weights["round"]:
        mine = None
    optimizer.load_state_dict((mine or weights)["optimizer"])
    if mine is None:
        optimizer.replicator.forget()
    return Own(weights["round"], weights["messages"], mine["drawn"] if mine else 0)


def _write(path: Path, what: Any) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".partial")
    try:
        with aside.open("wb") as file:
            torch.save(what, file)
        sync(aside)
        os.replace(aside, path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error.__context__, OSError):  # torch only says that a position is wrong
            raise error.__context__ from None
        raise


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)
