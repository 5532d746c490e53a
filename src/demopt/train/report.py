"""The output of a run: metrics.jsonl, progress lines and a tracker while it trains; model and table."""

from __future__ import annotations

import io
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import timedelta
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import nn

from demopt.errors import kind_and_line
from demopt.exchange.meter import all_reduce_bytes
from demopt.train.config import InputError, TrainConfig
from demopt.train.data import Corpus, load_tokenizer
from demopt.train.folder import Row, RunFolder
from demopt.train.method import FLOAT32_BYTES
from demopt.train.model import count_parameters, save_model

QUIET_SECONDS = 10.0  # at most, between progress lines
LAST_STEPS = 20  # the final training loss is over the last twentieth of the steps, at most this many


class Report:
    """Reports every step, on rank 0; on other ranks it does nothing. A context: leaving it closes all."""

    def __init__(self, folder: RunFolder, config: TrainConfig, done: int, first: bool) -> None:
        self._first = first
        self._tracker: TensorBoard | WandB | None = None
        if not first:
            return
        self._progress, self._told, self._name = Progress(config, done), 0.0, config.tracker
        if config.tracker:
            try:
                with _silently():
                    self._tracker = TRACKERS[config.tracker](config, folder, done)
            except Exception as error:  # not installed, no login, no server: errors differ by library
                raise InputError(f"--tracker {self._name}: {kind_and_line(error)}") from None
        folder.rewind_metrics(done)
        self._file: TextIO = folder.metrics.open("a", encoding="utf-8")

    def step(self, row: Row) -> None:
        """Records one step; a loss that is not finite is null in the file, because JSON has no NaN."""
        if not self._first:
            return
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
        self._file.flush()
        if self._tracker is not None:
            try:
                figures = {name: float(value) for name, value in clean.items() if name != "step" and value is not None}
                self._tracker.log(row["step"], figures)
            except Exception as error:
                self._tracker = None
                self.say(f"--tracker {self._name} failed, training goes on without it: {kind_and_line(error)}")
        self._progress.add(row)
        end = row["step"] in (1, self._progress.config.steps)
        if end or "val_loss" in row or time.monotonic() - self._told >= QUIET_SECONDS:
            self._told = time.monotonic()
            self.say(self._progress.line())

    def say(self, line: str) -> None:
        """Prints one line."""
        if self._first:
            print(line, flush=True)

    def sync(self) -> None:
        """Fsyncs metrics.jsonl, before a checkpoint that relies on it."""
        if self._first:
            os.fsync(self._file.fileno())

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._first:
            return
        with suppress(OSError):  # of a full disk, which the step that wrote last has told
            self._file.close()
        if self._tracker is not None:
            try:
                with _silently():
                    self._tracker.close(failed=kind is not None)
            except Exception as failure:
                self.say(f"--tracker {self._name} could not be closed: {kind_and_line(failure)}")


class Progress:
    """Sums over the steps of this start; `done` steps came before it."""

    def __init__(self, config: TrainConfig, done: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self._before, self._clock, self._began = config, done, clock, clock()
        self._row: Row = {}  # the last value of each metric
        self._sums: Counter[str] = Counter()

    def add(self, row: Row) -> None:
        """Takes in the row of one more step."""
        self._row |= row
        self._sums.update({name: row[name] for name in ("sent_bytes", "received_bytes", "step_seconds")})
        self._sums["worker_steps"] += self._row.get("members", self.config.workers)

    def line(self) -> str:
        """Returns the progress in one line; the time left assumes steps as long as those since this start."""
        config, row, sums = self.config, self._row, self._sums
        steps, elapsed = row["step"] - self._before, self._clock() - self._began
        speed = config.tokens_per_step // config.workers * sums["worker_steps"] / sums["step_seconds"]
        up, down = (decimal(round(sums[name] / steps)) for name in ("sent_bytes", "received_bytes"))
        gone, left = (
            timedelta(seconds=round(each)) for each in (elapsed, elapsed / steps * (config.steps - row["step"]))
        )
        val = f"  val {row['val_loss']:.3f}" if "val_loss" in row else ""
        churn = ""
        if "round" in row:  # of a run in a folder
            churn = f"  round {row['round']}, {_team(row['members'])}, {row['waited_seconds']:.1f} s waited"
        return (
            f"step {row['step']}/{config.steps}  loss {row['loss']:.3f}{val}  {speed:,.0f} tokens/s  "
            f"{up} up, {down} down per step  {gone} gone, {left} left{churn}"
        )


# Trackers


class TensorBoard:
    """Event files; those of steps that a resumed run repeats are hidden."""

    def __init__(self, config: TrainConfig, folder: RunFolder, done: int) -> None:
        del config
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder.root / "tensorboard"), purge_step=done + 1)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        del failed
        self._writer.close()


