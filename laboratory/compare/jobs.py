"""Carries out the missing runs of a plan, in this process or in several."""

import signal
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from laboratory.compare.run import Row, Run, Scale, carry_out
from laboratory.compare.store import append_row, read_rows
from laboratory.compare.tuning import Plan, missing
from laboratory.training import Corpus, TrainConfig, load_corpus


@dataclass(frozen=True)
class Machine:
    """Where runs are carried out: how many at once, each with how many threads, on which device."""

    jobs: int = 1
    threads: int = 1
    device: str = "cpu"


def carry_out_all(plan: Plan, corpus: Corpus, store: Path, machine: Machine) -> dict[str, Row]:
    """Carries out the missing runs of a plan, appends each to the store, and returns all rows."""
    rows = read_rows(store)
    finished = (
        _here(plan, rows, corpus, machine, store.parent)
        if machine.jobs == 1
        else _in_processes(plan, rows, machine, store.parent)
    )
    for row in finished:
        rows[row["key"]] = row
        append_row(store, row)
        loss = "diverged" if row["val_loss"] is None else f"{row['val_loss']:.4f}"
        print(
            f"{row['name']:<26} lr {row['lr']:<8g} seed {row['seed']}  loss {loss}  {row['seconds']:.0f} s", flush=True
        )
    return rows


def _here(plan: Plan, rows: dict[str, Row], corpus: Corpus, machine: Machine, states: Path) -> Iterator[Row]:
    """Yields rows as runs finish; the caller adds them to `rows`, from which the next runs follow."""
    torch.set_num_threads(machine.threads)
    while todo := missing(plan, rows):
        yield carry_out(todo[0], corpus, torch.device(machine.device), states)


def _in_processes(plan: Plan, rows: dict[str, Row], machine: Machine, states: Path) -> Iterator[Row]:
    going: dict[Future[Row], str] = {}
    with ProcessPoolExecutor(machine.jobs, get_context("spawn"), _begin, (plan, machine)) as pool:
        while True:
            for run in missing(plan, rows):
                if len(going) < machine.jobs and run.key not in going.values():
                    going[pool.submit(_carry_out, run, states)] = run.key
            if not going:
                return
            for future in wait(going, return_when=FIRST_COMPLETED).done:
                del going[future]
                yield future.result()


_process: dict[str, Any] = {}  # the text and the device, in a process of the pool


def _begin(plan: Plan, machine: Machine) -> None:
    """Sets up a process of the pool."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    torch.set_num_threads(machine.threads)
    _process.update(corpus=read_text(plan.source.paths, plan.scale), device=torch.device(machine.device))


def _carry_out(run: Run, states: Path) -> Row:
    return carry_out(run, _process["corpus"], _process["device"], states)


def read_text(paths: tuple[str, ...], scale: Scale) -> Corpus:
    """Reads the text as bytes; `paths` are those of `demopt train --data`."""
    return load_corpus(TrainConfig(data=list(paths), sequence=scale.sequence, val_fraction=scale.val_fraction))
