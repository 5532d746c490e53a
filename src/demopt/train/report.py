"""The output of a run: metrics.jsonl, a screen and a tracker while it trains; model, table and picture at the end."""

import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from html import escape
from itertools import accumulate
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import nn

from demopt.errors import first_line
from demopt.exchange.interface import all_reduce_bytes
from demopt.train.config import InputError, TrainConfig
from demopt.train.data import Corpus, save_tokenizer
from demopt.train.method import FLOAT32_BYTES, activations_of, in_words, memory_of
from demopt.train.model import count_parameters, save
from demopt.train.out import OutFolder, Row
from demopt.train.screen import WARM_UP, Screen, tokens_of

LAST_STEPS = 20  # the final training loss is over the last twentieth of the steps, at most this many
WIDE, HIGH, EDGE = 720, 260, 56  # of the picture: a panel, and the room for numbers beside it
DETAIL = 400  # points of a curve, at most
TRAIN, VALIDATION, SENT, RECEIVED = "#7aa6da", "#c2410c", "#15803d", "#7e22ce"

Points = list[tuple[float, float]]
Curve = tuple[str, str, Points]  # its name and its color


class Report(ExitStack):
    """Reports every step, on rank 0; on other ranks it does nothing. A context: leaving it closes all."""

    def __init__(self, out: OutFolder, config: TrainConfig, done: int, first: bool) -> None:
        super().__init__()
        self._first, self._config = first, config
        if not first:
            return
        try:
            self._track = open_tracker(out, config, done, self)
        except Exception as error:  # no login, no server: errors differ by library
            raise InputError(f"--tracker {config.tracker}: {type(error).__name__}: {first_line(error)}") from None
        out.rewind_metrics(done)
        self._file: TextIO = out.metrics.open("a", encoding="utf-8")
        self.callback(self._close)
        self._screen = self.enter_context(Screen(config, done))

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
        self._screen.step(row)

    def say(self, line: str) -> None:
        if self._first:
            self._screen.say(line)

    def say_memory(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        if self._first:
            memory = memory_of(self._config, model, optimizer)
            self.say(in_words({**memory, "activations": activations_of(self._config, device)}))

    def sync(self) -> None:
        """Fsyncs metrics.jsonl, before a checkpoint that relies on it."""
        if self._first:
            os.fsync(self._file.fileno())

    def _close(self) -> None:
        with suppress(OSError):  # a full disk, which the last step has reported
            self._file.close()


def open_tracker(out: OutFolder, config: TrainConfig, done: int, held: ExitStack) -> Callable[..., None] | None:
    """Returns the function that gives --tracker a step's metrics and its number; `held` closes the tracker."""
    if config.tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = held.enter_context(SummaryWriter(str(out.root / "tensorboard"), purge_step=done + 1))

        def track(metrics: Row, step: int) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

        return track
    if config.tracker == "wandb":
        import wandb

        os.environ.setdefault("WANDB_MODE", "offline")  # for `wandb sync`, later
        os.environ.setdefault("WANDB_DIR", str(out.root))
        run = held.enter_context(wandb.init(config=config.record(), settings=wandb.Settings(silent=True)))
        return lambda metrics, step: run.log(metrics, step=step)
    return None


def finish(config: TrainConfig, out: OutFolder, model: Any, corpus: Corpus, last: bool = True) -> None:
    """Saves model and tokenizer for transformers; prints the table if `last`: the worker took part in the last step."""
    for place in (out.model, out.merged) if config.merge else (out.model,):
        save(config, model, place, merge=place == out.merged)
        save_tokenizer(config, place, corpus.bytes_per_token is not None)
    rows = out.read_metrics()
    if rows and last:
        print_table(rows, config, count_parameters(model), corpus.bytes_per_token)
    if rows:  # a worker that has joined a run after its last step has none
        out.picture.write_text(svg(rows, f"{config.optimizer}, {rows[-1]['step']} steps"), encoding="utf-8")
        print(f"the curves are in {out.picture}")
    print(f"the model is in {out.model}" + (f", with its adapters merged in {out.merged}" if config.merge else ""))


def print_table(rows: list[Row], config: TrainConfig, parameters: int, bytes_per_token: float | None) -> None:
    """Prints the run's losses, speed and bytes. Bytes are counted; those of DDP are computed."""
    workers = int(statistics.mode(row.get("workers") or config.workers for row in rows))  # in most rounds of a folder
    team = f"{workers} worker{'s' * (workers != 1)}"
    table = Table(title=f"{config.optimizer}, {team}, {parameters:,} parameters, {rows[-1]['step']} steps")
    table.add_column()
    table.add_column("this run", justify="right")
    counted = config.optimizer != "adamw"
    if counted and workers > 1:  # alone, DDP sends nothing
        table.add_column("DDP, computed", justify="right")
        table.add_column("ratio", justify="right")

    last = [row["loss"] for row in rows[-max(1, min(LAST_STEPS, len(rows) // 20)) :] if row.get("loss") is not None]
    final = [math.nan, *(row["val_loss"] for row in rows if row.get("val_loss") is not None)][-1]
    unit = "nats per byte" if bytes_per_token == 1 else "nats per token"
    table.add_row(f"final train loss, {unit}", f"{statistics.mean(last or [math.nan]):.4f}")
    table.add_row(f"final validation loss, {unit}", f"{final:.4f}")
    if bytes_per_token not in (None, 1):
        table.add_row("final validation loss, nats per byte", f"{final / (bytes_per_token or 1):.4f}")
    # The mean, because the median step has no round; without the first steps, which warm up or compile.
    seconds = statistics.mean(row["step_seconds"] for row in rows[min(WARM_UP, len(rows) // 2) :])
    in_folder = "workers" in rows[-1]  # there, tokens include those of steps without this worker
    tokens = (
        statistics.mean(tokens_of(row, config) for row in rows) if in_folder else rows[-1]["tokens"] / rows[-1]["step"]
    )
    table.add_row("tokens per second", f"{tokens / seconds:,.0f}")
    if counted:
        exchange = sum(row.get("exchange_seconds") or 0.0 for row in rows)
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


def svg(rows: Sequence[Row], title: str) -> str:
    """Returns an SVG with two panels over the steps: losses; and the bytes of one worker, with its rounds."""
    first, last = rows[0]["step"], rows[-1]["step"]
    places = [EDGE + WIDE * (row["step"] - first) / max(last - first, 1) for row in rows]
    train, val = (
        [(x, row[name]) for x, row in zip(places, rows, strict=True) if row.get(name) is not None]
        for name in ("loss", "val_loss")
    )
    sent, received = (
        [*zip(places, accumulate(row[name] for row in rows), strict=True)] for name in ("sent_bytes", "received_bytes")
    )
    rounds = [x for x, row in zip(places, rows, strict=True) if row["payload_bytes"]]
    known, top = [y for _, y in train + val] or [0.0], 36 + HIGH + 30
    losses = (min(known), max(known))
    counts = (0.0, float(max(1, sent[-1][1], received[-1][1])))
    ticks = "".join(f"M{x:.1f} {top + HIGH}v-6" for x in rounds[:: -(-len(rounds) // DETAIL) or 1])
    shown = [("training loss, nats", TRAIN, _thinned(train)), ("validation", VALIDATION, val)]
    counted = [("bytes sent by one worker", SENT, _thinned(sent)), ("received", RECEIVED, _thinned(received))]
    body = [
        f'<text x="{EDGE}" y="20" font-size="14">{escape(title)}</text>',
        *_panel(36, losses, "{:.2f}".format, shown),
        *_panel(top, counts, lambda value: decimal(round(value)), counted),
        f'<path d="{ticks}" stroke="#888" fill="none"><title>{len(rounds)} rounds</title></path>',
        f'<text x="{EDGE}" y="{top + HIGH + 18}">step {first}; {len(rounds)} rounds, as ticks</text>',
        f'<text x="{EDGE + WIDE}" y="{top + HIGH + 18}" text-anchor="end">{last}</text>',
    ]
    size = f'width="{WIDE + EDGE + 16}" height="{top + HIGH + 30}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11" fill="#777">'
    return "\n".join([head, *body, "</svg>\n"])


def _panel(top: int, limits: tuple[float, float], text: Callable[[float], str], curves: list[Curve]) -> list[str]:
    """Returns the frame of a panel, with its limits and its middle, and the curves with their names above it."""
    parts = [f'<rect x="{EDGE}" y="{top}" width="{WIDE}" height="{HIGH}" fill="none" stroke="#999"/>']
    low, span = limits[0], limits[1] - limits[0]
    for part in (0.0, 0.5, 1.0):
        y = top + HIGH * (1 - part) + 4
        parts.append(f'<text x="{EDGE - 6}" y="{y:.0f}" text-anchor="end">{escape(text(low + part * span))}</text>')
    for _, color, points in curves:
        way = " ".join(f"{x:.1f},{top + HIGH * (1 - (y - low) / (span or 1.0)):.1f}" for x, y in points)
        parts.append(f'<polyline points="{way}" fill="none" stroke="{color}" stroke-width="1.6"/>')
    names = "\u2003".join(f'<tspan fill="{color}">{name}</tspan>' for name, color, _ in curves)
    return [*parts, f'<text x="{EDGE + WIDE}" y="{top - 8}" text-anchor="end">{names}</text>']


def _thinned(points: Points) -> Points:
    """Returns at most `DETAIL` points, each the mean of its neighbours."""
    size = max(1, math.ceil(len(points) / DETAIL))
    parts = [points[first : first + size] for first in range(0, len(points), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]
