"""The output of a run: metrics.jsonl, progress lines and a tracker while it trains; model and table at the end."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any, TextIO

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from demopt.errors import first_line
from demopt.exchange.meter import all_reduce_bytes
from demopt.train.config import InputError, TrainConfig
from demopt.train.data import Corpus, save_tokenizer
from demopt.train.folder import Row, RunFolder
from demopt.train.method import FLOAT32_BYTES
from demopt.train.model import count_parameters, save

QUIET_SECONDS = 10.0  # at most, between progress lines
LAST_STEPS = 20  # the final training loss is over the last twentieth of the steps, at most this many


class Report(ExitStack):
    """Reports every step, on rank 0; on other ranks it does nothing. A context: leaving it closes all."""

    def __init__(self, folder: RunFolder, config: TrainConfig, done: int, first: bool) -> None:
        super().__init__()
        self._first, self._config, self._done = first, config, done
        self._began, self._told = time.monotonic(), 0.0
        self._sums: Counter[str] = Counter()  # over the steps of this start
        if not first:
            return
        try:
            self._track = open_tracker(folder, config, done, self)
        except Exception as error:  # no login, no server: errors differ by library
            raise InputError(f"--tracker {config.tracker}: {type(error).__name__}: {first_line(error)}") from None
        folder.rewind_metrics(done)
        self._file: TextIO = folder.metrics.open("a", encoding="utf-8")
        self.callback(self._close)

    def step(self, row: Row) -> None:
        """Records one step; a loss that is not finite is null in the file, because JSON has no NaN."""
        if not self._first:
            return
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
        self._file.flush()
        if self._track is not None:
            try:
                self._track({k: v for k, v in clean.items() if k != "step" and v is not None}, row["step"])
            except Exception as error:  # of the network, for example
                self._track = None
                self.say(f"--tracker failed, training goes on without it: {type(error).__name__}: {first_line(error)}")
        self._sums.update({name: row[name] for name in ("sent_bytes", "received_bytes", "step_seconds")})
        end = row["step"] in (1, self._config.steps)
        if end or "val_loss" in row or time.monotonic() - self._told >= QUIET_SECONDS:
            self._told = time.monotonic()
            self.say(self._line(row))

    def say(self, line: str) -> None:
        """Prints one line."""
        if self._first:
            print(line, flush=True)

    def sync(self) -> None:
        """Fsyncs metrics.jsonl, before a checkpoint that relies on it."""
        if self._first:
            os.fsync(self._file.fileno())

    def _close(self) -> None:
        with suppress(OSError):  # of a full disk, which the step that wrote last has told
            self._file.close()

    def _line(self, row: Row) -> str:
        """Returns the progress in one line; the time left assumes steps as long as those since this start."""
        steps, elapsed = row["step"] - self._done, time.monotonic() - self._began
        workers = row.get("members", self._config.workers)
        speed = self._config.tokens_per_step / self._config.workers * workers * steps / self._sums["step_seconds"]
        up, down = (decimal(round(self._sums[name] / steps)) for name in ("sent_bytes", "received_bytes"))
        gone, left = (timedelta(seconds=round(elapsed / steps * n)) for n in (steps, self._config.steps - row["step"]))
        val = f"  val {row['val_loss']:.3f}" if "val_loss" in row else ""
        churn = ""
        if "round" in row:  # of a run in a folder
            churn = f"  round {row['round']}, {_team(workers)}, {row['waited_seconds']:.1f} s waited"
        return (
            f"step {row['step']}/{self._config.steps}  loss {row['loss']:.3f}{val}  {speed:,.0f} tokens/s  "
            f"{up} up, {down} down per step  {gone} gone, {left} left{churn}"
        )


def open_tracker(folder: RunFolder, config: TrainConfig, done: int, held: ExitStack) -> Callable[..., None] | None:
    """Returns the function that gives --tracker a step's metrics and its number; `held` closes the tracker."""
    if config.tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = held.enter_context(SummaryWriter(str(folder.root / "tensorboard"), purge_step=done + 1))

        def track(metrics: Row, step: int) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

        return track
    if config.tracker == "wandb":
        import wandb

        os.environ.setdefault("WANDB_MODE", "offline")  # for `wandb sync`, later
        os.environ.setdefault("WANDB_DIR", str(folder.root))
        run = held.enter_context(wandb.init(config=config.record(), settings=wandb.Settings(silent=True)))
        return lambda metrics, step: run.log(metrics, step=step)
    return None


# The end of a run


def finish(config: TrainConfig, folder: RunFolder, model: Any, corpus: Corpus) -> None:
    """Saves the model and its tokenizer for transformers, and prints the table."""
    for place in (folder.model, folder.merged) if config.merge else (folder.model,):
        save(config, model, place, merge=place == folder.merged)
        save_tokenizer(config, place, corpus.bytes_per_token is not None)
    rows = folder.read_metrics()
    if rows:  # a worker that has joined a run after its last step has none
        print_table(rows, config, count_parameters(model), corpus.bytes_per_token)
    print(f"the model is in {folder.model}", flush=True)


def print_table(rows: list[Row], config: TrainConfig, parameters: int, bytes_per_token: float | None) -> None:
    """Prints the run's losses, speed and bytes. Bytes are counted; those of DDP are computed."""
    workers = int(statistics.mode(row.get("members", config.workers) for row in rows))  # in most rounds of a folder
    table = Table(title=f"{config.optimizer}, {_team(workers)}, {parameters:,} parameters, {len(rows)} steps")
    table.add_column()
    table.add_column("this run", justify="right")
    counted = config.optimizer != "adamw"
    if counted and workers > 1:  # alone, DDP sends nothing
        table.add_column("DDP, computed", justify="right")
        table.add_column("ratio", justify="right")

    last = [row["loss"] for row in rows[-max(1, min(LAST_STEPS, len(rows) // 20)) :] if row["loss"] is not None]
    validated = [row["val_loss"] for row in rows if row.get("val_loss") is not None]
    final = validated[-1] if validated else math.nan
    unit = "nats per byte" if bytes_per_token == 1 else "nats per token"
    table.add_row(f"final train loss, {unit}", f"{statistics.mean(last or [math.nan]):.4f}")
    table.add_row(f"final validation loss, {unit}", f"{final:.4f}")
    if bytes_per_token not in (None, 1):
        table.add_row("final validation loss, nats per byte", f"{final / (bytes_per_token or 1):.4f}")
    usual = statistics.median(row["step_seconds"] for row in rows)  # not the mean: the first step warms up, or compiles
    table.add_row("tokens per second", f"{rows[-1]['tokens'] / rows[-1]['step'] / usual:,.0f}")
    if counted:
        exchange = sum(row["exchange_seconds"] for row in rows)
        table.add_row("share of the step in exchange", f"{exchange / sum(row['step_seconds'] for row in rows):.1%}")
    dense = FLOAT32_BYTES * parameters
    traffic = all_reduce_bytes(dense, workers)
    sent, received = (round(statistics.mean(row[name] for row in rows)) for name in ("sent_bytes", "received_bytes"))
    message = max(row["payload_bytes"] for row in rows)
    for label, value, ddp in (
        ("uploaded by one worker per step", sent, traffic),
        ("received by one worker per step", received, traffic),
        ("message", message, dense),
    ):
        more = (decimal(ddp), f"{ddp / value:.1f}x" if value else "-") if len(table.columns) > 2 else ()
        table.add_row(label if counted else f"{label}, computed", decimal(value), *more)
    Console().print(table)


def _team(workers: int) -> str:
    return f"{workers} worker{'s' * (workers != 1)}"
