"""One worker of a run, from joining to writing the last file.

demopt's launcher starts it as `python -m demopt.train.worker CONFIG.json LAUNCHER_PID [resume]`, torchrun as
`python -m demopt.cli train ...`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from demopt.train import checkpoint
from demopt.train.config import InputError, SharedInputError, TrainConfig, config_of, differences, read_file, resolve
from demopt.train.data import Corpus, load_corpus, with_vocabulary
from demopt.train.folder import RunFolder
from demopt.train.loop import Run, train_steps
from demopt.train.method import check_settings, make_method
from demopt.train.model import build
from demopt.train.report import Report, finish
from demopt.train.team import Team, join

Stop = Callable[[], bool]
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
_HELD = ExitStack()  # the lock on --out; only the end of the process closes it


def work(config: TrainConfig, launched: bool, stop: Stop) -> int:
    """Trains as one worker; returns the steps done. `launched`: demopt's launcher has prepared folder and tokens."""
    team = join(config)
    config = resolve(dataclasses.replace(config, workers=team.world_size))
    folder = RunFolder(Path(config.out))
    corpus = team.agree(lambda: _prepare(config, folder if launched else None))
    config = with_vocabulary(config, corpus)
    _compare(config, corpus, team)
    found = _claim(config, folder, corpus, team, launched)
    run, done = _start(config, folder, corpus, team, found, stop)
    with run.report:
        done = train_steps(run, done)
    if done == config.steps and team.first:
        with folder.writing(), run.method.shared():
            finish(config, folder, run.model, corpus)
    team.barrier()
    return done


def _prepare(config: TrainConfig, ready: RunFolder | None) -> Corpus:
    check_settings(config)
    return load_corpus(config, ready.tokens if ready else None)


def _compare(config: TrainConfig, corpus: Corpus, team: Team) -> None:
    """Raises SharedInputError if workers were started with different settings or data."""
    both = team.gather((config.record(), corpus.fingerprint))
    for rank, (settings, fingerprint) in enumerate(both):
        if changed := differences(both[0][0], settings):
            name = changed[0]
            raise SharedInputError(
                f"rank {rank} was started with {name}={settings[name]}, rank 0 with {name}={both[0][0][name]}; "
                "start all workers with the same settings"
            )
        if fingerprint != both[0][1]:
            raise SharedInputError(
                f"rank {rank} has other data than rank 0 (fingerprints {fingerprint[:8]} and {both[0][1][:8]}); "
                "give all workers the same --data, --tokenizer and --val-fraction"
            )


def _claim(config: TrainConfig, folder: RunFolder, corpus: Corpus, team: Team, launched: bool) -> Path | None:
    """Returns the checkpoint to resume from, if any; rank 0 claims the folder unless the launcher has."""
    found = None
    if config.resume:
        found = team.agree(lambda: checkpoint.find(folder.checkpoints, config.record(), corpus.fingerprint))
    if not launched:
        team.agree(lambda: _hold(config, folder) if team.first else None)
        team.agree(lambda: _see(folder))
    return found


def _hold(config: TrainConfig, folder: RunFolder) -> None:
    """Claims the folder and holds it until this process ends, as the launcher does."""
    _HELD.enter_context(folder.held())
    folder.claim(config)


def _see(folder: RunFolder) -> None:
    if not folder.config.exists():
        raise InputError(f"--out {folder.root} is not the folder that rank 0 writes to; it must be a shared one")


def _start(
    config: TrainConfig, folder: RunFolder, corpus: Corpus, team: Team, found: Path | None, stop: Stop
) -> tuple[Run, int]:
    model = build(config).to(team.device)
    method = make_method(config, model, team)
    resumed = checkpoint.read(found) if found else None
    if found is not None:
        with team.waiting():
            checkpoint.load(found, model, method.optimizer, team)
    done = resumed.step if resumed else 0
    with folder.writing():
        report = Report(folder, config, done, team.first)
    report.say(
        f"{config.preset}: {method.parameters:,} parameters; {len(corpus.train):,} training and "
        f"{len(corpus.val):,} validation tokens; {team.world_size} x {team.device.type}; "
        + (f"going on after step {done}" if done else f"{config.steps} steps")
    )
    if resumed and resumed.workers != team.world_size:
        report.say(_regrouped(resumed.workers, config))
    return Run(config, folder, team, corpus, model, method, report, stop, resumed), done


def _regrouped(before: int, config: TrainConfig) -> str:
    """Returns the effects of another number of workers."""
    tokens, now = config.tokens_per_step, config.workers
    kept = "; the mean of their unsent part is kept" if config.optimizer in ("demo", "local") else ""
    return (
        f"workers: {before} until now, {now} from here{kept}; a step takes {tokens:,} tokens instead of "
        f"{tokens // now * before:,}, at the same learning rate"
    )


# The process


def under_torchrun(config: TrainConfig) -> int:
    """Runs `demopt train` in a process that torchrun started; returns the exit code."""
    if config.run:
        raise SharedInputError("--run needs no torchrun: run demopt train on one machine, demopt join on the others")
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if received:
            os._exit(128 + number)  # the second stops at once
        received.append(number)

    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, handle)
    folder = RunFolder(Path(config.out))
    done = record(work)(config, False, lambda: bool(received) or folder.stop.exists())
    if done is None or done == config.steps:
        return 0
    if os.environ["RANK"] == "0":
        print(f"stopped after step {done} of {config.steps}, saved; go on by adding --resume", file=sys.stderr)
    return 128 + (received[0] if received else signal.SIGINT)


def main() -> NoReturn:
    """Runs as a worker started by demopt's launcher, to which torch's error file carries an error."""
    place, launcher, *more = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # Linux ends it with its launcher, even a killed one
    if os.getppid() != int(launcher):
        os._exit(1)

    @record
    def work_as_told() -> None:
        config = dataclasses.replace(config_of(read_file(Path(place))), resume="resume" in more)
        work(config, True, RunFolder(Path(config.out)).stop.exists)

    code = 1
    try:
        work_as_told()
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)  # see `join`; the launcher reports the error


if __name__ == "__main__":
    main()
