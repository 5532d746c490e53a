"""W simulated workers, the interface of a method that trains them, and gradient averaging."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Optimizer = torch.optim.Optimizer
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class SimulatedWorkers:
    """W workers that train `model`; `clip` limits the gradient norm, 0 for no limit.

    Examples:
        >>> SimulatedWorkers(nn.Linear(2, 3), world_size=4).elements
        9
    """

    model: nn.Module
    world_size: int
    clip: float = 0.0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of `model` that train."""
        return trained(self.model)

    @property
    def elements(self) -> int:
        """P, the number of elements that train."""
        return sum(parameter.numel() for parameter in self.parameters)


@dataclass(frozen=True)
class Cost:
    """The bytes of a step for one worker."""

    payload_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))


class Method(ABC):
    """A data-parallel training method. Each step: `begin`, then `take` for each worker, then `finish`.

    Before `take(rank)` the caller computes the worker's gradients into the parameters of `model_of(rank)`.
    """

    bytes_rule: ClassVar[str]  #: the bytes per worker, in words
    clips_workers: ClassVar[bool] = True  #: each worker clips its gradient; otherwise the method clips their mean
    last = False  #: the step that has begun is the run's last: no update may stay with only one worker

    def __init__(self, workers: SimulatedWorkers) -> None:
        self.workers = workers
        self.parameters = workers.parameters

    @abstractmethod
    def begin(self, lr: float) -> None:
        """Begins a step with this learning rate."""

    def model_of(self, rank: int) -> nn.Module:
        """Returns worker `rank`'s model: one for all workers, unless their weights differ."""
        del rank
        return self.workers.model

    @abstractmethod
    def take(self, rank: int) -> None:
        """Takes the gradients of worker `rank`."""

    @abstractmethod
    def finish(self) -> Cost:
        """Takes the step after all workers' gradients were taken."""

    def state(self) -> dict[str, Any] | None:
        """Returns all that `load` needs to go on; None if this step, or this method, has no such state."""
        return None

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, of the same method at the same settings."""
        raise NotImplementedError(f"{type(self).__name__} has no state")

    def prepare_evaluation(self) -> Cost:
        """Gives `workers.model` the weights to evaluate; returns the cost of updates that were in flight."""
        return Cost()

    def close(self) -> None:  # noqa: B027 - most methods hold nothing that must be closed
        """Releases resources when the run has finished."""


class Rates:
    """The learning rates of new optimizers, as factors on the rate of a step.

    Examples:
        >>> optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
        >>> Rates([optimizer]).set(0.1)
        >>> optimizer.param_groups[0]["lr"]
        0.05
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])  # as torch's schedulers do

    def set(self, lr: float) -> None:
        """Sets the learning rate of all groups."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["initial_lr"]


class Averaged(Method):
    """DistributedDataParallel: averages all gradients, then steps optimizers whose rates are factors (`Rates`).

    Examples:
        >>> layer = nn.Linear(2, 2)
        >>> method = Averaged(SimulatedWorkers(layer, 2), [torch.optim.SGD(layer.parameters(), lr=1.0)])
        >>> method.finish().sent_bytes
        24
    """

    bytes_rule = "ring all-reduce of float32 gradients: 2 (W-1)/W 4P bytes each way"
    clips_workers = False

    def __init__(self, workers: SimulatedWorkers, optimizers: list[Optimizer]) -> None:
        super().__init__(workers)
        self.optimizers = optimizers
        self._rates, self._means = Rates(optimizers), [torch.zeros_like(parameter) for parameter in self.parameters]

    def begin(self, lr: float) -> None:
        self._rates.set(lr)

    def take(self, rank: int) -> None:
        del rank
        for parameter, mean in zip(self.parameters, self._means, strict=True):
            if parameter.grad is not None:
                mean.add_(parameter.grad, alpha=1 / self.workers.world_size)

    def finish(self) -> Cost:
        for parameter, mean in zip(self.parameters, self._means, strict=True):
            parameter.grad = mean.clone()
            mean.zero_()
        if self.workers.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.workers.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        size = FLOAT32_BYTES * self.workers.elements
        traffic = all_reduce_bytes(size, self.workers.world_size)
        return Cost(size, traffic, traffic)

    def state(self) -> dict[str, Any] | None:
        return {"model": self.workers.model.state_dict(), "optimizers": [each.state_dict() for each in self.optimizers]}

    def load(self, state: dict[str, Any]) -> None:
        self.workers.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


@torch.no_grad()
def copy_weights(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    """Overwrites each target with its source."""
    for one, other in zip(source, target, strict=True):
        other.copy_(one)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that train."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# The bytes that each rank sends and receives in a collective, by the rules of `demopt.exchange.Meter`


def all_gather_bytes(size: int, world_size: int) -> int:
    """Returns the bytes of an all-gather of `size` bytes per rank.

    Examples:
        >>> all_gather_bytes(size=1000, world_size=4)
        3000
    """
    return (world_size - 1) * size


def all_reduce_bytes(size: int, world_size: int) -> int:
    """Returns the bytes of a ring all-reduce of `size` bytes, rounded up.

    Examples:
        >>> all_reduce_bytes(size=1000, world_size=4)
        1500
    """
    return -(-2 * (world_size - 1) * size // world_size)
