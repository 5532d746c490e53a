"""The steps of W simulated workers, one worker after the other."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from demopt.exchange import SingleRank
from demopt.simulate.method import Method
from demopt.train.config import TrainConfig
from demopt.train.data import Corpus, batch
from demopt.train.evaluate import validation_loss
from demopt.train.loop import backward, learning_rate
from demopt.train.method import Cost
from demopt.train.team import Team

EVAL_BATCH = 32  # sequences per forward pass, independent of the workers' batch


@dataclass(frozen=True)
class Course:
    """Everything that W workers need to train."""

    config: TrainConfig
    corpus: Corpus
    forward: nn.Module
    method: Method
    device: torch.device


@dataclass(frozen=True)
class Taken:
    """The result of one step: mean loss, one worker's cost, and the seconds that one worker computed."""

    step: int
    loss: float
    lr: float
    cost: Cost
    worker_seconds: float

    def row(self, tokens: int) -> dict[str, Any]:
        """Return a line of metrics.jsonl."""
        return {"step": self.step, "loss": self.loss, "lr": self.lr, **vars(self.cost), "tokens": self.step * tokens}


def take_step(course: Course, step: int) -> Taken:
    """Compute each worker's gradients in turn, then take the method's step."""
    config, method = course.config, course.method
    world_size, lr = method.fleet.world_size, learning_rate(config, step)
    began, loss = time.perf_counter(), 0.0
    method.last = step == config.steps
    method.begin(lr)
    for rank in range(world_size):
        method.enter(rank)
        loss += _gradients(course, step, rank)
        method.take(rank)
    own = (time.perf_counter() - began) / world_size
    cost = method.finish()
    return Taken(step, loss / world_size, lr, cost, own + cost.optimizer_seconds + (cost.exchange_seconds or 0.0))


def evaluate(course: Course, windows: NDArray[np.int64]) -> float:
    """Return the mean validation loss per token."""
    course.method.settle()
    config = replace(course.config, batch=EVAL_BATCH)
    return validation_loss(course.forward, windows, config, Team(0, 1, course.device, SingleRank()))


def _gradients(course: Course, step: int, rank: int) -> float:
    """Compute one worker's gradients, clipped if the method clips per worker; return its mean loss."""
    config, method = course.config, course.method
    loss = 0.0
    for parameter in method.parameters:
        parameter.grad = None
    for part in range(config.accumulate):
        windows = batch(course.corpus.train, config, step, rank, part)
        loss += backward(course.forward, windows, config, course.device)
    if config.clip and method.clips_workers:
        nn.utils.clip_grad_norm_(method.parameters, config.clip)
    return loss
