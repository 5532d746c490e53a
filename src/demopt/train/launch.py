"""Starting a run: check everything, start the workers of this machine, tell in plain words how it ended."""

from __future__ import annotations

import dataclasses
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
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from demopt.errors import DemoptError
from demopt.train import checkpoint, sources
from demopt.train.config import TrainConfig
from demopt.train.data import load_corpus, save_corpus
from demopt.train.folder import RunFolder
from demopt.train.method import check_settings
from demopt.train.model import resolve
from demopt.train.team import is_worker, pick_device

# Errors that a worker raises for the user to read, by the name that torch's error file gives them.
MISTAKES = ("InputError", "SharedInputError", "SettingsError")
PLAIN = ("DemoptError", "DriftError", "ExchangeError", "MessageError")
# How a worker's error reads when it is only the echo of another worker's end.
ECHO = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe|ExchangeError|DistNetworkError")


class RunError(DemoptError):
    """A run has ended before its time; the text is for the user, `code` for the shell."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def train(config: TrainConfig) -> int:
    """Run `demopt train`; return the exit code.

    Starts `config.workers` processes on this machine, or is one worker where torchrun has started it.
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
    """The command that continues a run.

    Example:
        >>> how_to_go_on(RunFolder(Path("runs/first")))
        'Go on with: demopt train --resume --out runs/first'
    """
    return f"Go on with: demopt train --resume --out {shlex.quote(str(folder.root))}"


def explain(failures: dict[int, ProcessFailure], folder: RunFolder) -> RunError:
    """Say which rank failed first and why; the others only notice that it is gone."""
    rank, failure = min(failures.items(), key=lambda item: _suspicion(item[1]))
    kind, text, trace = _details(failure)
    if kind in MISTAKES:
        return RunError(text, 2)
    again = f" {how_to_go_on(folder)}" if checkpoint.newest(folder.checkpoints) else ""
    if kind in PLAIN:
        return RunError(f"rank {rank}: {text}.{again}", 1)
    if failure.exitcode < 0:
        name = failure.signal_name()
        return RunError(f"rank {rank} was ended by {name} (pid {failure.pid}); the run is over.{again}", 1)
    return RunError(f"rank {rank} failed (pid {failure.pid}); the run is over.{again}\n{trace}", 1)


def _launch(config: TrainConfig, folder: RunFolder) -> None:
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # `explain` says what matters
    command = ["-m", "demopt.train.worker", str(folder.config), str(os.getpid())]
    command += ["resume"] if config.resume else []
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
            signals_to_handle="SIGQUIT",  # the others are ours, see `_stop_on_signals`
        )
        try:
            elastic_launch(how, sys.executable)(*command)
        except ChildFailedError as error:
            raise explain(error.failures, folder) from None
        except SignalException:
            raise RunError(f"stopped at once. {how_to_go_on(folder)}", 130) from None


@contextmanager
def _stop_on_signals(folder: RunFolder) -> Iterator[list[int]]:
    """First signal: all workers finish their step and save. Second: they are killed.

    The workers have sessions of their own, so that Ctrl-C in a terminal reaches this process alone.
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


def _suspicion(failure: ProcessFailure) -> tuple[int, int]:
    """Least for the failure that began it: a signal, then an error of its own, then an echo of another's end."""
    kind, text, _ = _details(failure)
    if kind in MISTAKES:
        return 0, failure.timestamp
    if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:  # SIGTERM is how the agent ends the others
        return 1, failure.timestamp
    if failure.exitcode < 0:
        return 4, failure.timestamp
    return (3 if ECHO.search(f"{kind} {text}") else 2), failure.timestamp


def _details(failure: ProcessFailure) -> tuple[str, str, str]:
    """The error's class, its text and its traceback, as far as the worker could still tell."""
    message: Any = failure.message
    if not isinstance(message, dict):
        return "", str(message), ""
    kind, _, text = message["message"].partition(": ")
    return kind, text, message["extraInfo"]["py_callstack"].rstrip()
