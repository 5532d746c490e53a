"""A worker of `demopt train`, from joining the others to the last file.

demopt's launcher starts it as `python -m demopt.train.worker SETTINGS.json`, torchrun as `python -m demopt.cli train`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from demopt.train import checkpoint
from demopt.train.config import (
    InputError,
    SharedInputError,
    TrainConfig,
    check_same_run,
    config_of,
    read_file,
    resolve,
)
from demopt.train.data import Corpus, load_corpus, with_vocabulary
from demopt.train.folder import RunFolder
from demopt.train.loop import Run, train_steps
from demopt.train.memory import refuse_if_too_large
from demopt.train.method import check_settings, make_method
from demopt.train.model import begin
from demopt.train.report import Report, finish
from demopt.train.signals import stop_on_signals
from demopt.train.team import Team, join

STOP = "stop"  # the file beside SETTINGS.json with which the launcher asks for the end
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def work(config: TrainConfig, stopping: Callable[[], bool]) -> int:
    """Trains as one worker; returns the steps done. `stopping`: whether to save and stop after the current step."""
    team = join(config)
    config = resolve(dataclasses.replace(config, workers=team.world_size))
    folder = RunFolder(Path(config.out))
    corpus, (config, model) = team.agree(lambda: _prepare(config, team))
    first, text = team.gather((config.record(), corpus.fingerprint))[0]
    same = "start all workers with the same settings"
    team.agree(lambda: check_same_run(config, corpus.fingerprint, first, text, "rank 0", same))
    found = None
    if config.resume:
        found = team.agree(lambda: checkpoint.find(folder.checkpoints, config, corpus.fingerprint))
    with ExitStack() as held:
        team.agree(lambda: _claim(config, folder, held) if team.first else None)
        team.agree(lambda: _see(folder))
        run, done = _start(
            config, folder, corpus, model.to(team.device), team, found, lambda: stopping() or folder.stop.exists()
        )
        with run.report:
            done = train_steps(run, done)
        if team.first and done == config.steps:
            with folder.writing(), run.method.shared():
                finish(config, folder, run.model, corpus)
        elif team.first:
            again = f"demopt train --resume --out {shlex.quote(config.out)}"
            print(f"stopped after step {done} of {config.steps}, saved; go on with: {again}", file=sys.stderr)
        team.barrier()
    return done


def _prepare(config: TrainConfig, team: Team) -> tuple[Corpus, tuple[TrainConfig, nn.Module]]:
    check_settings(config)
    refuse_if_too_large(config, team.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    corpus = load_corpus(config)
    return corpus, begin(with_vocabulary(config, corpus))


def _claim(config: TrainConfig, folder: RunFolder, held: ExitStack) -> None:
    held.enter_context(folder.held())
    folder.claim(config)


def _see(folder: RunFolder) -> None:
    if not folder.config.exists():
        raise InputError(f"--out {folder.root} is not the folder that rank 0 writes to; it must be a shared one")


def _start(
    config: TrainConfig,
    folder: RunFolder,
    corpus: Corpus,
    model: nn.Module,
    team: Team,
    found: Path | None,
    stop: Callable[[], bool],
) -> tuple[Run, int]:
    method = make_method(config, model, team)
    resumed = checkpoint.read(found) if found else None
    if found is not None:
        with team.waiting():
            checkpoint.load(found, model, method.optimizer)
    done = resumed.step if resumed else 0
    with folder.writing():
        report = Report(folder, config, done, team.first)
    report.say(corpus.about)
    report.say(
        f"{config.model or config.preset}: {method.parameters:,} parameters train; {team.world_size} x "
        f"{team.device.type}; " + (f"going on after step {done}" if done else f"{config.steps} steps")
    )
    report.say_memory(model, method.optimizer, team.device)
    if team.world_size == 1:
        report.say("1 worker: nothing is exchanged; for more, --workers 2, or --run ADDRESS on several machines")
    if resumed and (before := resumed.settings["workers"]) != team.world_size:
        tokens = config.tokens_per_step
        report.say(
            f"workers: {before} until now, {team.world_size} from here; a step takes {tokens:,} tokens instead of "
            f"{tokens // team.world_size * before:,}, at the same learning rate"
        )
    return Run(config, folder, team, corpus, model, method, report, stop, resumed), done


# The process


def under_torchrun(config: TrainConfig) -> int:
    """Runs `demopt train` in a process that torchrun started; returns the exit code."""
    if config.run:
        raise SharedInputError("--run needs no torchrun: run demopt train on one machine, demopt join on the others")
    with stop_on_signals() as received:
        done = record(work)(config, lambda: bool(received))
    return 0 if done == config.steps else 128 + (received[0] if received else signal.SIGINT)


def main() -> NoReturn:
    """Runs as a worker started by demopt's launcher, to which torch's error file carries an error."""
    settings = Path(sys.argv[1])
    if sys.platform == "linux":  # which then ends it with its launcher, even a killed one
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    code = 1
    try:
        record(work)(config_of(read_file(settings)), settings.with_name(STOP).exists)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)  # see `join`; the launcher reports the error


if __name__ == "__main__":
    main()
