"""torch's own optimizers on averaged gradients, as DistributedDataParallel runs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from demopt.simulate.method import Averaged, Fleet

BETAS = (0.9, 0.95)  # AdamW's, everywhere in this package


def adamw(fleet: Fleet, weight_decay: float = 0.1) -> Averaged:
    """AdamW.

    Example:
        >>> adamw(Fleet(nn.Linear(2, 2), world_size=2)).clips_workers
        False
    """
    return Averaged(fleet, [torch.optim.AdamW(fleet.parameters, betas=BETAS, weight_decay=weight_decay)])


def sgd(fleet: Fleet, momentum: float = 0.9, weight_decay: float = 0.0) -> Averaged:
    """SGD with momentum."""
    return Averaged(fleet, [torch.optim.SGD(fleet.parameters, lr=0.0, momentum=momentum, weight_decay=weight_decay)])


def muon(fleet: Fleet, momentum: float = 0.95, weight_decay: float = 0.1) -> Averaged:
    """Muon for matrices inside the model; AdamW, at the same learning rate, for embedding (tied head) and vectors."""
    embeddings = {id(layer.weight) for layer in fleet.model.modules() if isinstance(layer, nn.Embedding)}
    inside = [p for p in fleet.parameters if p.dim() == 2 and id(p) not in embeddings]
    others = [p for p in fleet.parameters if p.dim() != 2 or id(p) in embeddings]
    # torch's rule "match_rms_adamw" makes one learning rate fit both.
    how: dict[str, Any] = {"weight_decay": weight_decay, "momentum": momentum, "adjust_lr_fn": "match_rms_adamw"}
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Muon(inside, **how)] if inside else []
    if others:
        optimizers.append(torch.optim.AdamW(others, betas=BETAS, weight_decay=weight_decay))
    return Averaged(fleet, optimizers)
