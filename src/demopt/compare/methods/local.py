"""Workers that train separately and average weights every few steps: local SGD (FedAvg), DiLoCo, MuLoCo.

DiLoCo is arXiv 2311.08105, MuLoCo arXiv 2505.23725.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from demopt.compare.methods.ddp import Maker, Shares, adamw_maker, muon_maker
from demopt.exchange.wrappers import all_gather_bytes, all_reduce_bytes
from demopt.simulate.method import Fleet, Method
from demopt.train.method import FLOAT32_BYTES, Cost

Outer = Callable[[list[Tensor]], torch.optim.Optimizer]


class Local(Method):
    """Gives each worker its own weights and `inner` optimizer; every `every` steps `outer` takes their mean drift.

    Examples:
        >>> fleet = Fleet(torch.nn.Linear(2, 2), world_size=3)
        >>> local_sgd(fleet, every=4).every
        4
    """

    bytes_rule = "every H steps a ring all-reduce of float32 weights: 2 (W-1)/W 4P bytes up and down, 0 in between"

    def __init__(self, fleet: Fleet, every: int, inner: Maker, outer: Outer) -> None:
        super().__init__(fleet)
        self.every, self._step = every, 0
        self.shared = [parameter.detach().clone() for parameter in self.parameters]
        self.weights = [[tensor.clone() for tensor in self.shared] for _ in range(fleet.world_size)]
        # All step the model's tensors, into which `enter` copies a worker's weights; each has its own state.
        self._inner = [inner(self.parameters) for _ in range(fleet.world_size)]
        self._shares = Shares([each for optimizers in self._inner for each in optimizers])
        self._outer = outer(self.shared)

    def begin(self, lr: float) -> None:
        self._shares.set(lr)

    def enter(self, rank: int) -> None:
        _copy(self.weights[rank], self.parameters)

    def take(self, rank: int) -> None:
        for optimizer in self._inner[rank]:
            optimizer.step()
        _copy(self.parameters, self.weights[rank])

    def finish(self) -> Cost:
        began = time.perf_counter()
        self._step += 1
        if self._step % self.every:
            return Cost(0, 0, 0, 0.0, None)
        for number, shared in enumerate(self.shared):
            shared.grad = torch.stack(
                [self.sent(rank, number, shared - worker[number]) for rank, worker in enumerate(self.weights)]
            ).mean(0)
        self._outer.step()
        for worker in self.weights:
            _copy(self.shared, worker)
        payload, both = self.traffic()
        return Cost(payload, both, both, time.perf_counter() - began, None)

    def sent(self, rank: int, number: int, drift: Tensor) -> Tensor:
        """Returns what arrives of the drift of a worker's parameter: here, all of it."""
        del rank, number
        return drift

    def traffic(self) -> tuple[int, int]:
        """Returns, in bytes a round, a worker's message and what it sends; it receives as much."""
        size = FLOAT32_BYTES * self.fleet.elements
        return size, all_reduce_bytes(size, self.fleet.world_size)

    def settle(self) -> None:
        _copy(self.shared, self.parameters)


def local_sgd(fleet: Fleet, every: int = 10, momentum: float = 0.9) -> Local:
    """Local SGD (FedAvg): replaces the workers' weights by their mean."""
    inner: Maker = lambda weights: [torch.optim.SGD(weights, lr=1.0, momentum=momentum)]  # noqa: E731
    return Local(fleet, every, inner, lambda weights: torch.optim.SGD(weights, lr=1.0))


def diloco(
    fleet: Fleet, every: int = 10, outer_lr: float = 0.7, outer_momentum: float = 0.9, weight_decay: float = 0.1
) -> Local:
    """DiLoCo: AdamW inside, SGD with Nesterov momentum on the mean drift outside."""
    return Local(fleet, every, adamw_maker(weight_decay), _nesterov(outer_lr, outer_momentum))


def muloco(
    fleet: Fleet,
    every: int = 30,
    bits: int = 32,
    outer_lr: float = 0.8,
    outer_momentum: float = 0.9,
    error_decay: float = 0.9,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
) -> Local:
    """MuLoCo (arXiv 2505.23725): Muon inside, SGD with Nesterov momentum outside; the drift in float32 or 2 bits.

    Examples:
        >>> muloco(Fleet(torch.nn.Linear(2, 2), world_size=3)).every
        30
    """
    inner, outer = muon_maker(fleet, momentum, weight_decay), _nesterov(outer_lr, outer_momentum)
    if bits == QuantisedLocal.BITS:
        return QuantisedLocal(fleet, every, inner, outer, error_decay)
    if bits != 8 * FLOAT32_BYTES:
        raise ValueError(f"bits is {bits}, wanted 32 or {QuantisedLocal.BITS}")
    return Local(fleet, every, inner, outer)


class QuantisedLocal(Local):
    """Local, whose drifts travel in 2 bits an element, with error feedback: e <- b e + drift; e <- e - sent.

    The statistical quantiser of MuLoCo's code: four intervals of 1.5 standard deviations about each tensor's mean; an
    element becomes the mean of its interval.

    Examples:
        >>> method = muloco(Fleet(torch.nn.Linear(16, 15), world_size=4), bits=2)
        >>> method.traffic()  # 255 elements: 60 and 4 bytes, and a mean and four levels for each of both tensors
        (104, 312)
    """

    BITS, LEVELS, RANGE = 2, 4, 6.0  # the range is in standard deviations

    bytes_rule = "every H steps an all-gather of 2 bits an element and 20 bytes a tensor: (W-1) B up and down"

    def __init__(self, fleet: Fleet, every: int, inner: Maker, outer: Outer, error_decay: float) -> None:
        super().__init__(fleet, every, inner, outer)
        self.error_decay = error_decay
        self._errors = [[torch.zeros_like(tensor) for tensor in self.shared] for _ in range(fleet.world_size)]

    def sent(self, rank: int, number: int, drift: Tensor) -> Tensor:
        error = self._errors[rank][number].mul_(self.error_decay).add_(drift)
        decoded = quantised(error, self.LEVELS, self.RANGE)
        error.sub_(decoded)
        return decoded

    def traffic(self) -> tuple[int, int]:
        told = FLOAT32_BYTES * (1 + self.LEVELS)
        payload = sum(-(-parameter.numel() * self.BITS // 8) + told for parameter in self.parameters)
        return payload, all_gather_bytes(payload, self.fleet.world_size)


@torch.no_grad()
def quantised(tensor: Tensor, levels: int, range_: float) -> Tensor:
    """Returns each element as the mean of those in its interval; the intervals lie about the tensor's mean.

    Examples:
        >>> quantised(torch.tensor([0.0, 0.0, 0.0, 1.0]), 4, 6.0).tolist()
        [0.0, 0.0, 0.0, 1.0]
    """
    width = range_ * tensor.std() / levels
    if tensor.numel() < 2 or not width > 0:
        return tensor.mean().expand_as(tensor).clone()
    place = ((tensor - tensor.mean()) / width + levels // 2).round().clamp(0, levels - 1).long().flatten()
    sums = tensor.new_zeros(levels).index_add_(0, place, tensor.flatten())
    counts = tensor.new_zeros(levels).index_add_(0, place, torch.ones_like(tensor).flatten())
    return (sums / counts.clamp(min=1))[place].view_as(tensor)


def _nesterov(lr: float, momentum: float) -> Outer:
    return lambda weights: torch.optim.SGD(weights, lr=lr, momentum=momentum, nesterov=momentum > 0)


@torch.no_grad()
def _copy(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one)
