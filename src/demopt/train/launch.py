"""Starts a run: checks everything, starts the workers of this machine, and reports how the run ended."""

from __future__ import annotations

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

from demopt.train import hub, records
from demopt.train.config import SharedInputError, TrainConfig
from demopt.train.dashboard import STOPPING, free_terminal
from demopt.train.data import load_corpus, save_corpus, with_vocabulary
from demopt.train.finish import check_outputs
from demopt.train.folder import RunFolder
from demopt.train.key import hand_on, read_key
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
    if config.elastic:
        from demopt.train.elastic import train_elastic

        return train_elastic(config)
    config = resolve(config)
    check_settings(config)
    pick_device(config.device, 0, config.workers)
    folder = RunFolder(Path(config.out))
    folder.refuse_if_taken(config)
    if (key := read_key(config.key_file)) is not None:
        hand_on(key)
    corpus = load_corpus(config)
    config = with_vocabulary(config, corpus)
    resumed = 0  # the step that this start goes on after
    check_outputs(config, corpus)
    if config.resume:
        found = records.find(folder.checkpoints, config.record(), corpus.fingerprint)
        resumed = records.read(found).step
    with folder.held():
        folder.claim(config)
        with stop_on_signals(folder, config, resumed) as received:
            save_corpus(corpus, folder.tokens)
            del corpus
            _launch(config, folder)
    last = records.newest(folder.checkpoints)
    done = records.read(last).step if last else 0
    if done < config.steps:
        print(f"stopped after step {done} of {config.steps}, saved. {how_to_go_on(folder)}", file=sys.stderr)
        return 128 + (received[0] if received else signal.SIGINT)
    hub.push(config, folder)
    return 0


def how_to_go_on(folder: RunFolder) -> str:
    """Return the command that resumes a run.

    Examples:
        >>> how_to_go_on(RunFolder(Path("runs/first")))
        'Go on with: demopt train --resume --out runs/first'
    """
    return f"Go on with: demopt train --resume --out {shlex.quote(str(folder.root))}"


def explain(failures: dict[int, ProcessFailure], folder: RunFolder) -> RunError:
    """Build the error that names the rank that failed first, and why; the others only notice that it is gone."""
    first = first_failure(failures)
    if first.kind in MISTAKES:
        return RunError(first.text, 2)
    again = f" {how_to_go_on(folder)}" if records.newest(folder.checkpoints) else ""
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


@contextmanager
def stop_on_signals(folder: RunFolder, config: TrainConfig, done: int = 0) -> Iterator[list[int]]:
    """On the first signal, all workers finish their step and save; on the second, they are killed.

    Before this start has gone beyond step `done` there is nothing to save, and the first signal kills. Each worker is
    in its own POSIX session, so that Ctrl-C in a terminal reaches only this process.
    """
    received: list[int] = []
    before, killed = _file_number(folder.metrics), False

    def begun() -> bool:  # a start writes metrics.jsonl anew before it adds to it
        return _file_number(folder.metrics) not in (None, before) and folder.last_step() > done

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal killed
        del frame
        received.append(number)
        if len(received) > 1 or not begun():
            killed = True
            raise SignalException("stopped at once", signal.SIGKILL)
        folder.stop.touch()
        if not folder.live.exists():  # otherwise the dashboard says so
            print(STOPPING, file=sys.stderr, flush=True)

    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {kind: signal.signal(kind, handle) for kind in kinds}
    try:
        try:
            yield received
        finally:
            for kind, handler in handlers.items():
                signal.signal(kind, handler)
            free_terminal(folder)
            folder.stop.unlink(missing_ok=True)
    except Exception:  # torch's launcher may make another error of a SignalException
        if not killed:
            raise
        raise RunError(_stopped(folder, config, begun()), 128 + received[0]) from None


def _stopped(folder: RunFolder, config: TrainConfig, begun: bool) -> str:
    """Return what to say after a stop at once; clear a folder that holds nothing but what this start prepared."""
    if records.newest(folder.checkpoints):
        return f"stopped {'at once' if begun else 'before a step was done'}. {how_to_go_on(folder)}"
    if begun or config.resume:
        return "stopped at once; nothing was saved"
    folder.clear()
    return "stopped before the first step"


def _file_number(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def _under_torchrun(config: TrainConfig) -> int:
    from demopt.train.worker import work

    if config.elastic:
        raise SharedInputError(
            "workers that come and go (--workers MIN:MAX, --lighthouse) are started by demopt train itself: run it "
            "without torchrun"
        )
    received: list[int] = []
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda number, _: received.append(number))
    folder = RunFolder(Path(config.out))
    done = record(work)(config, False, lambda: bool(received) or folder.stop.exists())
    if done is None or done == config.steps:
        if os.environ["RANK"] == "0":
            hub.push(config, folder)
        return 0
    if os.environ["RANK"] == "0":
        print(f"stopped after step {done} of {config.steps}, saved; go on by adding --resume", file=sys.stderr)
    return 128 + (received[0] if received else signal.SIGINT)
