"""Several workers on one machine: a process for each, as if every one had been started alone."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import IO

from demopt.train.config import TrainConfig
from demopt.train.folder import RunFolder
from demopt.train.worker import PR_SET_PDEATHSIG


def train_as_several(config: TrainConfig) -> int:
    """Starts `config.workers` workers and waits for all; returns the first exit code that is not 0.

    The first one writes to --out and to the terminal, the others to worker-1, worker-2, ... in --out. A worker that
    ends early does not end the others.
    """
    folder, processes = RunFolder(Path(config.out)), list[subprocess.Popen[bytes]]()
    folder.refuse_if_taken(config)
    received: list[int] = []  # signals, also for workers that are yet to start

    def forward(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        for process in processes:
            process.send_signal(number)

    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {kind: signal.signal(kind, forward) for kind in kinds}
    try:
        with ExitStack() as held:
            scratch = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="demopt-")))
            for number in range(config.workers):
                out = worker_folder(folder.root, number)
                out.mkdir(parents=True, exist_ok=True)
                settings = scratch / f"{number}.json"
                settings.write_text(json.dumps(dataclasses.replace(config, out=str(out), workers=1).record()))
                log = held.enter_context((out / "log").open("wb")) if number else None
                processes.append(_started(config, number, settings, RunFolder(out), log))
                for signal_number in received:
                    processes[-1].send_signal(signal_number)
            codes = [process.wait() for process in processes]
    finally:
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
    for number, code in enumerate(codes):
        if code not in (0, codes[0]):
            log_file = worker_folder(folder.root, number) / "log"
            print(f"worker {number} ended with code {code}; see {log_file}", file=sys.stderr)
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def worker_folder(root: Path, number: int) -> Path:
    """Returns the folder of a command's worker: --out itself for the first.

    Examples:
        >>> str(worker_folder(Path("out"), 0)), str(worker_folder(Path("out"), 1))
        ('out', 'out/worker-1')
    """
    return root / f"worker-{number}" if number else root


def _started(
    config: TrainConfig, number: int, settings: Path, folder: RunFolder, log: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    flags = ["--resume"] if config.resume and folder.config.exists() else ["--overwrite"] if config.overwrite else []
    flags += ["--key-file", config.key_file] if config.key_file else []
    return subprocess.Popen(
        [sys.executable, "-m", "demopt.cli", "train", "--config", str(settings), *flags],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log and subprocess.STDOUT,
        env={**os.environ, "LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(config.workers)},
        start_new_session=True,  # Ctrl-C reaches this process alone, which forwards it
        preexec_fn=_leave_with_parent,
    )


def _leave_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
