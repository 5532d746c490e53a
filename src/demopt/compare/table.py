"""The terminal table, and the number formats that the page uses too."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from demopt.compare.links import LINK, LINKS
from demopt.compare.results import Result, on_front

MARK = "*"  # on a Pareto front


def loss_text(result: Result) -> str:
    """Formats mean and spread.

    Examples:
        >>> from demopt.compare.results import Result
        >>> some = Result("a", "adamw", {}, 4, 4, 10, 1e-3, [], [0, 1], [1.0, 2.0], 0, 0, 0, 1, 0.1, [], [])
        >>> loss_text(some)
        '1.500 ± 0.707'
    """
    if not math.isfinite(result.mean):
        return "diverged"
    return f"{result.mean:.3f}" + (f" ± {result.spread:.3f}" if math.isfinite(result.spread) else "")


def bytes_text(count: float) -> str:
    """Formats a byte count with a decimal unit.

    Examples:
        >>> bytes_text(1500.2)
        '1.5 kB'
    """
    return decimal(round(count))


def seconds_text(seconds: float) -> str:
    """Formats seconds to three digits, in the unit that fits.

    Examples:
        >>> seconds_text(0.01234), seconds_text(2.5)
        ('12.3 ms', '2.5 s')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:,.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def show(results: Sequence[Result], title: str, console: Console) -> None:
    """Prints all entries, best loss first."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in ("val loss", "lr", "uploaded\na step", "received\na step", "step at\n" + LINK):
        table.add_column(heading, justify="right", no_wrap=True)
    up, down = on_front(results, "sent_bytes"), on_front(results, "received_bytes")
    for result, sent, received in sorted(zip(results, up, down, strict=True), key=lambda each: each[0].mean):
        table.add_row(
            result.name,
            loss_text(result),
            f"{result.lr:g}",
            bytes_text(result.sent_bytes) + MARK * sent,
            bytes_text(result.received_bytes) + MARK * received,
            seconds_text(result.seconds(LINKS[LINK])),
        )
    console.print(table)
    console.print(f"{MARK} no other entry has both a lower mean loss and fewer bytes", style="dim")
