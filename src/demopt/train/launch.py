"""Starts a run: checks everything, starts the workers of this machine, and reports how the run ended."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record

from demopt.train import checkpoint, sources
from demopt.train.config import TrainConfig
from demopt.train.data import load_corpus, save_corpus
from demopt.train.folder import RunFolder
from demopt.train.method import check_settings
from demopt.train.model import resolve
from demopt.train.processes import MISTAKES, RunError, first_failure, start_workers
from demopt.train.team import is_worker, pick_device

PLAIN = ("DemoptError", "DriftError", "ExchangeError", "MessageError")


def train(config: TrainConfig) -> int:
    """Run `demopt train`; return the exit code.

    Starts `config.workers` processes on this machine; if torchrun started this process, it is itself a worker.
    """
    if is_worker():
        return _under_torchrun(config)
    config = resolve(config)
    check_settings(config)
    pick_device(config.device, 0, config.workers)
    folder = RunFolder(Path(config.out))
    folder.refuse_if_taken(config)
    corpus = load_corpus(config)
    config = dataclasses.replace(config, vocab_size=config.vocab_size or corpus.vocab_size)
    if config.resume:
        checkpoint.find(folder.checkpoints, config.record(), corpus.fingerprint)
    with folder.held():
        folder.claim(config)
        if not sources.token_files(config):
            save_corpus(corpus, folder.tokens)
        del corpus
        with _stop_on_signals(folder) as received:
            _launch(config, folder)
    last = checkpoint.newest(folder.checkpoints)
    done = checkpoint.read(last).step if last else 0
    if done < config.steps:
        print(f"stopped after step {done} of {config.steps}, saved. {how_to_go_on(folder)}", file=sys.stderr)
        return 128 + (received[0] if received else signal.SIGINT)
    return 0


def how_to_go_on(folder: RunFolder) -> str:
    """Return the command that resumes a run.

    Example:
        >>> how_to_go_on(RunFolder(Path("runs/first")))
        'Go on with: demopt train --resume --out runs/first'
    """
    return f"Go on with: demopt train --resume --out {shlex.quote(str(folder.root))}"


def explain(failures: dict[int, ProcessFailure], folder: RunFolder) -> RunError:
    """Build the error that names the rank that failed first, and why; the others only notice that it is gone."""
    first = first_failure(failures)
    if first.kind in MISTAKES:
        return RunError(first.text, 2)
    again = f" {how_to_go_on(folder)}" if checkpoint.newest(folder.checkpoints) else ""
    if first.kind in PLAIN:
        return RunError(f"rank {first.rank}: {first.text}.{again}", 1)
    who = f"(pid {first.process.pid}); the run is over.{again}"
    if first.signal_name:
        return RunError(f"rank {first.rank} was ended by {first.signal_name} {who}", 1)
    return RunError(f"rank {first.rank} failed {who}\n{first.trace}", 1)


def _launch(config: TrainConfig, folder: RunFolder) -> None:
    command = ["-m", "demopt.train.worker", str(folder.config), str(os.getpid())]
    command += ["resume"] if config.resume else []
    try:
        start_workers(command, config.workers)
    except ChildFailedError as error:
        raise explain(error.failures, folder) from None
    except SignalException:
        raise RunError(f"stopped at once. {how_to_go_on(folder)}", 130) from None


@contextmanager
def _stop_on_signals(folder: RunFolder) -> Iterator[list[int]]:
    """On the first signal, all workers finish their step and save; on the second, they are killed.

    Each worker is in its own POSIX session, so that Ctrl-C in a terminal reaches only this process.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        if len(received) > 1:
            raise SignalException("stopped twice", signal.SIGKILL)
        folder.stop.touch()
        print("stopping after this step; once more to stop at once", file=sys.stderr, flush=True)

    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {kind: signal.signal(kind, handle) for kind in kinds}
    try:
        yield received
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
        folder.stop.unlink(missing_ok=True)


def _under_torchrun(config: TrainConfig) -> int:
    from demopt.train.worker import work

    received: list[int] = []
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda number, _: received.append(number))
    stop = RunFolder(Path(config.out)).stop
    done = record(work)(config, False, lambda: bool(received) or stop.exists())
    if done is None or done == config.steps:
        return 0
    if os.environ["RANK"] == "0":
        print(f"stopped after step {done} of {config.steps}, saved; go on by adding --resume", file=sys.stderr)
    return 128 + (received[0] if received else signal.SIGINT)
