"""The parts of `demopt train` that the laboratory uses: text, model and schedule. No other module here imports them.

The mean loss is computed here, because `demopt train` spreads it over real ranks.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from demopt.train.config import TrainConfig, resolve
from demopt.train.data import Corpus, batch, load_corpus, validation_windows
from demopt.train.loop import learning_rate
from demopt.train.model import build, loss_sum

__all__ = [
    "Corpus",
    "TrainConfig",
    "backward",
    "batch",
    "build",
    "learning_rate",
    "load_corpus",
    "resolve",
    "validation_loss",
    "validation_windows",
]

EVALUATED = 32  # sequences per forward pass of an evaluation


def backward(model: nn.Module, windows: NDArray[np.int64], device: torch.device) -> float:
    """Backpropagates the mean loss per token of windows [batch, sequence + 1], and returns it."""
    loss = loss_sum(model, windows, TrainConfig(), device) * (1 / windows[:, 1:].size)
    loss.backward()
    return loss.item()


@torch.no_grad()
def validation_loss(model: nn.Module, windows: NDArray[np.int64], device: torch.device) -> float:
    """Returns the mean loss per token."""
    model.eval()
    parts = [windows[first : first + EVALUATED] for first in range(0, len(windows), EVALUATED)]
    total = sum(loss_sum(model, part, TrainConfig(), device).item() for part in parts)
    model.train()
    return total / windows[:, 1:].size
