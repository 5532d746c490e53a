"""One worker of a run, from joining the others to writing the last file.

demopt's own launcher starts it as `python -m demopt.train.worker CONFIG.json LAUNCHER_PID [resume]`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from demopt.train import checkpoint, records
from demopt.train.assemble import read_file
from demopt.train.config import InputError, SharedInputError, TrainConfig, differences
from demopt.train.data import Corpus, load_corpus, with_vocabulary
from demopt.train.finish import check_outputs, finish
from demopt.train.folder import RunFolder
from demopt.train.loop import Run, train_steps
from demopt.train.method import Method, check_settings, make_method
from demopt.train.model import build, resolve
from demopt.train.processes import be_worker
from demopt.train.report import Report
from demopt.train.team import Team, join

Stop = Callable[[], bool]
_HELD = ExitStack()  # the lock on --out; only the end of the process closes it


def work(config: TrainConfig, launched: bool, stop: Stop) -> int:
    """Train as one worker; return the steps done. `launched`: demopt's launcher has prepared folder and tokens."""
    team = join(config)
    config = resolve(dataclasses.replace(config, workers=team.world_size))
    folder = RunFolder(Path(config.out))
    corpus = team.agree(lambda: _prepare(config, folder if launched else None))
    config = with_vocabulary(config, corpus)
    _compare(config, corpus, team)
    if not launched:
        team.agree(lambda: check_outputs(config, corpus) if team.first else None)
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
    """Raise SharedInputError if workers were started with different settings or data."""
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
    """Return the checkpoint to resume from, if any; rank 0 claims the folder unless the launcher has."""
    found = None
    if config.resume:
        found = team.agree(lambda: records.find(folder.checkpoints, config.record(), corpus.fingerprint))
        team.agree(lambda: records.check_bytes(found, team) if found else None)
    if not launched:
        team.agree(lambda: _hold(config, folder) if team.first else None)
        team.agree(lambda: _see(folder))
    return found


def _hold(config: TrainConfig, folder: RunFolder) -> None:
    """Claim the folder and hold it until this process ends, as the launcher does: --overwrite must not find it free."""
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
    resumed = None
    if found is not None:
        checkpoint.load(found, model, method.optimizer, team, method.private)
        resumed = records.read(found)
    done = resumed.step if resumed else 0
    with folder.writing():
        report = Report(folder, config, done, method.parameters, team.first)
    if team.first:
        print(
            f"{config.preset}: {method.parameters:,} parameters; {len(corpus.train):,} training and "
            f"{len(corpus.val):,} validation tokens; {team.world_size} x {team.device.type}; "
            + (f"going on after step {done}" if done else f"{config.steps} steps"),
            flush=True,
        )
        if resumed and resumed.workers != team.world_size:
            print(_regrouped(resumed.workers, config, method), flush=True)
    return Run(config, folder, team, corpus, model, method, report, stop, resumed), done


def _regrouped(before: int, config: TrainConfig, method: Method) -> str:
    """Return what another number of workers changes."""
    tokens = config.tokens_per_step
    kept = "; what the others had not sent yet is shared out among these, its mean is kept" if method.private else ""
    return (
        f"workers: {before} until now, {config.workers} from here{kept}; a step takes {tokens:,} tokens instead of "
        f"{tokens // config.workers * before:,}, at the same learning rate"
    )


def main() -> NoReturn:
    """Run as a worker started by demopt's own launcher."""
    place, launcher, *more = sys.argv[1:]

    def work_as_told() -> None:
        config = TrainConfig(**read_file(Path(place)), resume="resume" in more)
        work(config, True, RunFolder(Path(config.out)).stop.exists)

    be_worker(int(launcher), work_as_told)


if __name__ == "__main__":
    main()
