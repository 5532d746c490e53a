"""The output of a run while it trains: metrics.jsonl, the trackers, and what is shown."""

from __future__ import annotations

import json
import math
import os
from types import TracebackType
from typing import TextIO

from demopt.train.config import TrainConfig
from demopt.train.dashboard import make_view
from demopt.train.folder import RunFolder
from demopt.train.progress import Progress, Row
from demopt.train.trackers import Trackers


class Report:
    """Reports every step, on rank 0; on other ranks it does nothing. A context: leaving it closes all."""

    def __init__(self, folder: RunFolder, config: TrainConfig, done: int, parameters: int, first: bool) -> None:
        self._first = first
        if not first:
            return
        folder.rewind_metrics(done)
        self._file: TextIO = folder.metrics.open("a", encoding="utf-8")
        self._view = make_view(Progress(config, done, parameters), folder)
        self._trackers = Trackers(config, folder, done, self._view.say)

    def step(self, row: Row) -> None:
        """Record one step; a loss that is not finite is null in the file, because JSON has no NaN."""
        if not self._first:
            return
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
        self._file.flush()
        self._trackers.log(clean)
        self._view.show(row)

    def say(self, line: str) -> None:
        """Print one line, above the dashboard if there is one."""
        if self._first:
            self._view.say(line)

    def sync(self) -> None:
        """Fsync metrics.jsonl, before a checkpoint that relies on it."""
        if self._first:
            os.fsync(self._file.fileno())

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._first:
            self._view.close()
            self._trackers.close(failed=kind is not None)
            self._file.close()
