"""The tables at the end of a run, from metrics.jsonl: what was measured, and what was counted or computed."""

from __future__ import annotations

import statistics

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from demopt.exchange.wrappers import all_reduce_bytes
from demopt.train.config import TrainConfig
from demopt.train.curve import Curve
from demopt.train.method import FLOAT32_BYTES
from demopt.train.progress import Row, workers

LAST_STEPS = 20  # the final training loss is over the last twentieth of the steps, at most this many


def final_train_loss(rows: list[Row]) -> float:
    """Return the mean training loss of the last steps.

    Examples:
        >>> final_train_loss([{"loss": 3.0}, {"loss": 1.0}])
        1.0
    """
    count = max(1, min(LAST_STEPS, len(rows) // 20))
    last = [row["loss"] for row in rows[-count:] if row["loss"] is not None]
    return sum(last) / len(last) if last else float("nan")


def final_val_loss(rows: list[Row]) -> float:
    """Return the last validation loss that was measured."""
    measured = [row["val_loss"] for row in rows if row.get("val_loss") is not None]
    return float(measured[-1]) if measured else float("nan")


def share(rows: list[Row], name: str) -> float | None:
    """Return the fraction of step time spent in the stage `name`; None if it was not timed separately.

    Examples:
        >>> share([{"step_seconds": 2.0, "exchange_seconds": 0.5}], "exchange_seconds")
        0.25
    """
    if any(row[name] is None for row in rows):
        return None
    return float(sum(row[name] for row in rows) / sum(row["step_seconds"] for row in rows))


def is_counted(config: TrainConfig) -> bool:
    """Return whether a run's bytes were counted at its exchange; with DDP they are computed.

    Examples:
        >>> is_counted(TrainConfig(optimizer="local")), is_counted(TrainConfig(optimizer="adamw"))
        (True, False)
    """
    return config.optimizer in ("demo", "local")


def print_table(
    rows: list[Row], config: TrainConfig, parameters: int, bytes_per_token: float | None, other: Curve | None = None
) -> None:
    """Print the run's figures, then its bytes, beside those of dense gradients if they are others."""
    console = Console()
    console.print(_measured(rows, config, parameters, bytes_per_token, other))
    if any(row["sent_bytes"] or row["received_bytes"] for row in rows):
        console.print(_beside_dense(rows, config, parameters) if is_counted(config) else _dense(rows))


def _measured(
    rows: list[Row], config: TrainConfig, parameters: int, bytes_per_token: float | None, other: Curve | None
) -> Table:
    count = workers(config, rows)
    team = f"{count} worker{'s' * (count > 1)}"
    table = Table(title=f"{config.optimizer}, {team}, {parameters:,} parameters, {len(rows)} steps")
    table.add_column("measured")
    table.add_column("this run", justify="right")
    unit = "nats a byte" if bytes_per_token == 1 else "nats a token"
    table.add_row(f"final train loss, {unit}", f"{final_train_loss(rows):.4f}")
    table.add_row(f"final validation loss, {unit}", f"{final_val_loss(rows):.4f}")
    if other is not None:
        table.add_row(f"  {other.label}, measured in another run", f"{other.final:.4f}")
    if bytes_per_token is not None and bytes_per_token != 1:
        table.add_row("final validation loss, nats a byte", f"{final_val_loss(rows) / bytes_per_token:.4f}")
    usual = statistics.median(row["step_seconds"] for row in rows)  # not the mean: the first step warms up, or compiles
    table.add_row("tokens a second", f"{rows[-1]['tokens'] / rows[-1]['step'] / usual:,.0f}")
    for name, label in (("optimizer_seconds", "optimizer"), ("exchange_seconds", "exchange")):
        part = share(rows, name)
        table.add_row(f"share of the step in {label}", "in backward" if part is None else f"{part:.1%}")
    return table


def _beside_dense(rows: list[Row], config: TrainConfig, parameters: int) -> Table:
    """Return the bytes that were counted beside those that DDP would send, which are arithmetic."""
    traffic = all_reduce_bytes(FLOAT32_BYTES * parameters, workers(config, rows))
    table = Table(
        caption="dense: all gradients in float32 by a ring all-reduce, as DDP sends them; arithmetic, not measured"
    )
    table.add_column("bytes of one worker")
    for name in ("this run, counted", "dense, computed", "ratio"):
        table.add_column(name, justify="right")
    for label, name in (("uploaded", "sent_bytes"), ("received", "received_bytes")):
        total = sum(row[name] for row in rows)
        _row(table, f"{label} a step", round(total / len(rows)), traffic)
        _row(table, f"{label} in all", total, traffic * len(rows))
    messages = [row["payload_bytes"] for row in rows if row["payload_bytes"]]
    local = config.optimizer == "local"
    if local:
        table.add_row("rounds", f"{len(messages):,}", f"{len(rows):,}", f"{len(rows) / max(1, len(messages)):.1f}x")
    size = messages[-1] if messages else 0
    _row(table, f"message a {'round' if local else 'step'}", size, FLOAT32_BYTES * parameters)
    return table


def _dense(rows: list[Row]) -> Table:
    table = Table()
    table.add_column("bytes of one worker, each way")
    table.add_column("computed, not counted", justify="right")
    table.add_row("uploaded a step", decimal(rows[-1]["sent_bytes"]))
    table.add_row("uploaded in all", decimal(sum(row["sent_bytes"] for row in rows)))
    return table


def _row(table: Table, label: str, value: int, traffic: int) -> None:
    ratio = f"{traffic / value:.1f}x" if value else "-"
    table.add_row(label, decimal(value), decimal(traffic), ratio)
