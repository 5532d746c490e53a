"""Which checkpoints a folder holds, and which run, and which step of it, each belongs to."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from demopt.errors import one_line
from demopt.train.config import Given, InputError, TrainConfig, differences, flag
from demopt.train.integrity import refuse_damaged
from demopt.train.team import Team

KEEP = 2
RECORD = "run.json"
PARTIAL = ".partial"


@dataclass(frozen=True)
class Saved:
    """Identifies the run that wrote a checkpoint, so that no other run resumes from it by mistake."""

    step: int
    fingerprint: str  # of the data
    settings: Given
    tokens: int  # trained on so far

    @property
    def workers(self) -> int:
        """The number of workers that wrote it."""
        return int(self.settings["workers"])


def place(folder: Path, step: int) -> Path:
    """Return where a folder of checkpoints has that of a step."""
    return folder / f"step-{step:08d}"


def newest(folder: Path) -> Path | None:
    """Return the latest complete checkpoint in a folder of checkpoints, or None."""
    return max(complete(folder), default=None)


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder of checkpoints; their bytes may have changed since."""
    return [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8}", path.name)]


def read(path: Path) -> Saved:
    """Read which run, and which step of it, the checkpoint at `path` belongs to."""
    try:
        found = json.loads((path / RECORD).read_text(encoding="utf-8"))
        tokens = found["step"] * TrainConfig(**found["settings"]).tokens_per_step  # older records lack it
        return Saved(**{"tokens": tokens, **found})
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        refuse_damaged(path, complete(path.parent))
        raise InputError(f"--resume: {path / RECORD} cannot be read: {one_line(error)}") from None


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
    come_and_go, now = (bool(each["min_workers"] or each["lighthouse"]) for each in (before, settings))
    if come_and_go != now:
        kind = "come and go" if come_and_go else "are fixed"
        raise InputError(
            f"--resume: the checkpoint is of a run whose workers {kind}; go on as it was started, or start anew in "
            "another --out"
        )
    if changed := differences(before, settings):
        name = changed[0]
        raise InputError(
            f"--resume: {flag(name)} is {settings[name]}, but the checkpoint was made with {before[name]}; "
            "go on with the same settings or start anew in another --out"
        )
    if saved.fingerprint != fingerprint:
        raise InputError("--resume: the text or tokenizer is not the one that the checkpoint was trained on")


def check_bytes(path: Path, team: Team) -> None:
    """Raise InputError if files of a checkpoint are damaged; every rank looks at its share of them."""
    refuse_damaged(path, complete(path.parent), team.rank, team.world_size)
