"""torch's own optimizers on averaged gradients, as DistributedDataParallel runs them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from demopt.optim.groups import split_matrices
from demopt.simulate.method import Averaged, Fleet
from demopt.train.method import build_muon, shares_of

Optimizer = torch.optim.Optimizer
#: Makes the optimizers of weights in the order of `Fleet.parameters`.
Maker = Callable[[list[nn.Parameter]], list[Optimizer]]

BETAS = (0.9, 0.95)  # AdamW's, everywhere in this package


def adamw(fleet: Fleet, weight_decay: float = 0.1) -> Averaged:
    """AdamW.

    Examples:
        >>> adamw(Fleet(nn.Linear(2, 2), world_size=2)).clips_workers
        False
    """
    return Averaged(fleet, [torch.optim.AdamW(fleet.parameters, betas=BETAS, weight_decay=weight_decay)])


def sgd(fleet: Fleet, momentum: float = 0.9, weight_decay: float = 0.0) -> Averaged:
    """SGD with momentum."""
    return Averaged(fleet, [torch.optim.SGD(fleet.parameters, lr=0.0, momentum=momentum, weight_decay=weight_decay)])


def muon(
    fleet: Fleet,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    others_share: float = 1.0,
) -> Averaged:
    """Muon for matrices inside the model; AdamW for embedding (tied head) and vectors."""
    optimizers = muon_maker(fleet, momentum, weight_decay, others_share)(fleet.parameters)
    return Averaged(fleet, optimizers, shares_of(optimizers))


def muon_maker(fleet: Fleet, momentum: float, weight_decay: float, others_share: float = 1.0) -> Maker:
    """Returns a maker of Muon and AdamW: the same ones for the mean gradient and for a worker's own.

    torch's rule "match_rms_adamw" makes one learning rate fit both; `others_share` is AdamW's share of it. The rates
    of the optimizers are such factors.

    Examples:
        >>> fleet = Fleet(nn.Linear(2, 2), world_size=1)
        >>> [type(each).__name__ for each in muon_maker(fleet, 0.95, 0.1)(fleet.parameters)]
        ['Float32Muon', 'AdamW']
    """
    matrices, _ = split_matrices(fleet.model)
    chosen = set(map(id, matrices))
    inside = [id(parameter) in chosen for parameter in fleet.parameters]

    def make(weights: list[nn.Parameter]) -> list[Optimizer]:
        matrices = [weight for weight, is_inside in zip(weights, inside, strict=True) if is_inside]
        others = [weight for weight, is_inside in zip(weights, inside, strict=True) if not is_inside]
        optimizers: list[Optimizer] = [build_muon(matrices, 1.0, momentum, weight_decay)] if matrices else []
        if others:
            optimizers.append(torch.optim.AdamW(others, lr=others_share, betas=BETAS, weight_decay=weight_decay))
        return optimizers

    return make


def adamw_maker(weight_decay: float) -> Maker:
    """Returns a maker of AdamW for all parameters.

    Examples:
        >>> [type(each).__name__ for each in adamw_maker(0.1)([nn.Parameter(torch.ones(2))])]
        ['AdamW']
    """
    return lambda weights: [torch.optim.AdamW(weights, lr=1.0, betas=BETAS, weight_decay=weight_decay)]


class Shares:
    """The rates of optimizers as they were made: factors on the rate of a step.

    Examples:
        >>> optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
        >>> Shares([optimizer]).set(0.1)
        >>> optimizer.param_groups[0]["lr"]
        0.05
    """

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self._pairs = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]

    def set(self, lr: float) -> None:
        """Sets the learning rate of all groups."""
        for group, share in self._pairs:
            group["lr"] = lr * share
