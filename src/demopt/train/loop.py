"""The training loop, the same on every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from demopt.errors import DemoptError
from demopt.optim.local_demo import LocalDeMo
from demopt.train.config import TrainConfig
from demopt.train.data import Corpus, batch, validation_windows
from demopt.train.folder import Row, RunFolder
from demopt.train.method import Method
from demopt.train.model import backward, loss_sum, precision, targets
from demopt.train.report import Report
from demopt.train.share import Share
from demopt.train.team import Team

if TYPE_CHECKING:
    from demopt.train.checkpoint import Saved

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
    resumed: Saved | None  # the checkpoint that this start goes on from

    def tokens(self, step: int) -> int:
        """Returns the tokens trained on in the first `step` steps; earlier ones may have had more or fewer workers."""
        before = self.resumed.tokens if self.resumed else 0
        return before + (step - (self.resumed.step if self.resumed else 0)) * self.config.tokens_per_step

    def save(self, step: int) -> None:
        """Writes a checkpoint after `step` steps, unless it is already there."""
        from demopt.train import checkpoint  # a run in a folder needs none, and no torch.distributed

        saved = checkpoint.Saved(step, self.corpus.fingerprint, self.config.record(), self.tokens(step))
        folder = self.folder.checkpoints
        if checkpoint.newest(folder) != checkpoint.place(folder, step):
            if isinstance(self.method.optimizer, LocalDeMo):
                self.method.optimizer.flush()  # after a stop that was asked for: no round stays in flight
            with self.folder.writing(), self.method.shared(), self.team.waiting():
                self.report.sync()
                checkpoint.save(folder, saved, self.model, self.method.optimizer, self.team)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Returns the learning rate of step 1, 2, ...: linear warm-up, then a cosine to `final_lr` times the peak."""
    assert config.lr is not None
    if step <= config.warmup:
        return config.lr * (step / config.warmup)
    part = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * part)))


@torch.no_grad()
def validation_loss(forward: nn.Module, windows: NDArray[np.int64], config: TrainConfig, team: Team) -> float:
    """Returns the mean loss per token over all ranks' validation windows."""
    forward.eval()
    total = 0.0
    for first in range(0, len(windows), config.batch):
        with precision(config, team.device):
            total += loss_sum(forward, windows[first : first + config.batch], team.device).item()
    forward.train()
    summed, count = team.total([total, float(targets(windows))])
    return summed / max(1.0, count)


def train_steps(run: Run, done: int) -> int:
    """Runs the steps after `done`, all of them or until a stop is requested; returns the number of steps done."""
    config, team = run.config, run.team
    windows = validation_windows(run.corpus.val, config, team.rank, team.world_size)
    bad, told, share = 0, False, Share(config)
    share.fit({str(rank): 0.0 for rank in range(team.world_size)}, str(team.rank))
    rows: list[Row] = []  # since the ranks last met
    for step in range(done + 1, config.steps + 1):
        began = time.perf_counter()
        evaluated = step % config.eval_every == 0 or step == config.steps
        saved = step % config.save_every == 0 or step == config.steps
        row = _one_step(run, share, step, evaluated or saved)
        rows.append(row)
        meets = run.method.met or evaluated or saved  # local steps in between do not wait for the network
        stop = _meet(run, share, rows) if meets else False
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


def _meet(run: Run, share: Share, rows: list[Row]) -> bool:
    """Replaces each row's loss by the mean over the ranks, and fits their shares; whether a rank wants to stop.

    One all-reduce. A rank's loss counts by its sequences.
    """
    team, weighed = run.team, [row["loss"] * row["batch"] for row in rows]
    speeds = [share.speed if rank == team.rank else 0.0 for rank in range(team.world_size)]
    batches = [float(row["batch"]) for row in rows]
    sums = run.team.total([*weighed, *batches, *speeds, float(run.stop_requested())])
    for row, total, size in zip(rows, sums, sums[len(rows) :], strict=False):
        row["loss"] = total / size
    if not (isinstance(run.method.optimizer, LocalDeMo) and run.method.optimizer.local_steps):  # not within a round
        share.fit({str(rank): speed for rank, speed in enumerate(sums[2 * len(rows) : -1])}, str(team.rank))
    return sums[-1] > 0


def _one_step(run: Run, share: Share, step: int, looked_at: bool) -> Row:
    """Runs forward, backward, clip and step; the loss is this rank's."""
    config, team, lr = run.config, run.team, learning_rate(run.config, step)
    began, passes = time.perf_counter(), enumerate(share.passes())
    windows = [batch(run.corpus.train, config, step, team.rank, part, size) for part, size in passes]
    loss = gradient(run.method, config, team, lr, windows)
    share.measured(time.perf_counter() - began)
    if config.global_batch and isinstance(run.method.optimizer, LocalDeMo):
        run.method.optimizer.samples = share.sequences * (run.method.optimizer.local_steps + 1)
    cost = run.method.step(looked_at=looked_at, last=step == config.steps)
    return {"step": step, "loss": loss, "lr": lr, "batch": share.sequences, **cost}


def gradient(method: Method, config: TrainConfig, team: Team, lr: float, windows: Sequence[NDArray[np.int64]]) -> float:
    """Sets the learning rate, and computes a step's gradients, clipped, from its parts; returns the loss."""
    method.set_lr(lr)
    method.optimizer.zero_grad()
    loss, count = 0.0, sum(map(targets, windows))
    for number, part in enumerate(windows, 1):
        with nullcontext() if number == len(windows) else method.quiet():
            loss += backward(method.forward, part, config, team.device, count)
    if config.clip:
        torch.nn.utils.clip_grad_norm_(method.forward.parameters(), config.clip)
    return loss
