"""How the gradients of W workers become one step on one model: the interface, and gradient averaging."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from demopt.exchange.wrappers import all_reduce_bytes
from demopt.train.method import FLOAT32_BYTES, Cost


@dataclass(frozen=True)
class Fleet:
    """W workers that share a model; `clip` limits the gradient norm, 0 for no limit.

    Examples:
        >>> Fleet(nn.Linear(2, 3), world_size=4).elements
        9
    """

    model: nn.Module
    world_size: int
    clip: float = 0.0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def elements(self) -> int:
        """P, the number of trained elements."""
        return sum(parameter.numel() for parameter in self.parameters)


class Method(ABC):
    """A data-parallel training method. Each step: `begin`, then for each worker `enter` and `take`, then `finish`.

    Between `enter(rank)` and `take(rank)` the caller computes the worker's gradients into the model's parameters.
    """

    bytes_rule: ClassVar[str]  #: what a worker sends and receives, in words
    clips_workers: ClassVar[bool] = True  #: each worker clips its own gradient; otherwise the method clips their mean
    last = False  #: the step that has begun is the run's last: nothing may stay with a worker alone

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.parameters = fleet.parameters

    @abstractmethod
    def begin(self, lr: float) -> None:
        """Begin a step with this learning rate."""

    def enter(self, rank: int) -> None:  # noqa: B027 - most methods keep replicas equal
        """Load worker `rank`'s weights into the model, if workers' weights differ."""

    @abstractmethod
    def take(self, rank: int) -> None:
        """Take the gradients in the parameters as worker `rank`'s."""

    @abstractmethod
    def finish(self) -> Cost:
        """Take the step after all workers' gradients were taken; return one worker's cost."""

    def settle(self) -> None:  # noqa: B027 - most methods keep replicas equal
        """Load the weights that the method would deliver now into the model, for evaluation."""

    def close(self) -> None:  # noqa: B027 - most methods hold nothing that must be closed
        """Release resources when the run has finished."""


class Mean:
    """The mean of W workers' gradients.

    Examples:
        >>> parameter = nn.Parameter(torch.zeros(2))
        >>> mean = Mean([parameter], world_size=2)
        >>> for value in (1.0, 3.0):
        ...     parameter.grad = torch.full((2,), value)
        ...     mean.add()
        >>> mean.put(clip=0.0)
        >>> parameter.grad
        tensor([2., 2.])
    """

    def __init__(self, parameters: list[nn.Parameter], world_size: int) -> None:
        self._parameters, self._world_size = parameters, world_size
        self._sums = [torch.zeros_like(parameter) for parameter in parameters]

    def add(self) -> None:
        """Add the parameters' gradients, each divided by W as in DistributedDataParallel."""
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if parameter.grad is not None:
                total.add_(parameter.grad / self._world_size)

    def put(self, clip: float) -> None:
        """Put the mean, clipped, into the parameters' gradients and reset the sum."""
        put_gradients(self._parameters, self._sums, clip)
        self._sums = [torch.zeros_like(parameter) for parameter in self._parameters]


def put_gradients(parameters: list[nn.Parameter], gradients: list[Tensor], clip: float) -> None:
    """Set the parameters' gradients and clip their norm to `clip`, unless it is 0."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    if clip:
        nn.utils.clip_grad_norm_(parameters, clip)


def set_rate(optimizers: list[torch.optim.Optimizer], lr: float, shares: Sequence[float] = ()) -> None:
    """Set the learning rate of all groups, times the share of each, if they have any."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, share in zip(groups, shares or [1.0] * len(groups), strict=True):
        group["lr"] = lr * share


class Averaged(Method):
    """DistributedDataParallel: averages all gradients, then steps any optimizers, the same on every worker.

    `shares`: a factor on the learning rate for each of their parameter groups, in order.
    """

    bytes_rule = "ring all-reduce of float32 gradients: 2 (W-1)/W 4P bytes up and down"
    clips_workers = False

    def __init__(self, fleet: Fleet, optimizers: list[torch.optim.Optimizer], shares: Sequence[float] = ()) -> None:
        super().__init__(fleet)
        self._optimizers, self._shares = optimizers, shares
        self._mean = Mean(self.parameters, fleet.world_size)

    def begin(self, lr: float) -> None:
        set_rate(self._optimizers, lr, self._shares)

    def take(self, rank: int) -> None:
        del rank  # the mean does not depend on it
        self._mean.add()

    def finish(self) -> Cost:
        began = time.perf_counter()
        self._mean.put(self.fleet.clip)
        for optimizer in self._optimizers:
            optimizer.step()
        size = FLOAT32_BYTES * self.fleet.elements
        ring = all_reduce_bytes(size, self.fleet.world_size)
        return Cost(size, ring, ring, time.perf_counter() - began, None)
