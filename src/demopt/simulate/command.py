"""`demopt simulate`: the settings and the outputs of `demopt train`, with all workers on one device."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from demopt.errors import DemoptError
from demopt.simulate.demo import DeMoWorkers
from demopt.simulate.local import LocalWorkers
from demopt.simulate.loop import Course, evaluate, take_step
from demopt.simulate.method import Averaged, Fleet, Method
from demopt.train import hub
from demopt.train.config import InputError, TrainConfig
from demopt.train.data import Corpus, load_corpus, validation_windows, with_vocabulary
from demopt.train.finish import check_outputs, finish
from demopt.train.folder import RunFolder
from demopt.train.loop import PATIENCE
from demopt.train.method import adamw, check_settings, inner_optimizers, shares_of
from demopt.train.model import build, resolve
from demopt.train.report import Report
from demopt.train.team import cores, pick_device

MOST_WORKERS = 1024  # each worker is a thread during the exchange


def simulate(config: TrainConfig) -> int:
    """Run `demopt simulate`; return the exit code."""
    if config.resume:
        raise InputError("--resume: simulate keeps no checkpoints; start anew with --overwrite")
    for name in ("overlap", "delay"):
        if config.optimizer == "demo" and getattr(config, name):
            raise InputError(
                f"--{name}: workers that are simulated in turn can neither overlap nor delay their exchange"
            )
    if config.workers > MOST_WORKERS:
        raise InputError(f"--workers is {config.workers}, wanted at most {MOST_WORKERS}")
    config = resolve(config)
    check_settings(config)
    device = pick_device(config.device, 0, 1)
    folder = RunFolder(Path(config.out))
    folder.refuse_if_taken(config)
    corpus = load_corpus(config)
    config = with_vocabulary(config, corpus)
    check_outputs(config, corpus)
    torch.set_num_threads(config.threads or cores())
    with folder.held():
        folder.claim(config)
        _run(config, folder, corpus, device)
    hub.push(config, folder)
    return 0


def make_method(config: TrainConfig, fleet: Fleet) -> Method:
    """Build the simulated workers that a config asks for.

    Examples:
        >>> config = resolve(TrainConfig(optimizer="adamw"))
        >>> type(make_method(config, Fleet(torch.nn.Linear(2, 2), world_size=2))).__name__
        'Averaged'
    """
    if config.optimizer == "demo":
        return DeMoWorkers(fleet, config.rule("adamw"), **config.demo_settings())
    if config.optimizer == "local":
        return LocalWorkers(fleet, lambda _: inner_optimizers(fleet.model, config), **config.local_settings())
    if config.optimizer == "muon":
        inner = inner_optimizers(fleet.model, config)
        return Averaged(fleet, inner, shares_of(inner))
    return Averaged(fleet, [adamw(fleet.parameters, config)])


def _run(config: TrainConfig, folder: RunFolder, corpus: Corpus, device: torch.device) -> None:
    model = build(config).to(device)
    fleet = Fleet(model, config.workers, config.clip)
    forward: Any = torch.compile(model) if config.compile else model
    course = Course(config, corpus, forward, make_method(config, fleet), device)
    with folder.writing():
        report = Report(folder, config, 0, fleet.elements, first=True)
    report.say(
        f"{config.preset}: {fleet.elements:,} parameters; {len(corpus.train):,} training and {len(corpus.val):,} "
        f"validation tokens; {config.workers} workers simulated on one {device.type}; {config.steps} steps"
    )
    try:
        with report:
            _steps(course, report, folder)
    finally:
        course.method.close()
    with folder.writing():
        finish(config, folder, model, corpus)


def _steps(course: Course, report: Report, folder: RunFolder) -> None:
    config = course.config
    windows = validation_windows(course.corpus.val, config, 0, 1)
    tokens = config.tokens_per_step
    bad = 0
    for step in range(1, config.steps + 1):
        began = time.perf_counter()
        taken = take_step(course, step)
        row = taken.row(tokens) | {"step_seconds": time.perf_counter() - began}
        if step % config.eval_every == 0 or step == config.steps:
            row["val_loss"] = evaluate(course, windows)
        with folder.writing():
            report.step(row)
        bad = 0 if math.isfinite(taken.loss) else bad + 1
        if bad == PATIENCE:
            raise DemoptError(f"the loss has been {taken.loss} since step {step - bad + 1}; try a lower --lr")
