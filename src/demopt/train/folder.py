"""The --out folder: where each file is, its metrics, and a lock that lets one run at a time write to it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from demopt.errors import DemoptError, one_line
from demopt.train.config import InputError, TrainConfig

Row = dict[str, Any]  # the metrics of a step


class RunFolder:
    """The paths in an --out folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.json"  # the record of all settings
        self.metrics = root / "metrics.jsonl"  # one JSON object per step
        self.checkpoints = root / "checkpoints"  # the last two
        self.tokens = root / "tokens"  # the encoded text, memory-mapped by all workers of this machine
        self.model = root / "model"  # the trained model, in transformers' format
        self.stop = root / "stop"  # while it exists, the run saves a checkpoint after the current step and stops
        self.state = root / "state.pt"  # of a worker that has left a run in a folder
        trackers = (root / "tensorboard", root / "wandb")
        self.written = (self.config, self.metrics, self.checkpoints, self.tokens, self.model, self.stop,
                        self.state, *trackers)  # fmt: skip

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turns an error of writing files, such as a full disk, into one line."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise DemoptError(f"--out {self.root}: cannot be written: {_reason(error)}") from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Locks the folder against other launchers until the run has finished."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = (self.root / ".lock").open("w")
        except OSError as error:
            raise InputError(f"--out {self.root}: cannot be written: {error.strerror}") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"--out {self.root}: a run is at work in it; wait for its end or stop it") from None
            yield

    def refuse_if_taken(self, config: TrainConfig) -> None:
        """Raises InputError if the folder holds another run, or if --overwrite and --resume are both given."""
        if config.overwrite and config.resume:
            raise InputError("--overwrite deletes the run that --resume continues; give one of them")
        if self.config.exists() and not (config.resume or config.overwrite):
            raise InputError(
                f"--out {self.root} already holds a run; go on with --resume, replace it with --overwrite, or give "
                "another --out"
            )

    def claim(self, config: TrainConfig) -> None:
        """Prepares the folder for a run and records the settings. With --overwrite, deletes only files of a run."""
        self.refuse_if_taken(config)
        try:
            for place in self.written if config.overwrite else (self.stop,):
                if place.is_dir():
                    shutil.rmtree(place, ignore_errors=True)
                else:
                    place.unlink(missing_ok=True)
            write_whole(self.config, json.dumps(config.record(), indent=2) + "\n")
        except OSError as error:
            raise InputError(f"--out {self.root}: cannot be written: {error.strerror}") from None

    def read_metrics(self) -> list[Row]:
        """Returns the complete lines of metrics.jsonl; leaves out damaged ones."""
        if not self.metrics.exists():
            return []
        return [row for line in self.metrics.read_bytes().splitlines() if (row := _row(line)) is not None]

    def rewind_metrics(self, step: int) -> None:
        """Drops the lines after `step`; a resumed run repeats those steps."""
        rows = [row for row in self.read_metrics() if row["step"] <= step]
        write_whole(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that at any moment it is the old one or the new one, as a whole."""
    aside = path.with_suffix(".partial")
    aside.write_text(text, encoding="utf-8")
    sync(aside)
    aside.replace(path)


def sync(path: Path) -> None:
    """Fsyncs a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _row(line: bytes) -> Row | None:
    """Returns the metrics in a line; None if no run has written it: a killed process can leave half a line."""
    try:
        row: Row = json.loads(line)
        return row if row["step"] >= 1 and row["step_seconds"] > 0 else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _reason(error: BaseException) -> str:
    """Returns why a file could not be written; some libraries wrap the system's error, or lose it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return f"{one_line(error)} (is the disk full?)"
