"""Runs a benchmark: checks everything, then measures each number of workers in turn, with fresh processes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from demopt.bench import against, worker
from demopt.bench.config import BenchConfig, keywords
from demopt.bench.methods import check_demo
from demopt.bench.shapes import model_of
from demopt.train.assemble import assemble
from demopt.train.config import InputError
from demopt.train.data import load_corpus, save_corpus, with_vocabulary
from demopt.train.model import resolve
from demopt.train.processes import MISTAKES, RunError, first_failure, start_workers
from demopt.train.team import pick_device

_MEMINFO = Path("/proc/meminfo")


def measure(config: BenchConfig, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return what the workers measured, one entry for each number of workers."""
    _check(config)
    with tempfile.TemporaryDirectory(prefix="demopt-bench-") as scratch:
        folder = Path(scratch)
        config.save(folder / worker.CONFIG)
        if "train" in config.studies:
            _prepare_training(config, folder)
        found = []
        for count in config.workers:
            say(f"measuring with {count} worker{'s' if count > 1 else ''}: {', '.join(config.studies)}")
            result, load = folder / f"{count}.json", os.getloadavg()[0]  # other processes' alone
            _start(["-m", "demopt.bench.worker", scratch, str(result), str(os.getpid())], count)
            found.append({**json.loads(result.read_text(encoding="utf-8")), "load_average": load})
    return found


def explain(failures: dict[int, ProcessFailure]) -> RunError:
    """Return an error that says which rank failed first and why; a user's mistake takes one line."""
    first = first_failure(failures)
    if first.kind in MISTAKES:
        return RunError(first.text, 2)
    if first.signal_name:
        return RunError(f"rank {first.rank} was ended by {first.signal_name}; nothing was written", 1)
    return RunError(f"rank {first.rank} failed; nothing was written\n{first.trace or first.text}", 1)


def needed_bytes(config: BenchConfig, parameters: int) -> int:
    """Estimate the bytes that the step study holds at its largest number of workers.

    Examples:
        >>> needed_bytes(BenchConfig(foreach=False, muon=False), 1000)  # parameter, gradient, momentum, two moments
        20000
    """
    buffers = 2 + len(config.demo) + 2 * (1 + config.foreach) + 2 * bool(config.against)
    buffers += 9 * config.muon  # one, and one with shared weights, movement and error; twice
    return 4 * parameters * buffers * max(config.workers)


def _check(config: BenchConfig) -> None:
    check_demo(config)
    if config.against:
        against.split(config.against)
        keywords(config.against_args, "--against-args")
    device = pick_device(config.device, 0, max(config.workers))
    if "step" in config.studies:
        needed, free = needed_bytes(config, model_of(config.shapes).parameters), _available_bytes()
        if device.type == "cpu" and free is not None and needed > free:
            raise InputError(
                f"{max(config.workers)} workers on --shapes {config.shapes} need about {needed / 1e9:.0f} GB, and "
                f"{free / 1e9:.0f} GB are free; give fewer --workers, --no-muon, or smaller --shapes"
            )


def _prepare_training(config: BenchConfig, folder: Path) -> None:
    """Write the training settings and tokens, once for all workers."""
    given = {"preset": config.preset, "batch": config.batch, "data": list(config.data), "device": config.device}
    train = resolve(assemble(given))
    corpus = load_corpus(train)
    train = with_vocabulary(train, corpus)
    (folder / worker.TRAIN).write_text(json.dumps(train.record()), encoding="utf-8")
    save_corpus(corpus, folder / worker.TOKENS)


def _start(command: list[str], count: int) -> None:
    try:
        start_workers(command, count)
    except ChildFailedError as error:
        raise explain(error.failures) from None


def _available_bytes() -> int | None:
    """Return the available memory; None where the system does not report it."""
    if not _MEMINFO.exists():
        return None
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="utf-8").splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])
