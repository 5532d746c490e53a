"""Workers that train separately and average weights every few steps: local SGD (FedAvg), DiLoCo (arXiv 2311.08105)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from demopt.compare.methods.ddp import BETAS
from demopt.exchange.wrappers import all_reduce_bytes
from demopt.simulate.method import Fleet, Method, set_rate
from demopt.train.method import FLOAT32_BYTES, Cost

Maker = Callable[[list[Tensor]], torch.optim.Optimizer]


class Local(Method):
    """Gives each worker its own weights and `inner` optimizer; every `every` steps `outer` takes their mean drift.

    Example:
        >>> fleet = Fleet(torch.nn.Linear(2, 2), world_size=3)
        >>> local_sgd(fleet, every=4).every
        4
    """

    bytes_rule = "every H steps a ring all-reduce of float32 weights: 2 (W-1)/W 4P bytes up and down, 0 in between"

    def __init__(self, fleet: Fleet, every: int, inner: Maker, outer: Maker) -> None:
        super().__init__(fleet)
        self.every, self._step = every, 0
        self.shared = [parameter.detach().clone() for parameter in self.parameters]
        self.weights = [[tensor.clone() for tensor in self.shared] for _ in range(fleet.world_size)]
        # All step the model's tensors, into which `enter` copies a worker's weights; each has its own state.
        self._inner = [inner([*self.parameters]) for _ in range(fleet.world_size)]
        self._outer = outer(self.shared)

    def begin(self, lr: float) -> None:
        set_rate(self._inner, lr)

    def enter(self, rank: int) -> None:
        _copy(self.weights[rank], self.parameters)

    def take(self, rank: int) -> None:
        self._inner[rank].step()
        _copy(self.parameters, self.weights[rank])

    def finish(self) -> Cost:
        began, size = time.perf_counter(), FLOAT32_BYTES * self.fleet.elements
        self._step += 1
        if self._step % self.every:
            return Cost(0, 0, 0, 0.0, None)
        for number, shared in enumerate(self.shared):
            shared.grad = shared - torch.stack([worker[number] for worker in self.weights]).mean(0)
        self._outer.step()
        for worker in self.weights:
            _copy(self.shared, worker)
        ring = all_reduce_bytes(size, self.fleet.world_size)
        return Cost(size, ring, ring, time.perf_counter() - began, None)

    def settle(self) -> None:
        _copy(self.shared, self.parameters)


def local_sgd(fleet: Fleet, every: int = 10, momentum: float = 0.9) -> Local:
    """Local SGD (FedAvg): replaces the workers' weights by their mean."""
    inner: Maker = lambda weights: torch.optim.SGD(weights, lr=0.0, momentum=momentum)  # noqa: E731
    return Local(fleet, every, inner, lambda weights: torch.optim.SGD(weights, lr=1.0))


def diloco(
    fleet: Fleet, every: int = 10, outer_lr: float = 0.7, outer_momentum: float = 0.9, weight_decay: float = 0.1
) -> Local:
    """DiLoCo: AdamW inside, SGD with Nesterov momentum on the mean drift outside."""
    return Local(
        fleet,
        every,
        lambda weights: torch.optim.AdamW(weights, betas=BETAS, weight_decay=weight_decay),
        lambda weights: torch.optim.SGD(weights, lr=outer_lr, momentum=outer_momentum, nesterov=True),
    )


@torch.no_grad()
def _copy(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one)
