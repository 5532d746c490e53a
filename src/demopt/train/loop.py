"""The training loop, the same on every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from demopt.errors import DemoptError
from demopt.train import checkpoint, records
from demopt.train.config import TrainConfig
from demopt.train.data import Corpus, batch, validation_windows
from demopt.train.evaluate import loss_sum, precision, validation_loss
from demopt.train.folder import RunFolder
from demopt.train.method import Method
from demopt.train.progress import Row
from demopt.train.report import Report
from demopt.train.team import Team

PATIENCE = 10  # a run fails after this many steps in a row with a NaN or infinite loss


@dataclass(frozen=True)
class Run:
    """Everything a rank needs to train."""

    config: TrainConfig
    folder: RunFolder
    team: Team
    corpus: Corpus
    model: nn.Module
    method: Method
    report: Report
    stop_requested: Callable[[], bool]
    resumed: records.Saved | None  # what this start goes on from

    def tokens(self, step: int) -> int:
        """Return the tokens trained on in the first `step` steps; earlier ones may have had more or fewer workers."""
        before = self.resumed.tokens if self.resumed else 0
        return before + (step - (self.resumed.step if self.resumed else 0)) * self.config.tokens_per_step

    def save(self, step: int) -> None:
        """Write a checkpoint after `step` steps, unless it is already there."""
        saved = records.Saved(step, self.corpus.fingerprint, self.config.record(), self.tokens(step))
        if records.newest(self.folder.checkpoints) != records.place(self.folder.checkpoints, step):
            method = self.method
            with self.folder.writing(), method.shared(), self.team.waiting():
                self.report.sync()
                checkpoint.save(self.folder.checkpoints, saved, self.model, method.optimizer, self.team, method.private)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of step 1, 2, ...: linear warm-up, then a cosine to `final_lr` times the peak.

    Examples:
        >>> config = TrainConfig(lr=1.0, steps=110, warmup=10)
        >>> [round(learning_rate(config, step), 3) for step in (1, 10, 60, 110)]
        [0.1, 1.0, 0.55, 0.1]
    """
    assert config.lr is not None
    if step <= config.warmup:
        return config.lr * (step / config.warmup)
    part = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * part)))


def train_steps(run: Run, done: int) -> int:
    """Run the steps after `done`, all of them or until a stop is requested; return the number of steps done."""
    config, team = run.config, run.team
    windows = validation_windows(run.corpus.val, config, team.rank, team.world_size)
    bad, told = 0, False
    rows: list[Row] = []  # since the ranks last met
    for step in range(done + 1, config.steps + 1):
        began = time.perf_counter()
        evaluated = step % config.eval_every == 0 or step == config.steps
        saved = step % config.save_every == 0 or step == config.steps
        row = _one_step(run, step, evaluated)
        rows.append(row)
        meets = run.method.met or evaluated or saved  # local steps in between do not wait for the network
        stop = _mean_losses(run, rows) if meets else False
        row |= {"tokens": run.tokens(step), "step_seconds": time.perf_counter() - began}
        if not meets:
            continue
        if evaluated:
            with run.method.shared():
                row["val_loss"] = validation_loss(run.model, windows, config, team)
        if not told and run.method.route:
            told = True
            run.report.say(f"route {run.method.route}")
        for each in rows:
            with run.folder.writing():
                run.report.step(each)
            bad = 0 if math.isfinite(each["loss"]) else bad + 1
            if bad == PATIENCE:
                first = each["step"] - bad + 1
                raise DemoptError(f"the loss has been {each['loss']} since step {first}; try a lower --lr")
        rows.clear()
        if stop or saved:
            run.save(step)
        if stop:
            return step
    return config.steps


def _mean_losses(run: Run, rows: list[Row]) -> bool:
    """Replace each row's loss by the mean over the ranks, in one all-reduce; return whether a rank wants to stop."""
    *means, stop = run.team.mean([*(row["loss"] for row in rows), float(run.stop_requested())])
    for row, mean in zip(rows, means, strict=True):
        row["loss"] = mean
    return stop > 0


def _one_step(run: Run, step: int, evaluated: bool) -> Row:
    """Run forward, backward, clip and step; the loss is this rank's."""
    config, team, method = run.config, run.team, run.method
    lr = learning_rate(config, step)
    method.set_lr(lr)
    method.optimizer.zero_grad()
    loss = 0.0
    for part in range(config.accumulate):
        windows = batch(run.corpus.train, config, step, team.rank, part)
        if part == config.accumulate - 1:
            with method.waiting():
                loss += backward(method.forward, windows, config, team.device)
        else:
            with method.quiet():
                loss += backward(method.forward, windows, config, team.device)
    if config.clip:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), config.clip)
    cost = method.step(looked_at=evaluated, last=step == config.steps)
    return {"step": step, "loss": loss, "lr": lr, **vars(cost)}


def backward(forward: nn.Module, windows: NDArray[np.int64], config: TrainConfig, device: torch.device) -> float:
    """Backpropagate this pass's part of the mean loss over the step's tokens, and return that part."""
    scale = 1 / (windows[:, 1:].size * config.accumulate)
    with precision(config, device):
        loss = loss_sum(forward, windows, device) * scale
    loss.backward()
    return loss.item()
