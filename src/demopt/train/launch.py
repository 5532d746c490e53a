"""Starts a run: checks everything, starts the workers of this machine, and reports how the run ended."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from demopt.errors import DemoptError
from demopt.train import checkpoint
from demopt.train.config import TrainConfig, resolve
from demopt.train.data import load_corpus, save_corpus, with_vocabulary
from demopt.train.folder import RunFolder
from demopt.train.method import check_settings
from demopt.train.team import pick_device

# Errors of workers, by their names in torch's error file: mistakes and errors that need no traceback.
MISTAKES = ("InputError", "SharedInputError", "SettingsError")
PLAIN = ("DemoptError", "DriftError", "ExchangeError", "MessageError")
# Matches the error of a worker that failed only because another worker was gone.
ECHO = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe|ExchangeError|DistNetworkError")


class RunError(DemoptError):
    """A run ended early. The text is for the user; `code` is the exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def train(config: TrainConfig) -> int:
    """Runs `demopt train`: starts `config.workers` processes on this machine; returns the exit code."""
    config = resolve(config)
    check_settings(config)
    pick_device(config.device, 0, config.workers)
    folder = RunFolder(Path(config.out))
    folder.refuse_if_taken(config)
    corpus = load_corpus(config)
    config = with_vocabulary(config, corpus)
    if config.resume:
        checkpoint.find(folder.checkpoints, config.record(), corpus.fingerprint)
    with folder.held():
        folder.claim(config)
        with stop_on_signals(folder) as received:
            save_corpus(corpus, folder.tokens)
            del corpus
            _launch(config, folder)
    last = checkpoint.newest(folder.checkpoints)
    done = checkpoint.read(last).step if last else 0
    if done < config.steps:
        print(f"stopped after step {done} of {config.steps}, saved. {how_to_go_on(folder)}", file=sys.stderr)
        return 128 + (received[0] if received else signal.SIGINT)
    return 0


def _launch(config: TrainConfig, folder: RunFolder) -> None:
    """Runs the workers until all have finished. If one fails, the others are stopped, and RunError says why."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # `explain` reports the error
    command = ["-m", "demopt.train.worker", str(folder.config), str(os.getpid())]
    with tempfile.TemporaryDirectory(prefix="demopt-") as scratch:
        how = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=config.workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            signals_to_handle="SIGQUIT",  # `stop_on_signals` handles the others
        )
        try:
            elastic_launch(how, sys.executable)(*command, *(["resume"] if config.resume else []))
        except ChildFailedError as error:
            raise explain(error.failures, folder) from None


# How it ends


def how_to_go_on(folder: RunFolder) -> str:
    """Returns the command that resumes a run."""
    return f"Go on with: demopt train --resume --out {shlex.quote(str(folder.root))}"


@contextmanager
def stop_on_signals(folder: RunFolder, after: str = "this step") -> Iterator[list[int]]:
    """On the first signal, all workers finish `after` and save; on the second, they are killed.

    Each worker has a separate POSIX session, so that Ctrl-C in a terminal reaches only this process.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        if len(received) > 1:
            raise SignalException("stopped at once", signal.SIGKILL)
        folder.stop.touch()
        print(f"stopping after {after}; once more to stop at once", file=sys.stderr, flush=True)

    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {kind: signal.signal(kind, handle) for kind in kinds}
    try:
        try:
            yield received
        finally:
            for kind, handler in handlers.items():
                signal.signal(kind, handler)
            folder.stop.unlink(missing_ok=True)
    except Exception:  # torch's launcher may make another error of a SignalException
        if len(received) < 2:
            raise
        again = how_to_go_on(folder) if checkpoint.newest(folder.checkpoints) else "Nothing was saved."
        raise RunError(f"stopped at once. {again}", 128 + received[0]) from None


def explain(failures: dict[int, ProcessFailure], folder: RunFolder) -> RunError:
    """Builds the error that names the rank that failed first, and the cause; later failures only follow from it."""
    rank, first = first_failure(failures)
    kind, text, trace = details(first)
    if kind in MISTAKES:
        return RunError(text, 2)
    again = f" {how_to_go_on(folder)}" if checkpoint.newest(folder.checkpoints) else ""
    if kind in PLAIN:
        return RunError(f"rank {rank}: {text}.{again}", 1)
    who = f"(pid {first.pid}); the run is over.{again}"
    if first.exitcode < 0:
        return RunError(f"rank {rank} was ended by {first.signal_name()} {who}", 1)
    return RunError(f"rank {rank} failed {who}\n{trace}", 1)


def first_failure(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Returns the root failure, with its rank; the other ranks only notice that one is gone."""

    def suspicion(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        """The least for the root: a user's mistake, a signal, its own error, an echo, SIGTERM; then time."""
        _, failure = item
        kind, text, _ = details(failure)
        if kind in MISTAKES:
            return 0, failure.timestamp
        if failure.exitcode < 0:  # torch's launcher stops the others by SIGTERM
            return (4 if -failure.exitcode == signal.SIGTERM else 1), failure.timestamp
        return (3 if ECHO.search(f"{kind} {text}") else 2), failure.timestamp

    return min(failures.items(), key=suspicion)


def details(failure: ProcessFailure) -> tuple[str, str, str]:
    """Returns the class, text and traceback of the error, as far as the worker could report them."""
    message: Any = failure.message
    if not isinstance(message, dict):
        return "", str(message), ""
    kind, _, text = message["message"].partition(": ")
    return kind, text, message["extraInfo"]["py_callstack"].rstrip()
