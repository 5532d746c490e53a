"""Worker processes of this machine: started together, ended together, and which of them failed first, and why."""

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

# Errors that a worker raises for the user to read, by the name that torch's error file gives them.
MISTAKES = ("InputError", "SharedInputError", "SettingsError")
# How a worker's error reads when it is only the echo of another worker's end.
ECHO = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe|ExchangeError|DistNetworkError")
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class RunError(DemoptError):
    """A run has ended before its time; the text is for the user, `code` for the shell."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Failure:
    """How a worker failed: the error's class, its text and its traceback, as far as the worker could still tell."""

    rank: int
    kind: str
    text: str
    trace: str
    process: ProcessFailure

    @property
    def signal_name(self) -> str | None:
        """The signal that ended the worker; None where it ended by itself."""
        return self.process.signal_name() if self.process.exitcode < 0 else None


def start_workers(command: list[str], count: int) -> None:
    """Run `python COMMAND...` as `count` workers, and return when all have ended.

    ChildFailedError where one fails: the others are ended then.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # whoever catches the error says what matters
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
            signals_to_handle="SIGQUIT",  # the others are the caller's
        )
        elastic_launch(how, sys.executable)(*command)


def first_failure(failures: dict[int, ProcessFailure]) -> Failure:
    """The failure that began it; the other ranks only notice that one is gone."""
    rank, process = min(failures.items(), key=lambda item: _suspicion(item[1]))
    return Failure(rank, *_details(process), process)


def end_with(launcher: int) -> None:
    """See that this process ends when its launcher does, even when that is killed."""
    if sys.platform == "linux":
        # By the kernel: a thread of ours could not act while a library holds the interpreter.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(launcher,), daemon=True).start()
    if os.getppid() != launcher:
        os._exit(1)


def be_worker(launcher: int, work: Callable[[], Any]) -> NoReturn:
    """Be one of the workers that `start_workers` has started; an error travels to it through torch's error file."""
    end_with(launcher)
    code = 1
    try:
        record(work)()
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)  # see `join`; the launcher tells the error


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1)
    os._exit(1)


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
