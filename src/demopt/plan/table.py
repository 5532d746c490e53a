"""Prints a plan as tables, or returns it as plain data for programs. MB are 10^6 bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from demopt.core.update import rule_of
from demopt.plan.costs import Cost, LocalRow, Plan, Row
from demopt.plan.network import Link
from demopt.plan.verdict import Verdict

_MB = 1e6
_HEADINGS = {"all_reduce_fp32": "ring\nfp32", "all_reduce_bf16": "ring\nbf16", "published": "published\nall_gather"}
_LEGEND = (
    '* the route that "auto" takes.  ring: all-reduce of the dense gradient.  published: the paper\'s code, 12 bytes a'
    " coefficient.  relay changes the algorithm."
)


def as_data(plan: Plan, link: Link | None, verdicts: Sequence[Verdict] = ()) -> dict[str, Any]:
    """Return the plan as dicts, lists and numbers; with a link, every way has its `seconds`, and there are `verdicts`.

    Examples:
        >>> from demopt.plan.costs import make_plan
        >>> from demopt.plan.model import of_count
        >>> plan = make_plan(of_count(4096, chunk=64), {}, workers=[2])
        >>> round(as_data(plan, Link(1e6, 0.0))["rows"][0]["ways"]["all_reduce_fp32"]["seconds"], 3)
        0.139
    """
    data = dataclasses.asdict(plan)
    data["link"] = dataclasses.asdict(link) if link else None
    if link:
        told = [row["ways"] for row in (*data["rows"], *data["local"]["rows"])]
        rows: list[Row | LocalRow] = [*plan.rows, *plan.local.rows]
        for row, ways in zip(rows, told, strict=True):
            for name, cost in row.ways.items():
                ways[name]["seconds"] = link.seconds(cost.calls, row.workers)
        sentences = [verdict.sentence(plan.local.sync_every) for verdict in verdicts]
        pairs = zip(verdicts, sentences, strict=True)
        data["verdicts"] = [{"sentence": sentence, **dataclasses.asdict(verdict)} for verdict, sentence in pairs]
    return data


def show_verdict(verdicts: Sequence[Verdict], sync_every: int, console: Console) -> None:
    """Print the verdict on the first number of workers as a sentence, and all as a table."""
    console.print(verdicts[0].sentence(sync_every) + "\n", highlight=False, style="bold")
    table = _table("seconds of a step")
    for heading in ("workers", "method", "compute", "optimizer", "network", "step"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for verdict in verdicts:
        for way in verdict.ways:
            figures = (way.compute, way.optimizer, way.network, way.seconds)
            table.add_row(str(verdict.workers), way.name, *map(digits, figures))
    console.print(table)
    console.print(
        "network: what a step waits for it, the loss's all-reduce included; TCP starting slowly after a pause, latency "
        "as gloo uses it (docs/network.md).\n",
        style="dim",
        highlight=False,
    )


_APART = " (and what adamw keeps for embeddings and vectors: 4 bytes an element)"


def show(plan: Plan, link: Link | None, console: Console) -> None:
    """Print the tables."""
    s = plan.settings
    console.print(
        f"{_name(plan)}, {plan.chunks:,} chunks, "
        f"{plan.kept:,} coefficients kept (top-k {s['top_k']}, relay {s['relay_top_k']}, chunk {s['chunk']}, "
        f"{s['transform']}, values {s['values']}, update {s['update']})\n",
        highlight=False,
    )
    console.print("MB that each worker receives a step, and as many sent", style="italic")
    console.print(_ways(plan, _traffic))
    if link:
        title = (
            f"seconds a step in the network, {link.bits_per_second / 1e6:,g} Mbit/s, round trip "
            f"{link.latency_seconds * 1e3:g} ms"
        )
        console.print(title, style="italic", highlight=False)
        console.print(_ways(plan, lambda cost, workers: digits(link.seconds(cost.calls, workers))))
    console.print(_LEGEND + "\n", style="dim", highlight=False)
    every = plan.local.sync_every
    console.print(
        f"LocalDeMo: {'a round in every step' if every == 1 else f'a round every {every} steps'}, top-k "
        f"{plan.local.top_k}, {plan.local.kept:,} coefficients kept; {digits(plan.local.memory_bytes / _MB)} MB for "
        "shared weights and error",
        style="italic",
        highlight=False,
    )
    console.print(_local(plan, link))
    memory = plan.memory
    console.print(
        f"Memory of each worker: momentum {digits(memory.momentum_bytes / _MB)} MB, workspace "
        f"{digits(memory.workspace_bytes / _MB)} MB, chosen coefficients {digits(memory.chosen_bytes / _MB)} MB, "
        f"update rule {digits(memory.rule_bytes / _MB)} MB{_APART if rule_of(s['update']).whole else ''}; and",
        highlight=False,
    )
    console.print(_buffers(plan.rows[-1]))
    if not link:
        console.print("for seconds and a verdict give --bandwidth, --latency and --step-seconds", style="dim")


def digits(number: float) -> str:
    """Format with three significant digits, or with all digits before the point.

    Examples:
        >>> digits(1889.5), digits(99.96), digits(42.61), digits(0.04), digits(0.0)
        ('1,890', '100', '42.6', '0.0400', '0')
    """
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:#.3g}".rstrip(".") if number else "0"


def _table(title: str | None = None) -> Table:
    """Build an empty table, narrow enough for a terminal of 60 columns."""
    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))


def _name(plan: Plan) -> str:
    """Return what the model is; a mere number of parameters has no tensors to tell of."""
    parameters = f"{plan.parameters:,} parameters"
    if plan.model == parameters:
        return f"{parameters} in full chunks"
    return f"{plan.model}: {parameters} in {plan.tensors:,} tensor{'s' * (plan.tensors != 1)}"


def _traffic(cost: Cost, workers: int) -> str:
    del workers
    received = digits(cost.received_bytes / _MB)
    return received if cost.sent_bytes == cost.received_bytes else f"{received} ({digits(cost.sent_bytes / _MB)} sent)"


def _ways(plan: Plan, cell: Callable[[Cost, int], str]) -> Table:
    """Build a table with a row for each number of workers and a column for each way."""
    names = list(dict.fromkeys(name for row in plan.rows for name in row.ways))
    table = _table()
    table.add_column("\nworkers", justify="right")
    for name in names:
        table.add_column(_HEADINGS.get(name, f"\n{name}"), justify="right", no_wrap=True)
    for row in plan.rows:
        marks = {name: "*" if name == row.auto else "" for name in names}
        cells = [cell(row.ways[name], row.workers) + marks[name] if name in row.ways else "-" for name in names]
        table.add_row(str(row.workers), *(f"[bold]{text}[/]" if text.endswith("*") else text for text in cells))
    return table


def _local(plan: Plan, link: Link | None) -> Table:
    """Build the table of LocalDeMo: a round, and the mean of a step; both received, and as much sent."""
    local, every = plan.local, plan.local.sync_every
    table = _table()
    table.add_column("\nworkers", justify="right")
    table.add_column("\nroute")
    for heading in ("MB\na round", "MB\na step", *(("seconds\na round", "seconds\na step") if link else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in local.rows:
        for name, cost in row.ways.items():
            figures = [cost.received_bytes / _MB, cost.received_bytes / _MB / every]
            if link:
                seconds = link.seconds(cost.calls, row.workers)
                figures += [seconds, seconds / every]
            table.add_row(str(row.workers), name, *map(digits, figures))
    return table


def _buffers(row: Row) -> Table:
    """Build the table of message buffers in memory, by way."""
    table = _table(f"MB for messages at {row.workers:,} workers")
    for heading in ("", "own message", "gathered", "kept back"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, cost in row.ways.items():
        sizes = cost.message_bytes, cost.gathered_bytes, cost.kept_back_bytes
        heading = _HEADINGS.get(name, name).replace("\n", " ")
        table.add_row(heading, *(digits(size / _MB) if size else "-" for size in sizes))
    return table
