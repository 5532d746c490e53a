"""Prints a result as tables, for 80 columns. Times are in milliseconds; 1 MB is 10^6 bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from demopt.bench.summary import Row

STAGES = ("extract", "exchange", "apply")
_MS, _MB = 1e3, 1e-6
Column = tuple[str, Callable[[Row], str]]
_LEGEND = {
    "step": "Milliseconds, medians, the slowest rank of each round. floor: bytes that must move / memory bandwidth"
    " here. x: median of the ratios within each round. memory: beyond parameters, gradients and one momentum buffer, %"
    " of the parameters. AdamW sends nothing: DDP would have averaged its gradients before.",
    "train": "tok/s: tokens of all workers a second. Milliseconds: forward, backward and step. AdamW-DDP's bytes are"
    " those of a ring all-reduce.",
}


def show(data: dict[str, Any], console: Console) -> None:
    """Print the results, and the hardware they were measured on."""
    device, versions = data["device"], data["versions"]
    hardware = f"{device['gpu']}, {device['cpu']}" if device["type"] == "cuda" else device["cpu"]
    loads = ", ".join(f"{run['load_average']:.1f}" for run in data["runs"])
    about = f"{hardware}, {device['cores']} cores; torch {versions['torch']}; load average before: {loads}"
    console.print(f"\n{about}\n", highlight=False, markup=False)
    for run in data["runs"]:
        for study in data["settings"]["studies"]:
            _show_study(study, run, data, console)
    for study in data["settings"]["studies"]:
        console.print(_LEGEND[study], style="dim", highlight=False, markup=False)


def number(value: float | None) -> str:
    """Format to three digits, or all before the point; '-' for None.

    Examples:
        >>> number(1234.5), number(87.25), number(0.0123), number(0.0), number(None)
        ('1,234', '87.2', '0.012', '0', '-')
    """
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return (f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}") if value else "0"


def _show_study(study: str, run: dict[str, Any], data: dict[str, Any], console: Console) -> None:
    measured, workers = run[study], run["workers"]
    rows: list[Row] = measured["methods"]
    count = f"{workers} worker{'s' if workers > 1 else ''} x {run['threads']} threads"
    if study == "step":
        model = data["model"]
        title = f"step, {model['name']}, {model['parameters']:,} parameters, {count}"
        kernels = measured["kernels"] or "no"
        note = f"memory {measured['memory_bytes_per_second'] / 1e9:.1f} GB/s, {kernels} kernels"
        tables = [_time_columns(rows), _cost_columns(rows)]
    else:
        title = f"train, {data['settings']['preset']}, {measured['parameters']:,} parameters, {count}"
        note = f"{measured['tokens_per_step']:,} tokens a step"
        tables = [_train_columns(rows), _traffic(rows)]
    console.print(f"{title}; {note}\n", highlight=False, markup=False, style="bold")
    for columns in tables:
        console.print(_table(columns, rows))
        console.print()
    for row in rows:
        if "cuda_graph" in row:
            console.print(f"CUDA graph, {row['name']}: {row['cuda_graph']}", highlight=False, markup=False)


def _time_columns(rows: list[Row]) -> list[Column]:
    stages: list[Column] = [
        (heading, lambda row, name=name: number(_ms(row["stage_medians"].get(name))))  # type: ignore[misc]
        for name, heading in zip(STAGES, ("ex-\ntract", "ex-\nchange", "\napply"), strict=True)
    ]
    return [
        ("\nms", lambda row: number(_ms(row["median"]))),
        ("\nrange", lambda row: f"{number(_ms(row['min']))}-{number(_ms(row['max']))}"),
        ("\nfloor", lambda row: number(_ms(row["floor_seconds"]))),
        *_ratios(rows),
        *stages,
    ]


def _cost_columns(rows: list[Row]) -> list[Column]:
    return [
        ("memory\nMB", lambda row: number(row["extra_memory_bytes"] * _MB)),
        ("\n%", lambda row: number(row["extra_memory_percent"])),
        *_traffic(rows),
    ]


def _train_columns(rows: list[Row]) -> list[Column]:
    return [
        ("\ntok/s", lambda row: number(row["tokens_per_second"])),
        ("\nms", lambda row: number(_ms(row["median"]))),
        ("\nrange", lambda row: f"{number(_ms(row['min']))}-{number(_ms(row['max']))}"),
        *_ratios(rows),
    ]


def _ratios(rows: list[Row]) -> list[Column]:
    """Return a column for each base; one from a file is headed by its class name."""
    headings = {base: base.rpartition(":")[2].split()[0].split("-")[0] for base in rows[0]["ratios"]}
    if len(set(headings.values())) < len(headings):
        headings = {base: base.partition(":")[0] for base in headings}
    return [
        (f"x\n{heading[:10]}", lambda row, base=base: number(row["ratios"][base]))  # type: ignore[misc]
        for base, heading in headings.items()
    ]


def _traffic(rows: list[Row]) -> list[Column]:
    columns: list[Column] = [
        (heading, lambda row, name=name: number(_mb(row[name])))  # type: ignore[misc]
        for heading, name in (
            ("payload\nMB", "payload_bytes"),
            ("sent\nMB", "sent_bytes"),
            ("recv\nMB", "received_bytes"),
        )
    ]
    columns.append(("calls", lambda row: str(row["collectives"])))
    if any("network_floor_seconds" in row for row in rows):
        columns.append(("network\nfloor ms", lambda row: number(_ms(row.get("network_floor_seconds")))))
    return columns


def _table(columns: list[Column], rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("", overflow="fold", min_width=14)
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        table.add_row(escape(row["name"]), *(cell(row) for _, cell in columns))
    return table


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * _MS


def _mb(size: int | None) -> float | None:
    return None if size is None else size * _MB
