"""The steps of W simulated workers, one worker after the other."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from laboratory.simulation.workers import Cost, Method
from laboratory.training import (
    Corpus,
    TrainConfig,
    backward,
    batch,
    learning_rate,
    validation_loss,
    validation_windows,
)


@dataclass(frozen=True)
class Experiment:
    """A training run of simulated workers: the same model, text, batches and schedule as `demopt train`."""

    config: TrainConfig
    corpus: Corpus
    method: Method
    device: torch.device

    @cached_property
    def windows(self) -> NDArray[np.int64]:
        """The validation windows, the same in every evaluation."""
        return validation_windows(self.corpus.val, self.config, 0, 1)

    def step(self, number: int) -> tuple[float, Cost]:
        """Computes each worker's gradients in turn, then takes the method's step; returns the mean loss, and the cost.

        Steps count from 1.
        """
        method, world_size, loss = self.method, self.method.workers.world_size, 0.0
        method.last = number == self.config.steps
        method.begin(learning_rate(self.config, number))
        for rank in range(world_size):
            loss += self._gradients(number, rank)
            method.take(rank)
        return loss / world_size, method.finish()

    def evaluate(self) -> tuple[float, Cost]:
        """Returns the mean validation loss per token, and the cost of updates that the evaluation cut short."""
        cost = self.method.prepare_evaluation()
        return validation_loss(self.method.workers.model, self.windows, self.device), cost

    def _gradients(self, step: int, rank: int) -> float:
        """Computes one worker's gradients, clipped if the method clips per worker; returns its mean loss."""
        model, clip = self.method.model_of(rank), self.method.workers.clip
        windows = batch(self.corpus.train, self.config, step, rank)
        model.zero_grad()
        loss = backward(model, windows, self.device)
        if clip and self.method.clips_workers:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        return loss
