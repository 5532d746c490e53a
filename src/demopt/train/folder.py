"""The --out folder: which file is where, and who may write into it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demopt.train.config import InputError, TrainConfig


@dataclass(frozen=True)
class RunFolder:
    """The places in an --out folder.

    Example:
        >>> RunFolder(Path("runs/first")).metrics.as_posix()
        'runs/first/metrics.jsonl'
    """

    root: Path

    @property
    def config(self) -> Path:
        """The record of all settings."""
        return self.root / "config.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The last two checkpoints."""
        return self.root / "checkpoints"

    @property
    def tokens(self) -> Path:
        """The encoded text, mapped by all workers of this machine."""
        return self.root / "tokens"

    @property
    def model(self) -> Path:
        """The trained model, for transformers."""
        return self.root / "model"

    @property
    def plot(self) -> Path:
        """The loss over the steps."""
        return self.root / "loss.png"

    @property
    def sample(self) -> Path:
        """Text that the trained model has written."""
        return self.root / "sample.txt"

    @property
    def events(self) -> Path:
        """TensorBoard's events."""
        return self.root / "tensorboard"

    @property
    def stop(self) -> Path:
        """While this file exists, the run stops at the next step, saved."""
        return self.root / "stop"

    def refuse_if_taken(self, config: TrainConfig) -> None:
        """Refuse a folder that holds another run, or a pair of wishes that exclude each other."""
        if config.overwrite and config.resume:
            raise InputError("--overwrite deletes what --resume goes on from; give one of them")
        if self.config.exists() and not (config.resume or config.overwrite):
            raise InputError(
                f"--out {self.root} already holds a run; go on with --resume, "
                "replace it with --overwrite, or give another --out"
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other launcher out of the folder for as long as this one lives."""
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

    def claim(self, config: TrainConfig) -> None:
        """Make the folder ready for a run and record its settings."""
        self.refuse_if_taken(config)
        try:
            if config.overwrite:
                self._clear()
            self.root.mkdir(parents=True, exist_ok=True)
            self.stop.unlink(missing_ok=True)
            config.save(self.config)
        except OSError as error:
            raise InputError(f"--out {self.root}: cannot be written: {error.strerror}") from None

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole lines of metrics.jsonl."""
        if not self.metrics.exists():
            return []
        rows = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break  # a process that was killed leaves half a line at the end
        return rows

    def rewind_metrics(self, step: int) -> None:
        """Forget the steps after `step`, which a resumed run takes again."""
        rows = [row for row in self.read_metrics() if row["step"] <= step]
        aside = self.metrics.with_suffix(".partial")
        aside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        aside.replace(self.metrics)

    def _clear(self) -> None:
        """Delete what a run has written, and nothing else that may lie there."""
        for place in (self.checkpoints, self.tokens, self.model, self.events):
            shutil.rmtree(place, ignore_errors=True)
        for place in (self.metrics, self.plot, self.sample, self.stop, self.config):
            place.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
