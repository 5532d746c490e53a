"""The model's loss on a batch and over the validation text."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from demopt.train.config import TrainConfig
from demopt.train.team import Team


def precision(config: TrainConfig, device: torch.device) -> AbstractContextManager[None]:
    """Return the autocast context: bfloat16 if configured, or by default on a GPU."""
    wanted = config.precision == "bfloat16" or (config.precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted)


def loss_sum(forward: nn.Module, windows: NDArray[np.int64], device: torch.device) -> Tensor:
    """Sum the cross-entropy of windows [batch, sequence + 1], in nats."""
    tokens = torch.from_numpy(windows).to(device)
    logits = forward(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


@torch.no_grad()
def validation_loss(forward: nn.Module, windows: NDArray[np.int64], config: TrainConfig, team: Team) -> float:
    """Return the mean loss per token over all ranks' validation windows."""
    forward.eval()
    total = 0.0
    for first in range(0, len(windows), config.batch):
        with precision(config, team.device):
            total += loss_sum(forward, windows[first : first + config.batch], team.device).item()
    forward.train()
    summed, count = team.total([total, float(windows[:, 1:].size)])
    return summed / count
