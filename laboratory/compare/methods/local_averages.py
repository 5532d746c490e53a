"""Workers that train separately and average weights every few steps: local SGD (FedAvg), DiLoCo, MuLoCo.

DiLoCo is arXiv 2311.08105, MuLoCo arXiv 2505.23725.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from laboratory.compare.methods.averaged import Maker, adamw_maker, muon_maker
from laboratory.simulation.workers import (
    FLOAT32_BYTES,
    Cost,
    Method,
    Rates,
    SimulatedWorkers,
    all_gather_bytes,
    all_reduce_bytes,
    copy_weights,
    trained,
)

ERROR_DECAY = 0.9  # of MuLoCo in 2 bits, as published
Outer = Callable[[list[Tensor]], torch.optim.Optimizer]


class LocalAverages(Method):
    """Steps `inner` on each worker's local weights; every `every` steps `outer` takes the mean pseudo-gradient.

    Examples:
        >>> workers = SimulatedWorkers(torch.nn.Linear(2, 2), world_size=3)
        >>> local_sgd(workers, every=4).every
        4
    """

    bytes_rule = "every H steps a ring all-reduce of float32 weights: 2 (W-1)/W 4P bytes each way"

    def __init__(self, workers: SimulatedWorkers, every: int, inner: Maker, outer: Outer) -> None:
        super().__init__(workers)
        self.every, self._step = every, 0
        self.global_weights = [parameter.detach().clone() for parameter in self.parameters]
        self._models = [copy.deepcopy(workers.model) for _ in range(workers.world_size)]
        self.weights = [trained(model) for model in self._models]
        self.inner = [inner(model) for model in self._models]
        self._rates = Rates([each for optimizers in self.inner for each in optimizers])
        self._outer = outer(self.global_weights)

    def begin(self, lr: float) -> None:
        self._rates.set(lr)

    def model_of(self, rank: int) -> nn.Module:
        return self._models[rank]

    def take(self, rank: int) -> None:
        for optimizer in self.inner[rank]:
            optimizer.step()

    def finish(self) -> Cost:
        self._step += 1
        if self._step % self.every:
            return Cost()
        for number, weight in enumerate(self.global_weights):
            differences = [weight - worker[number].detach() for worker in self.weights]
            sent = [self.sent(rank, number, each) for rank, each in enumerate(differences)]
            weight.grad = torch.stack(sent).mean(0)
        self._outer.step()
        for worker in self.weights:
            copy_weights(self.global_weights, worker)
        payload, both = self.traffic()
        return Cost(payload, both, both)

    def sent(self, rank: int, number: int, pseudo_gradient: Tensor) -> Tensor:
        """Returns the part of a worker's pseudo-gradient of a parameter that arrives: here, all of it."""
        del rank, number
        return pseudo_gradient

    def traffic(self) -> tuple[int, int]:
        """Returns, in bytes per round, a worker's message and its traffic each way."""
        size = FLOAT32_BYTES * self.workers.elements
        return size, all_reduce_bytes(size, self.workers.world_size)

    def prepare_evaluation(self) -> Cost:
        copy_weights(self.global_weights, self.parameters)
        return Cost()


def local_sgd(workers: SimulatedWorkers, every: int = 10, momentum: float = 0.9) -> LocalAverages:
    """Local SGD (FedAvg): replaces the workers' weights by their mean."""
    inner: Maker = lambda model: [torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)]  # noqa: E731
    return LocalAverages(workers, every, inner, lambda weights: torch.optim.SGD(weights, lr=1.0))


def diloco(
    workers: SimulatedWorkers,
    every: int = 10,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    weight_decay: float = 0.1,
) -> LocalAverages:
    """DiLoCo: AdamW inside, SGD with Nesterov momentum on the mean pseudo-gradient outside."""
    return LocalAverages(workers, every, adamw_maker(weight_decay), _nesterov(outer_lr, outer_momentum))


def muloco(
    workers: SimulatedWorkers,
    every: int = 30,
    bits: int = 32,
    outer_lr: float = 0.8,
    outer_momentum: float = 0.9,
    error_decay: float = ERROR_DECAY,
    momentum: float = 0.95,
    **inner_settings: Any,
) -> LocalAverages:
    """MuLoCo (arXiv 2505.23725): Muon inside, SGD with Nesterov momentum outside; float32 or 2 bits.

    Examples:
        >>> muloco(SimulatedWorkers(torch.nn.Linear(2, 2), world_size=3)).every
        30
    """
    inner, outer = muon_maker(momentum, **inner_settings), _nesterov(outer_lr, outer_momentum)
    if bits == QuantisedAverages.BITS:
        return QuantisedAverages(workers, every, inner, outer, error_decay)
    return LocalAverages(workers, every, inner, outer)


class QuantisedAverages(LocalAverages):
    """LocalAverages in 2 bits per element, with error feedback: e <- b e + pseudo-gradient; e <- e - sent.

    The statistical quantiser of MuLoCo's code: four intervals of 1.5 standard deviations about each tensor's mean; an
    element becomes the mean of its interval.

    Examples:
        >>> method = muloco(SimulatedWorkers(torch.nn.Linear(16, 15), world_size=4), bits=2)
        >>> method.traffic()  # 255 elements: 60 and 4 bytes, and a mean and four levels for each of both tensors
        (104, 312)
    """

    BITS, LEVELS, RANGE = 2, 4, 6.0  # the range is in standard deviations

    bytes_rule = "every H steps an all-gather of 2 bits per element and 20 bytes per tensor: (W-1) B each way"

    def __init__(self, workers: SimulatedWorkers, every: int, inner: Maker, outer: Outer, error_decay: float) -> None:
        super().__init__(workers, every, inner, outer)
        self.error_decay = error_decay
        self._errors = [[torch.zeros_like(tensor) for tensor in self.global_weights] for _ in range(workers.world_size)]

    def sent(self, rank: int, number: int, pseudo_gradient: Tensor) -> Tensor:
        error = self._errors[rank][number].mul_(self.error_decay).add_(pseudo_gradient)
        places, means = quantise(error)
        decoded = means[places].view_as(error)
        error.sub_(decoded)
        return decoded

    def traffic(self) -> tuple[int, int]:
        levels = FLOAT32_BYTES * (1 + self.LEVELS)
        payload = sum(-(-parameter.numel() * self.BITS // 8) + levels for parameter in self.parameters)
        return payload, all_gather_bytes(payload, self.workers.world_size)


@torch.no_grad()
def quantise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each element's interval [n], and the mean of each interval's elements [4].

    The intervals lie about the tensor's mean.

    Examples:
        >>> places, means = quantise(torch.tensor([0.0, 0.0, 0.0, 1.0]))
        >>> means[places].tolist()
        [0.0, 0.0, 0.0, 1.0]
    """
    flat, levels = tensor.flatten(), QuantisedAverages.LEVELS
    width = QuantisedAverages.RANGE * flat.std() / levels
    if len(flat) < 2 or not width > 0:
        return torch.zeros(len(flat), dtype=torch.int64), flat.mean().expand(levels).clone()
    places = ((flat - flat.mean()) / width + levels // 2).round().clamp(0, levels - 1).long()
    sums = flat.new_zeros(levels).index_add_(0, places, flat)
    return places, sums / places.bincount(minlength=levels).clamp(min=1)


def _nesterov(lr: float, momentum: float) -> Outer:
    return lambda weights: torch.optim.SGD(weights, lr=lr, momentum=momentum, nesterov=momentum > 0)
