"""The output of a run while it trains: metrics.jsonl, a progress bar or plain lines, TensorBoard events."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from typing import Any, TextIO

from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.text import Text

from demopt.exchange.wrappers import all_reduce_bytes
from demopt.train.config import TrainConfig
from demopt.train.folder import RunFolder
from demopt.train.method import FLOAT32_BYTES

PLAIN_SECONDS = 10.0  # between lines if stdout is not a terminal
SCALARS = ("loss", "val_loss", "lr", "sent_bytes", "received_bytes", "step_seconds")

Row = dict[str, Any]


class Report:
    """Reports every step; `step` and `sync` do nothing on ranks other than rank 0."""

    def __init__(self, folder: RunFolder, config: TrainConfig, done: int, parameters: int, first: bool) -> None:
        self._config, self._first = config, first
        self._ddp = all_reduce_bytes(FLOAT32_BYTES * parameters, config.workers)
        self._last_line = 0.0
        self._val_loss: float | None = None
        self._tokens, self._seconds = 0, 0.0  # of this process, for tokens/s
        self._steps, self._sent, self._received = 0, 0, 0  # of this process, for the mean of a step
        self._live: Live | None = None
        if not first:
            return
        folder.rewind_metrics(done)
        self._file: TextIO = folder.metrics.open("a", encoding="utf-8")
        self._events = _events(folder, done)
        console = Console()
        if console.is_terminal:
            self._bar = Progress(MofNCompleteColumn(), BarColumn(None), TimeRemainingColumn(), expand=True)
            self._task = self._bar.add_task("", total=config.steps, completed=done)
            self._live = Live(self._bar, console=console)
            self._live.start()

    def step(self, row: Row) -> None:
        """Record one step; a loss that is not finite is null in the file, because JSON has no NaN."""
        if not self._first:
            return
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
        self._file.flush()
        if self._events is not None:
            for name in SCALARS:
                if name in row:
                    self._events.add_scalar(name, row[name], row["step"])
        self._val_loss = row.get("val_loss", self._val_loss)
        self._show(row)

    def say(self, line: str) -> None:
        """Print one line, above the progress bar if there is one."""
        if self._live is not None:
            self._live.console.print(line, highlight=False)
        elif self._first:
            print(line, flush=True)

    def sync(self) -> None:
        """Fsync metrics.jsonl, before a checkpoint that relies on it."""
        if self._first:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Stop the progress bar and close the files."""
        if self._live is not None:
            self._live.stop()
        if self._first:
            self._file.close()
            if self._events is not None:
                self._events.close()

    def _show(self, row: Row) -> None:
        self._seconds += row["step_seconds"]
        self._tokens += row["tokens"] // row["step"]
        rate = self._tokens / self._seconds
        self._steps += 1
        self._sent += row["sent_bytes"]
        self._received += row["received_bytes"]
        sent, received = (decimal(round(total / self._steps)) for total in (self._sent, self._received))
        val = "" if self._val_loss is None else f"  val {self._val_loss:.3f}"
        traffic = f"{sent} up {received} down a step, DDP {decimal(self._ddp)}"
        text = f"loss {row['loss']:.3f}{val}  {rate:,.0f} tokens/s  {traffic}"
        if self._live is not None:
            self._bar.update(self._task, completed=row["step"])
            self._live.update(Group(Text(text, overflow="ellipsis", no_wrap=True), self._bar))
            return
        now = time.monotonic()
        last = row["step"] in (1, self._config.steps)
        if last or "val_loss" in row or now - self._last_line >= PLAIN_SECONDS:
            self._last_line = now
            print(f"step {row['step']}/{self._config.steps}  {text}", flush=True)


def _events(folder: RunFolder, done: int) -> Any:
    """Return TensorBoard's writer if tensorboard is installed, otherwise None."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder.events), purge_step=done + 1)
