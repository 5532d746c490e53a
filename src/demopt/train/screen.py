"""The display while a run trains: on a terminal a bar, elsewhere a line at most every ten seconds."""

import math
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from demopt.errors import printable
from demopt.train.config import TrainConfig
from demopt.train.out import Row

QUIET_SECONDS = 10.0  # at most, between lines
WARM_UP = 10  # first steps, which an estimate of the time left ignores
MEASURED = 5  # steps after these that an estimate needs at least
LINE = 79  # characters, at most
BAR = 20  # characters, where there is room


class Screen(ExitStack):
    """Shows steps and messages. A context: leaving it removes the bar."""

    def __init__(self, config: TrainConfig, done: int) -> None:
        super().__init__()
        self._config, self._done, self._shown = config, done, -math.inf
        self._warm: tuple[int, float, float] | None = None  # step, part and time since which the speed is measured
        self._sums: Counter[str] = Counter()  # over the steps of this start
        self._console, self._progress = Console(highlight=False), None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bar = BAR if self._console.width > LINE else BAR // 2 if self._console.width > LINE // 2 else 0
            fields = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="crop"))
            columns = [BarColumn(self._bar), fields] if self._bar else [fields]
            self._progress = self.enter_context(Progress(*columns, console=self._console, transient=True))
            self._task = self._progress.add_task("", total=1.0)

    def say(self, line: str) -> None:
        """Shows one message, above the bar; it may quote other workers."""
        self._console.print(printable(line), markup=False, emoji=False, soft_wrap=True)

    def step(self, row: Row) -> None:
        """Shows a step: the first and the last one, those with an evaluation, and others from time to time."""
        now, epochs = time.monotonic(), self._config.epochs
        part = row.get("epoch", 0.0) / epochs if epochs else row["step"] / (self._config.steps or 1)  # of the run
        self._sums.update({name: row[name] for name in ("sent_bytes", "received_bytes", "step_seconds")})
        self._sums["tokens"] += tokens_of(row, self._config)
        fields = self._fields(row, part, now)
        if row["step"] - self._done >= WARM_UP and self._warm is None:
            self._warm = row["step"], part, now
        told = row["step"] in (self._done + 1, self._config.steps) or "val_loss" in row
        if self._progress is not None:
            beside = fitting(fields, self._console.width - self._bar - 3)
            self._progress.update(self._task, completed=part, description=beside)
        if told or (self._progress is None and now - self._shown >= QUIET_SECONDS):
            self.say(fitting(fields, LINE if self._progress is None else min(LINE, self._console.width)))
            self._shown = now

    def _fields(self, row: Row, part: float, now: float) -> list[str]:
        """Returns the parts of a line, the most important first."""
        step, steps, sums = row["step"], row["step"] - self._done, self._sums
        workers = row.get("workers", self._config.workers)
        speed = sums["tokens"] / sums["step_seconds"]
        traffic = max(sums["sent_bytes"], sums["received_bytes"]) / steps
        fields = [f"step {step}/{self._config.steps}" if self._config.steps else f"step {step}"]
        fields += [f"epoch {row.get('epoch', 0.0):.2f}/{self._config.epochs}"] if self._config.epochs else []
        fields += [f"loss {row['loss']:.3f}"]
        fields += [f"val {row['val_loss']:.3f}"] if "val_loss" in row else []
        since, part_then, then = self._warm or (step, 0.0, now)
        if step - since >= MEASURED and part_then < part < 1:
            fields.append(f"{duration((now - then) / (part - part_then) * (1 - part))} left")
        fields.append(f"{speed:,.0f} tok/s")
        fields += [f"{decimal(round(traffic))}/step"] if traffic else []
        fields += [f"{workers} worker{'s' * (workers != 1)}"] if "workers" in row else []  # of a run in a folder
        fields += [f"round {row['round']}"] if "round" in row else []
        return fields


def tokens_of(row: Row, config: TrainConfig) -> int:
    """Returns the tokens of a step over all workers, whose number varies in a folder."""
    return replace(config, workers=row.get("workers", config.workers)).tokens_per_step


def fitting(fields: list[str], width: int) -> str:
    """Joins as many of the first fields as fit into `width` characters."""
    while len("  ".join(fields)) > width and len(fields) > 1:
        fields = fields[:-1]
    return "  ".join(fields)


def duration(seconds: float) -> str:
    """Formats a time in its two largest units."""
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
