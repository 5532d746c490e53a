"""Carries out the missing runs, in this process or in several, and appends each to runs.jsonl."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import active_children, get_context, resource_tracker
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from demopt.compare.run import Row, Run, carry_out
from demopt.compare.store import append_row, read_rows
from demopt.compare.sweep import Plan, missing
from demopt.train.config import InputError, TrainConfig
from demopt.train.data import Corpus, load_corpus
from demopt.train.processes import end_with


class Bench:
    """Carries out runs: holds the paths of the runs file and the tokens, the device, and how many run at once.

    Examples:
        >>> Bench(Path("runs.jsonl"), Path("tokens"), jobs=2).jobs
        2
    """

    def __init__(self, runs: Path, tokens: Path, jobs: int = 1, device: str = "auto", threads: int = 1) -> None:
        self.runs, self.tokens, self.jobs, self.device, self.threads = runs, tokens, jobs, device, threads

    def work_off(self, plan: Plan, console: Console) -> dict[str, Row]:
        """Carries out all missing runs; returns all rows."""
        rows = read_rows(self.runs)
        with _bar(console) as progress:
            task = progress.add_task(plan.study.name, total=_expected(plan, rows))
            for row in self._finished(plan, rows):
                rows[row["key"]] = row
                append_row(self.runs, row)
                progress.update(task, total=_expected(plan, rows) + progress.tasks[task].completed + 1, advance=1)
                progress.console.print(_line(row), highlight=False)
        return rows

    def _finished(self, plan: Plan, rows: dict[str, Row]) -> Iterator[Row]:
        """Yields rows as runs finish; the caller adds them to `rows`, which determine the next runs."""
        if self.jobs == 1:
            torch.set_num_threads(self.threads)
            corpus = _corpus(self.tokens, plan.source.fingerprint)
            while todo := _todo(plan, rows):
                yield carry_out(todo[0], corpus, self.device)
            return
        going: dict[Future[Row], str] = {}
        with _pool(self.jobs, self.threads) as pool:
            while True:
                for run in _todo(plan, rows):
                    if len(going) < self.jobs and run.key not in going.values():
                        with _interrupts_wait():
                            going[pool.submit(_work, run, self.tokens, self.device)] = run.key
                if not going:
                    return
                for future in wait(going, return_when=FIRST_COMPLETED).done:
                    del going[future]
                    yield future.result()


def _todo(plan: Plan, rows: dict[str, Row]) -> list[Run]:
    """Returns the missing runs without duplicates: two entries may ask for the same run."""
    runs = {run.key: run for entry in plan.study.entries for run in missing(plan, entry, rows)}
    return list(runs.values())


def _expected(plan: Plan, rows: dict[str, Row]) -> int:
    """Estimates the runs still to come; there are more if the best learning rate turns out to be the outermost."""
    count = 0
    for entry in plan.study.entries:
        todo = missing(plan, entry, rows)
        tuning = bool(todo) and plan.lr is None and any(run.lr != todo[0].lr for run in todo)
        count += len(todo) + (len(plan.seeds) - 1 if tuning else 0)
    return count


def _work(run: Run, tokens: Path, device: str) -> Row:
    return carry_out(run, _corpus(tokens, run.source.fingerprint), device)


def _corpus(tokens: Path, fingerprint: str) -> Corpus:
    """Memory-maps the tokens; InputError if they are not those of the runs, which would be stored as another text's."""
    corpus = load_corpus(TrainConfig(sequence=2), tokens)
    if corpus.fingerprint != fingerprint:
        raise InputError(
            f"--out {tokens.parent}: its tokens are of another text by now; give each --data its own --out"
        )
    return corpus


@contextmanager
def _pool(jobs: int, threads: int) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes end with this one, however it ends; an interrupt discards their runs."""
    others = set(active_children())
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin, (threads, os.getpid())) as pool:
        try:
            yield pool
        except BaseException:
            for child in set(active_children()) - others:
                child.terminate()
            raise


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Interrupts come after it, to this process; one that is started in it gets them when it lets them through."""
    resource_tracker.ensure_running()  # here, because it lets interrupts through at its end
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(threads: int, parent: int) -> None:
    """Sets up a process of the pool."""
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process at once, without a traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(threads)


@contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("runs")
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        yield progress


def _line(row: Row) -> str:
    loss = "diverged" if row["val_loss"] is None else f"{row['val_loss']:.4f}"
    return f"{row['name']:<26} lr {row['lr']:<8g} seed {row['seed']}  loss {loss}  {row['seconds']:.0f} s"
