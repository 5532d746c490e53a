"""How the gradients of W workers become one step, on one model: the interface, and gradients that are averaged."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from demopt.exchange.wrappers import all_reduce_bytes
from demopt.train.method import FLOAT32_BYTES, Cost


@dataclass(frozen=True)
class Fleet:
    """W workers that share a model; `clip` is the limit of a gradient's norm, 0 for none.

    Example:
        >>> Fleet(nn.Linear(2, 3), world=4).elements
        9
    """

    model: nn.Module
    world: int
    clip: float = 0.0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def elements(self) -> int:
        """P, numbers that are trained."""
        return sum(parameter.numel() for parameter in self.parameters)


class Method(ABC):
    """One way to train data-parallel. Each step: `begin`, then for each worker `enter` and `take`, then `finish`.

    Between `enter(rank)` and `take(rank)` the worker's gradients are computed, into the model's parameters.
    """

    bytes_rule: ClassVar[str]  #: what a worker sends and receives, in words
    clips_workers: ClassVar[bool] = True  #: each worker clips its own gradient; otherwise the method clips their mean

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.parameters = fleet.parameters

    @abstractmethod
    def begin(self, lr: float) -> None:
        """A step begins, at this learning rate."""

    def enter(self, rank: int) -> None:  # noqa: B027 - most methods keep replicas equal
        """The model becomes worker `rank`'s, where workers' weights differ."""

    @abstractmethod
    def take(self, rank: int) -> None:
        """The gradients in the parameters are worker `rank`'s."""

    @abstractmethod
    def finish(self) -> Cost:
        """All workers' gradients have been taken: the step. `Cost` is that of one worker."""

    def settle(self) -> None:  # noqa: B027 - most methods keep replicas equal
        """The model becomes what the method would deliver now, to be evaluated."""

    def close(self) -> None:  # noqa: B027 - most methods hold nothing that must be ended
        """The run is over."""


class Mean:
    """The mean of W workers' gradients.

    Example:
        >>> parameter = nn.Parameter(torch.zeros(2))
        >>> mean = Mean([parameter], world=2)
        >>> for value in (1.0, 3.0):
        ...     parameter.grad = torch.full((2,), value)
        ...     mean.add()
        >>> mean.put(clip=0.0)
        >>> parameter.grad
        tensor([2., 2.])
    """

    def __init__(self, parameters: list[nn.Parameter], world: int) -> None:
        self._parameters, self._world = parameters, world
        self._sums = [torch.zeros_like(parameter) for parameter in parameters]

    def add(self) -> None:
        """Adds the gradients that the parameters hold, each divided by W as DistributedDataParallel does."""
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if parameter.grad is not None:
                total.add_(parameter.grad / self._world)

    def put(self, clip: float) -> None:
        """Leaves the mean, clipped, in the parameters' gradients and begins anew."""
        put_gradients(self._parameters, self._sums, clip)
        self._sums = [torch.zeros_like(parameter) for parameter in self._parameters]


def put_gradients(parameters: list[nn.Parameter], gradients: list[Tensor], clip: float) -> None:
    """Gradients for an optimizer to take; their norm at most `clip`, where that is not 0."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    if clip:
        nn.utils.clip_grad_norm_(parameters, clip)


def set_rate(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """The learning rate of all groups."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


class Averaged(Method):
    """DistributedDataParallel: the mean of all gradients, then any optimizers, the same on every worker."""

    bytes_rule = "ring all-reduce of float32 gradients: 2 (W-1)/W 4P bytes up and down"
    clips_workers = False

    def __init__(self, fleet: Fleet, optimizers: list[torch.optim.Optimizer]) -> None:
        super().__init__(fleet)
        self._optimizers = optimizers
        self._mean = Mean(self.parameters, fleet.world)

    def begin(self, lr: float) -> None:
        set_rate(self._optimizers, lr)

    def take(self, rank: int) -> None:
        del rank  # it does not matter whose they are
        self._mean.add()

    def finish(self) -> Cost:
        began = time.perf_counter()
        self._mean.put(self.fleet.clip)
        for optimizer in self._optimizers:
            optimizer.step()
        size = FLOAT32_BYTES * self.fleet.elements
        ring = all_reduce_bytes(size, self.fleet.world)
        return Cost(size, ring, ring, time.perf_counter() - began, None)
