"""The output at the end of a run: the table and the loss plot, both from metrics.jsonl."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from demopt.exchange.wrappers import all_reduce_bytes
from demopt.train.config import TrainConfig
from demopt.train.method import FLOAT32_BYTES

Row = dict[str, Any]
LAST_STEPS = 20  # the final training loss is over the last twentieth of the steps, at most this many


def final_train_loss(rows: list[Row]) -> float:
    """Return the mean training loss of the last steps.

    Example:
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

    Example:
        >>> share([{"step_seconds": 2.0, "exchange_seconds": 0.5}], "exchange_seconds")
        0.25
    """
    if any(row[name] is None for row in rows):
        return None
    return float(sum(row[name] for row in rows) / sum(row["step_seconds"] for row in rows))


def print_table(rows: list[Row], config: TrainConfig, parameters: int, bytes_per_token: float | None) -> None:
    """Print the run's figures, its bytes next to those of AdamW with DistributedDataParallel."""
    traffic = all_reduce_bytes(FLOAT32_BYTES * parameters, config.workers)
    table = Table(title=f"{config.optimizer}, {config.workers} workers, {parameters:,} parameters, {len(rows)} steps")
    table.add_column("")
    table.add_column("this run", justify="right")
    table.add_column("AdamW-DDP", justify="right")
    table.add_column("ratio", justify="right")
    table.add_row("final train loss, nats a token", f"{final_train_loss(rows):.4f}")
    table.add_row("final validation loss, nats a token", f"{final_val_loss(rows):.4f}")
    if bytes_per_token is not None and bytes_per_token != 1:
        table.add_row("final validation loss, nats a byte", f"{final_val_loss(rows) / bytes_per_token:.4f}")
    _bytes_rows(table, "uploaded", [row["sent_bytes"] for row in rows], traffic)
    _bytes_rows(table, "received", [row["received_bytes"] for row in rows], traffic)
    messages = [row["payload_bytes"] for row in rows if row["payload_bytes"]]
    local = config.optimizer == "local"
    if local:
        table.add_row("rounds", f"{len(messages):,}", f"{len(rows):,}", f"{len(rows) / max(1, len(messages)):.1f}x")
    _bytes_row(
        table, f"message a {'round' if local else 'step'}", messages[-1] if messages else 0, FLOAT32_BYTES * parameters
    )
    usual = statistics.median(row["step_seconds"] for row in rows)  # not the mean: the first step warms up, or compiles
    table.add_row("tokens a second", f"{rows[-1]['tokens'] / rows[-1]['step'] / usual:,.0f}")
    for name, label in (("optimizer_seconds", "optimizer"), ("exchange_seconds", "exchange")):
        part = share(rows, name)
        table.add_row(f"share of the step in {label}", "in backward" if part is None else f"{part:.1%}")
    Console().print(table)


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Plot the losses over the steps to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], lw=0.8, alpha=0.6, label="train")
    measured = [row for row in rows if row.get("val_loss") is not None]
    axes.plot([row["step"] for row in measured], [row["val_loss"] for row in measured], "o-", ms=3, label="validation")
    axes.set(xlabel="step", ylabel="loss, nats a token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bytes_rows(table: Table, label: str, values: list[int], traffic: int) -> None:
    _bytes_row(table, f"{label} a step", round(sum(values) / len(values)), traffic)
    _bytes_row(table, f"{label} in all", sum(values), traffic * len(values))


def _bytes_row(table: Table, label: str, value: int, traffic: int) -> None:
    ratio = f"{traffic / value:.1f}x" if value else "-"
    table.add_row(label, decimal(value), decimal(traffic), ratio)
