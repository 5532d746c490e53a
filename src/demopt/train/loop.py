"""The training loop, the same on every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from demopt.errors import DemoptError
from demopt.train import checkpoint
from demopt.train.config import TrainConfig
from demopt.train.data import Corpus, batch, validation_windows
from demopt.train.evaluate import loss_sum, precision, validation_loss
from demopt.train.folder import RunFolder
from demopt.train.method import Method
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

    def save(self, step: int) -> None:
        """Write a checkpoint after `step` steps, unless it is already there."""
        saved = checkpoint.Saved(step, self.corpus.fingerprint, self.config.record())
        if checkpoint.newest(self.folder.checkpoints) != self.folder.checkpoints / f"step-{step:08d}":
            self.report.sync()
            method = self.method
            with method.shared():
                checkpoint.save(self.folder.checkpoints, saved, self.model, method.optimizer, self.team, method.private)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of step 1, 2, ...: linear warm-up, then a cosine to `final_lr` times the peak.

    Example:
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
    tokens_per_step = config.batch * config.accumulate * team.world_size * (config.sequence or 0)
    bad, told = 0, False
    for step in range(done + 1, config.steps + 1):
        began = time.perf_counter()
        evaluated = step % config.eval_every == 0 or step == config.steps
        row = _one_step(run, step, evaluated)
        stop = row.pop("stop")
        row |= {"tokens": step * tokens_per_step, "step_seconds": time.perf_counter() - began}
        if evaluated:
            with run.method.shared():
                row["val_loss"] = validation_loss(run.model, windows, config, team)
        if not told and run.method.route:
            told = True
            run.report.say(f"route {run.method.route}")
        run.report.step(row)
        bad = 0 if math.isfinite(row["loss"]) else bad + 1
        if bad == PATIENCE:
            raise DemoptError(f"the loss has been {row['loss']} since step {step - bad + 1}; try a lower --lr")
        if stop or step % config.save_every == 0 or step == config.steps:
            run.save(step)
        if stop:
            return step
    return config.steps


def _one_step(run: Run, step: int, evaluated: bool) -> dict[str, Any]:
    """Run forward, backward, clip and step, then one small all-reduce of the loss and the stop request."""
    config, team, method = run.config, run.team, run.method
    lr = learning_rate(config, step)
    method.set_lr(lr)
    method.optimizer.zero_grad()
    loss = 0.0
    for part in range(config.accumulate):
        windows = batch(run.corpus.train, config, step, team.rank, part)
        if part == config.accumulate - 1:
            loss += backward(method.forward, windows, config, team.device)
        else:
            with method.quiet():
                loss += backward(method.forward, windows, config, team.device)
    if config.clip:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), config.clip)
    cost = method.step(looked_at=evaluated, last=step == config.steps)
    mean_loss, stop = team.mean([loss, float(run.stop_requested())])
    return {"step": step, "loss": mean_loss, "lr": lr, **vars(cost), "stop": stop > 0}


def backward(forward: nn.Module, windows: NDArray[np.int64], config: TrainConfig, device: torch.device) -> float:
    """Backpropagate this pass's part of the mean loss over the step's tokens, and return that part."""
    scale = 1 / (windows[:, 1:].size * config.accumulate)
    with precision(config, device):
        loss = loss_sum(forward, windows, device) * scale
    loss.backward()
    return loss.item()
