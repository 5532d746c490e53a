"""One worker of a run, from joining the others to writing the last file.

demopt's own launcher starts it as `python -m demopt.train.worker CONFIG.json LAUNCHER_PID [resume]`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from torch import nn

from demopt.train import checkpoint, summary
from demopt.train.config import InputError, SharedInputError, TrainConfig, differences, read_file
from demopt.train.data import Corpus, load_corpus
from demopt.train.folder import RunFolder
from demopt.train.loop import Run, train_steps
from demopt.train.method import check_settings, make_method
from demopt.train.model import build, count_parameters, resolve
from demopt.train.processes import be_worker
from demopt.train.report import Report
from demopt.train.sample import save_model, write_sample
from demopt.train.team import Team, join
from demopt.train.tokens import load_tokenizer

Stop = Callable[[], bool]


def work(config: TrainConfig, launched: bool, stop: Stop) -> int:
    """Train as one worker; return the steps done. `launched`: demopt's launcher has prepared folder and tokens."""
    team = join(config)
    config = resolve(dataclasses.replace(config, workers=team.world_size))
    folder = RunFolder(Path(config.out))
    corpus = team.agree(lambda: _prepare(config, folder if launched else None))
    config = dataclasses.replace(config, vocab_size=config.vocab_size or corpus.vocab_size)
    _compare(config, corpus, team)
    found = _claim(config, folder, corpus, team, launched)
    run, done = _start(config, folder, corpus, team, found, stop)
    try:
        done = train_steps(run, done)
    finally:
        run.report.close()
    if done == config.steps and team.first:
        with run.method.shared():
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
        found = team.agree(lambda: checkpoint.find(folder.checkpoints, config.record(), corpus.fingerprint))
    if not launched:
        team.agree(lambda: folder.claim(config) if team.first else None)
        team.agree(lambda: _see(folder))
    return found


def _see(folder: RunFolder) -> None:
    if not folder.config.exists():
        raise InputError(f"--out {folder.root} is not the folder that rank 0 writes to; it must be a shared one")


def _start(
    config: TrainConfig, folder: RunFolder, corpus: Corpus, team: Team, found: Path | None, stop: Stop
) -> tuple[Run, int]:
    model = build(config).to(team.device)
    method = make_method(config, model, team)
    done = 0
    if found is not None:
        checkpoint.load(found, model, method.optimizer, team, method.private)
        done = checkpoint.read(found).step
    report = Report(folder, config, done, method.parameters, team.first)
    if team.first:
        print(
            f"{config.preset}: {method.parameters:,} parameters; {len(corpus.train):,} training and "
            f"{len(corpus.val):,} validation tokens; {team.world_size} x {team.device.type}; "
            + (f"going on after step {done}" if done else f"{config.steps} steps"),
            flush=True,
        )
    return Run(config, folder, team, corpus, model, method, report, stop), done


def finish(config: TrainConfig, folder: RunFolder, model: nn.Module, corpus: Corpus) -> None:
    """Save the model, the sample and the plot; print the table."""
    known = config.tokenizer != "bytes" or corpus.bytes_per_token is not None
    tokenizer = load_tokenizer(config.tokenizer, config.online) if known else None
    save_model(model, tokenizer, folder)
    if tokenizer is not None and config.sample_tokens:
        text = write_sample(model, tokenizer, config)
        folder.sample.write_text(text, encoding="utf-8")
        print(f"sample:\n{_printable(text)}\n", flush=True)
    rows = folder.read_metrics()
    summary.print_table(rows, config, count_parameters(model), corpus.bytes_per_token)
    summary.plot(rows, folder.plot, f"{config.optimizer}, {config.preset}, {config.workers} workers")
    print(f"model, metrics and plot are in {folder.root}", flush=True)


def _printable(text: str) -> str:
    """Replace characters that could control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def main() -> NoReturn:
    """Run as a worker started by demopt's own launcher."""
    place, launcher, *more = sys.argv[1:]

    def work_as_told() -> None:
        config = TrainConfig(**read_file(Path(place)), resume="resume" in more)
        work(config, True, RunFolder(Path(config.out)).stop.exists)

    be_worker(int(launcher), work_as_told)


if __name__ == "__main__":
    main()
