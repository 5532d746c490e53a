"""The parts of `demopt train` that the laboratory uses: its text, model and schedule. No other module imports them.

The loss is computed here, because `demopt train` spreads it over real ranks.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from demopt.train.config import TrainConfig, resolve
from demopt.train.data import Corpus, batch, load_corpus, validation_windows
from demopt.train.loop import learning_rate
from demopt.train.model import build

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
    loss = _loss_sum(model, windows, device) * (1 / windows[:, 1:].size)
    loss.backward()
    return loss.item()


@torch.no_grad()
def validation_loss(model: nn.Module, windows: NDArray[np.int64], device: torch.device) -> float:
    """Returns the mean loss per token."""
    model.eval()
    parts = [windows[first : first + EVALUATED] for first in range(0, len(windows), EVALUATED)]
    total = sum(_loss_sum(model, part, device).item() for part in parts)
    model.train()
    return total / windows[:, 1:].size


def _loss_sum(model: nn.Module, windows: NDArray[np.int64], device: torch.device) -> Tensor:
    """Sums the cross-entropy of windows [batch, sequence + 1], in nats; on a GPU the model runs in bfloat16."""
    tokens = torch.from_numpy(windows).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
