"""Worker processes of this machine: starts and ends them together, and finds which one failed first, and why."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from demopt.errors import DemoptError

# User mistakes that a worker raises, by their names in torch's error file.
MISTAKES = ("InputError", "SharedInputError", "SettingsError")
# Matches the error of a worker that failed only because another worker was gone.
ECHO = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe|ExchangeError|DistNetworkError")
FAILED = 1  # exit code of a replica that is started again
MISTAKE = 2  # exit code of a replica that nobody needs to start again
STOPPED = 3  # exit code of a replica after a wish to stop, of this machine or of another
UNWRITTEN = 4  # exit code of a replica that did all steps and could not write what they led to
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class RunError(DemoptError):
    """A run ended early. The text is for the user; `code` is the exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Failure:
    """How a worker failed: the class, text and traceback of its error, as far as the worker could report them."""

    rank: int
    kind: str
    text: str
    trace: str
    process: ProcessFailure

    @property
    def signal_name(self) -> str | None:
        """The signal that killed the worker; None if it exited by itself."""
        return self.process.signal_name() if self.process.exitcode < 0 else None


def start_workers(command: list[str], count: int) -> None:
    """Run `python COMMAND...` as `count` workers, and return when all have finished.

    If one fails, the others are stopped and ChildFailedError is raised.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the caller reports the error
    with tempfile.TemporaryDirectory(prefix="demopt-") as scratch:
        how = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            signals_to_handle="SIGQUIT",  # the caller handles the others
        )
        elastic_launch(how, sys.executable)(*command)


def first_failure(failures: dict[int, ProcessFailure]) -> Failure:
    """Return the root failure; the other ranks only notice that one is gone."""
    rank, process = min(failures.items(), key=lambda item: _suspicion(item[1]))
    return Failure(rank, *_details(process), process)


def end_with(launcher: int) -> None:
    """Make this process end when its launcher does, even if the launcher is killed."""
    if sys.platform == "linux":
        # The kernel does it, because a Python thread cannot run while a library holds the GIL.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(launcher,), daemon=True).start()
    if os.getppid() != launcher:
        os._exit(1)


def be_worker(launcher: int, work: Callable[[], Any]) -> NoReturn:
    """Run `work` as a worker started by `start_workers`; torch's error file carries an error to the launcher."""
    end_with(launcher)
    code = 1
    try:
        record(work)()
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)  # see `join`; the launcher reports the error


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1)
    os._exit(1)


def _suspicion(failure: ProcessFailure) -> tuple[int, int]:
    """Sort key, least for the root failure: a user's mistake, a signal, its own error, an echo, SIGTERM; then time."""
    kind, text, _ = _details(failure)
    if kind in MISTAKES:
        return 0, failure.timestamp
    if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:  # torch's launcher stops the others by SIGTERM
        return 1, failure.timestamp
    if failure.exitcode < 0:
        return 4, failure.timestamp
    return (3 if ECHO.search(f"{kind} {text}") else 2), failure.timestamp


def _details(failure: ProcessFailure) -> tuple[str, str, str]:
    """Return the class, text and traceback of the error, as far as the worker could report them."""
    message: Any = failure.message
    if not isinstance(message, dict):
        return "", str(message), ""
    kind, _, text = message["message"].partition(": ")
    return kind, text, message["extraInfo"]["py_callstack"].rstrip()