class WandB:
    """A run below --out, for `wandb sync`, or on the server with WANDB_MODE=online."""

    def __init__(self, config: TrainConfig, folder: RunFolder, done: int) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "demopt"),
            name=os.environ.get("WANDB_NAME", folder.root.name),
            dir=os.environ.get("WANDB_DIR", str(folder.root)),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config={**config.record(), "done_before": done},
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


TRACKERS: dict[str, type[TensorBoard | WandB]] = {"tensorboard": TensorBoard, "wandb": WandB}


@contextmanager
def _silently() -> Iterator[None]:
    """Silences a library, and gives it no terminal to ask: a worker has none."""
    with open(os.devnull, encoding="utf-8") as nothing, redirect_stdout(io.StringIO()):
        before, sys.stdin = sys.stdin, nothing
        try:
            yield
        finally:
            sys.stdin = before


# The end of a run


def finish(config: TrainConfig, folder: RunFolder, model: nn.Module, corpus: Corpus) -> None:
    """Saves the model, and prints the table."""
    known = config.tokenizer != "bytes" or corpus.bytes_per_token is not None
    save_model(model, load_tokenizer(config.tokenizer) if known else None, folder.model)
    rows = folder.read_metrics()
    if rows:  # a worker that has joined a run after its last step has none
        print_table(rows, config, count_parameters(model), corpus.bytes_per_token)
    print(f"the model is in {folder.model}", flush=True)


def print_table(rows: list[Row], config: TrainConfig, parameters: int, bytes_per_token: float | None) -> None:
    """Prints the run's losses, speed and bytes. Bytes are counted; those of DDP are computed."""
    workers = int(statistics.mode(row.get("members", config.workers) for row in rows))  # in most rounds of a folder
    counted, dense = config.optimizer in ("demo", "local"), FLOAT32_BYTES * parameters
    compared = counted and workers > 1  # alone, DDP sends nothing
    table = Table(title=f"{config.optimizer}, {_team(workers)}, {parameters:,} parameters, {len(rows)} steps")
    for heading in ("", "this run", *(("DDP, computed", "ratio") if compared else ())):
        table.add_column(heading, justify="right" if heading else "left")

    def add_bytes(label: str, value: int, ddp: int) -> None:
        more = (decimal(ddp), f"{ddp / value:.1f}x" if value else "-") if compared else ()
        table.add_row(label if counted else f"{label}, computed", decimal(value), *more)

    last = [row["loss"] for row in rows[-max(1, min(LAST_STEPS, len(rows) // 20)) :] if row["loss"] is not None]
    validated = [row["val_loss"] for row in rows if row.get("val_loss") is not None]
    final = validated[-1] if validated else math.nan
    unit = _unit(bytes_per_token)
    table.add_row(f"final train loss, {unit}", f"{sum(last) / len(last) if last else math.nan:.4f}")
    table.add_row(f"final validation loss, {unit}", f"{final:.4f}")
    if bytes_per_token not in (None, 1):
        table.add_row("final validation loss, nats per byte", f"{final / (bytes_per_token or 1):.4f}")
    usual = statistics.median(row["step_seconds"] for row in rows)  # not the mean: the first step warms up, or compiles
    table.add_row("tokens per second", f"{rows[-1]['tokens'] / rows[-1]['step'] / usual:,.0f}")
    exchange = [row["exchange_seconds"] for row in rows]
    share = None if None in exchange else sum(exchange) / sum(row["step_seconds"] for row in rows)
    table.add_row("share of the step in exchange", "in backward" if share is None else f"{share:.1%}")
    if workers > 1:
        traffic = all_reduce_bytes(dense, workers)
        for label, name in (("uploaded", "sent_bytes"), ("received", "received_bytes")):
            add_bytes(f"{label} by one worker per step", round(sum(row[name] for row in rows) / len(rows)), traffic)
    if counted:
        add_bytes("message", max(row["payload_bytes"] for row in rows), dense)
    Console().print(table)


def _team(workers: int) -> str:
    return f"{workers} worker{'s' * (workers != 1)}"


def _unit(bytes_per_token: float | None) -> str:
    return "nats per byte" if bytes_per_token == 1 else "nats per token"
