"""Starts the workers of this machine with torch's launcher, and reports how they ended."""

import dataclasses
import json
import logging
import os
import re
import shlex
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from demopt.errors import DemoptError, first_line
from demopt.output import tell
from demopt.train import checkpoint
from demopt.train.config import InputError, TrainConfig
from demopt.train.method import check_settings, machine_memory
from demopt.train.out import OutFolder
from demopt.train.team import pick_device, stop_on_signals
from demopt.train.worker import ENDED, OLD_STOP, STOP, made

PROCESS_BYTES = 200_000_000  # of a worker's own memory, with Python and torch, before it makes anything
# Errors of workers, by their names in torch's error file: mistakes and errors that need no traceback.
MISTAKES = ("InputError", "SharedInputError", "SettingsError")
PLAIN = ("DemoptError", "DriftError", "ExchangeError", "MessageError")
# Matches the error of a worker that failed only because another worker was gone.
ECHO = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe|ExchangeError|DistNetworkError")


def train(config: TrainConfig, out: OutFolder | None = None) -> int:
    """Runs `demopt train` with resolved settings: starts this machine's workers; returns the exit code."""
    out = out or OutFolder(Path(config.out))
    check_settings(config)
    if (needed := config.workers * PROCESS_BYTES) > (here := machine_memory()):
        told = f"such processes take {decimal(needed)} before they train, and there are {decimal(int(here))}"
        raise InputError(f"--workers is {config.workers}; {told}: give fewer")
    pick_device(config.device, 0, config.workers)
    out.refuse_if_taken(config)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # `explain` reports the error
    with tempfile.TemporaryDirectory(prefix="demopt-", ignore_cleanup_errors=True) as scratch:
        settings = Path(scratch, "settings.json")
        settings.write_text(json.dumps(dataclasses.asdict(config)), encoding="utf-8")
        settings.with_name(OLD_STOP).write_text(str(out.old_stop))
        how = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=config.workers, max_restarts=0, run_id="demopt",
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost",
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            signals_to_handle="SIGQUIT",  # `stop_on_signals` handles the others
        )  # fmt: skip
        # Files in the current folder are not modules for the workers, unless they are for this process.
        safe = ["-P"] if sys.version_info >= (3, 11) and not {"", os.getcwd()} & {*sys.path} else []
        with stop_on_signals(lambda: made(Path(scratch, STOP)).touch()) as received:
            try:
                elastic_launch(how, sys.executable)(*safe, "-m", "demopt.train.worker", str(settings), str(os.getpid()))
            except ChildFailedError as error:
                raise explain(error.failures, out) from None
            except SignalException as error:
                return tell("stopped at once", 128 + error.sigval)
            except (DistError, RendezvousError) as error:  # no port, or no file, is left; or localhost is down
                told = first_line(error.__cause__ or error)
                raise DemoptError(f"the workers cannot be started: {told}; they connect at localhost") from None
        if Path(scratch, ENDED).exists():
            return 0
    return 128 + (received[0] if received else signal.SIGINT)


def explain(failures: dict[int, ProcessFailure], out: OutFolder) -> InputError | DemoptError:
    """Builds the error that names the rank that failed first, and the cause; later failures only follow from it."""

    def follows(failure: ProcessFailure) -> bool:
        """Whether torch's launcher ended it by SIGTERM, or it echoes the failure of another."""
        echo = ECHO.search(" ".join(_details(failure)[:2])) is not None
        return echo or failure.exitcode == -signal.SIGTERM

    rank, first = min(failures.items(), key=lambda item: (follows(item[1]), item[1].timestamp))
    kind, text, trace = _details(first)
    if kind in MISTAKES:
        return InputError(text)
    saved = checkpoint.whole(out.checkpoints)
    again = f" Go on with: demopt train --resume --out {shlex.quote(str(out.root))}" if saved else ""
    if kind in PLAIN:
        return DemoptError(f"rank {rank}: {text}.{again}")
    who = f"(pid {first.pid}); the run is over.{again}"
    if first.exitcode < 0:
        return DemoptError(f"rank {rank} was ended by {first.signal_name()} {who}")
    return DemoptError(f"rank {rank} failed {who}\n{trace}")


def _details(failure: ProcessFailure) -> tuple[str, str, str]:
    """Returns the class, text and traceback of the error, as far as the worker could report them."""
    message: Any = failure.message
    if not isinstance(message, dict):
        return "", str(message), ""
    kind, _, text = message["message"].partition(": ")
    return kind, text, message["extraInfo"]["py_callstack"].rstrip()
