"""Prints a plan as tables, or returns it as plain data for programs. MB are 10^6 bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from demopt.core.update import rule_of
from demopt.plan.costs import Cost, Plan, Row
from demopt.plan.network import Link

_MB = 1e6
_HEADINGS = {"all_reduce_fp32": "ring\nfp32", "all_reduce_bf16": "ring\nbf16", "published": "published\nall_gather"}
_LEGEND = (
    '* the route that "auto" takes.  ring: all-reduce of the dense gradient.  published: the paper\'s code, 12 bytes a'
    " coefficient.  relay changes the algorithm."
)


def as_data(plan: Plan, link: Link | None) -> dict[str, Any]:
    """Return the plan as dicts, lists and numbers; with a link, every way has its `seconds`.

    Example:
        >>> from demopt.plan.costs import make_plan
        >>> from demopt.plan.model import of_count
        >>> plan = make_plan(of_count(4096, chunk=64), {}, workers=[2])
        >>> as_data(plan, Link(1e9, 0.0))["rows"][0]["ways"]["all_reduce_fp32"]["seconds"]
        0.000131072
    """
    data = dataclasses.asdict(plan)
    data["link"] = dataclasses.asdict(link) if link else None
    if link:
        for cost in (cost for row in (*data["rows"], *data["local"]["rows"]) for cost in row["ways"].values()):
            cost["seconds"] = link.seconds(cost["received_bytes"], cost["rounds"])
    return data


_APART = " (and what adamw keeps for embeddings and vectors: 4 bytes an element)"


def show(plan: Plan, link: Link | None, console: Console) -> None:
    """Print the tables."""
    s = plan.settings
    console.print(
        f"{plan.model}: {plan.parameters:,} parameters in {plan.tensors:,} tensors, {plan.chunks:,} chunks, "
        f"{plan.kept:,} coefficients kept (top-k {s['top_k']}, relay {s['relay_top_k']}, chunk {s['chunk']}, "
        f"{s['transform']}, values {s['values']}, update {s['update']})\n",
        highlight=False,
    )
    console.print(_ways("MB that each worker receives a step, and as many sent", plan, _traffic))
    if link:
        title = (
            f"seconds a step in the network, {link.bits_per_second / 1e6:,g} Mbit/s, {link.latency_seconds * 1e3:g} ms"
        )
        console.print(_ways(title, plan, lambda cost: digits(link.seconds(cost.received_bytes, cost.rounds))))
    console.print(_LEGEND + "\n", style="dim", highlight=False)
    console.print(_local(plan, link))
    memory = plan.memory
    console.print(
        f"Memory of each worker: momentum {digits(memory.momentum_bytes / _MB)} MB, workspace "
        f"{digits(memory.workspace_bytes / _MB)} MB, chosen coefficients {digits(memory.chosen_bytes / _MB)} MB, "
        f"update rule {digits(memory.rule_bytes / _MB)} MB{_APART if rule_of(s['update']).whole else ''}; and",
        highlight=False,
    )
    console.print(_buffers(plan.rows[-1]))


def digits(number: float) -> str:
    """Format with three significant digits, or with all digits before the point.

    Example:
        >>> digits(1889.5), digits(99.96), digits(42.61), digits(0.04), digits(0.0)
        ('1,890', '100', '42.6', '0.0400', '0')
    """
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:#.3g}".rstrip(".") if number else "0"


def _traffic(cost: Cost) -> str:
    received = digits(cost.received_bytes / _MB)
    return received if cost.sent_bytes == cost.received_bytes else f"{received} ({digits(cost.sent_bytes / _MB)} sent)"


def _ways(title: str, plan: Plan, cell: Callable[[Cost], str]) -> Table:
    """Build a table with a row for each number of workers and a column for each way."""
    names = list(dict.fromkeys(name for row in plan.rows for name in row.ways))
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("\nworkers", justify="right")
    for name in names:
        table.add_column(_HEADINGS.get(name, f"\n{name}"), justify="right", no_wrap=True)
    for row in plan.rows:
        marks = {name: "*" if name == row.auto else "" for name in names}
        cells = [cell(row.ways[name]) + marks[name] if name in row.ways else "-" for name in names]
        table.add_row(str(row.workers), *(f"[bold]{text}[/]" if text.endswith("*") else text for text in cells))
    return table


def _local(plan: Plan, link: Link | None) -> Table:
    """Build the table of LocalDeMo: a round, and the mean of a step; both received, and as much sent."""
    local, every = plan.local, plan.local.sync_every
    title = (
        f"LocalDeMo: {'a round in every step' if every == 1 else f'a round every {every} steps'}, top-k {local.top_k}, "
        f"{local.kept:,} coefficients kept;\n{digits(local.memory_bytes / _MB)} MB for shared weights and error"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("\nworkers", justify="right")
    table.add_column("\nroute")
    for heading in ("MB\na round", "MB\na step", *(("seconds\na round", "seconds\na step") if link else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in local.rows:
        for name, cost in row.ways.items():
            figures = [cost.received_bytes / _MB, cost.received_bytes / _MB / every]
            if link:
                seconds = link.seconds(cost.received_bytes, cost.rounds)
                figures += [seconds, seconds / every]
            table.add_row(str(row.workers), name, *map(digits, figures))
    return table


def _buffers(row: Row) -> Table:
    """Build the table of message buffers in memory, by way."""
    table = Table(title=f"MB for messages at {row.workers:,} workers", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("", "own message", "gathered", "kept back"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, cost in row.ways.items():
        sizes = cost.message_bytes, cost.gathered_bytes, cost.kept_back_bytes
        heading = _HEADINGS.get(name, name).replace("\n", " ")
        table.add_row(heading, *(digits(size / _MB) if size else "-" for size in sizes))
    return table
