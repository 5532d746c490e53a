"""What a run shows while it trains: a dashboard in a terminal, or else a plain line now and then."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from demopt.train.folder import RunFolder
from demopt.train.progress import Progress, Row, clock, facts, line, spark

PLAIN_SECONDS = 10.0  # between lines if stdout is not a terminal
STOPPING = "stopping after this step; once more to stop at once"


class View(ABC):
    """What shows a run."""

    @abstractmethod
    def show(self, row: Row) -> None:
        """Show the state after one more step."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Print one line."""

    @abstractmethod
    def close(self) -> None:
        """Leave the terminal as it was."""


class Lines(View):
    """One clean line per report, for files and pipes."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._told = progress, 0.0

    def show(self, row: Row) -> None:
        """Print a line for the first and the last step, for evaluated ones, and every few seconds."""
        self._progress.add(row)
        now = time.monotonic()
        end = row["step"] in (1, self._progress.config.steps)
        if end or "val_loss" in row or now - self._told >= PLAIN_SECONDS:
            self._told = now
            print(line(self._progress), flush=True)

    def say(self, text: str) -> None:
        """Print the line."""
        print(text, flush=True)

    def close(self) -> None:
        """Do nothing: every line is whole."""


class Dashboard(View):
    """Figures that are drawn anew in place, by a thread of rich's, from the first step on.

    While it is there, so is the file `.live`: it tells the launcher who owns the terminal.
    """

    def __init__(self, progress: Progress, folder: RunFolder, console: Console) -> None:
        self._progress, self._folder = progress, folder
        self._plain = console.options.ascii_only
        self._lock = threading.Lock()  # the thread draws while a step is added
        self._live = Live(console=console, get_renderable=self._draw)

    def show(self, row: Row) -> None:
        """Add the step; the drawing thread shows it."""
        with self._lock:
            self._progress.add(row)
        if not self._live.is_started:
            self._folder.live.touch()
            self._live.start(refresh=True)

    def say(self, text: str) -> None:
        """Print the line above the dashboard."""
        self._live.console.print(Text(text))

    def close(self) -> None:
        """Draw for the last time, and show the cursor again."""
        self._live.stop()
        self._folder.live.unlink(missing_ok=True)

    def _draw(self) -> RenderableType:
        if not self._progress.row:  # rich draws once when the display is made
            return ""
        with self._lock:
            return picture(self._progress, not self._plain, self._folder.stop.exists())


def picture(progress: Progress, bars: bool = True, stopping: bool = False) -> RenderableType:
    """Return the dashboard: how far the run is, and its figures. `bars`: with the loss as a row of bars."""
    config = progress.config
    head = Table.grid(padding=(0, 1), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True)
    way = ProgressBar(total=config.steps, completed=progress.step)
    head.add_row(f"step {progress.step:,}/{config.steps:,}", way, f"{clock(progress.left)} left")
    body = Table.grid(padding=(0, 2))
    body.add_column(style="bold", no_wrap=True)
    body.add_column(overflow="fold")
    for name, text in facts(progress):
        curve = f"  {spark(progress.losses.means)}" if name == "loss" and bars else ""
        body.add_row(name, Text(text + curve))
    title = Rule(Text(f"{config.optimizer}, {config.preset}, {config.out}"), align="left", style="dim")
    return Group(title, head, body, *([Text(STOPPING, style="bold")] if stopping else []))


def make_view(progress: Progress, folder: RunFolder) -> View:
    """Return a dashboard if stdout is a terminal that can show one, otherwise plain lines."""
    console = Console()
    # isatty too: with FORCE_COLOR rich takes any file for a terminal.
    shown = console.is_terminal and not console.is_dumb_terminal and sys.stdout.isatty()
    return Dashboard(progress, folder, console) if shown else Lines(progress)


def free_terminal(folder: RunFolder) -> None:
    """Show the cursor again if the worker with the dashboard was killed."""
    if folder.live.exists():
        folder.live.unlink(missing_ok=True)
        console = Console()
        console.print()
        console.show_cursor()
