"""MuLoCo (arXiv 2505.23725) in 2 bits: workers that train separately, and average their moves every H steps."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from laboratory.compare.methods.averaged import muon_maker
from laboratory.simulation.workers import (
    FLOAT32_BYTES,
    Cost,
    Method,
    Rates,
    SimulatedWorkers,
    all_gather_bytes,
    copy_weights,
    trained,
)

BITS, LEVELS, RANGE = 2, 4, 6.0  # the range is in standard deviations
ERROR_DECAY = 0.9  # as published


class MuLoCo(Method):
    """Muon inside; every `every` steps SGD with Nesterov momentum takes the mean pseudo-gradient, in 2 bits each.

    With error feedback: e <- b e + pseudo-gradient; e <- e - sent. The quantiser is that of MuLoCo's code.

    Examples:
        >>> method = MuLoCo(SimulatedWorkers(torch.nn.Linear(16, 15), world_size=4), every=10, bits=2)
        >>> method.traffic()  # 255 elements: 60 and 4 bytes, and a mean and four levels for each of both tensors
        (104, 312)
    """

    bytes_rule = "every H steps an all-gather of 2 bits per element and 20 bytes per tensor: (W-1) B each way"

    def __init__(
        self,
        workers: SimulatedWorkers,
        every: int,
        bits: int = BITS,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.6,
        error_decay: float = ERROR_DECAY,
        **inner_settings: Any,
    ) -> None:
        super().__init__(workers)
        if bits != BITS:
            raise ValueError(f"bits is {bits}; give {BITS}")
        self.every, self.error_decay, self._step = every, error_decay, 0
        self.global_weights = [parameter.detach().clone() for parameter in self.parameters]
        self._models = [copy.deepcopy(workers.model) for _ in range(workers.world_size)]
        self.weights = [trained(model) for model in self._models]
        self.inner = [muon_maker(**inner_settings)(model) for model in self._models]
        self._rates = Rates([each for optimizers in self.inner for each in optimizers])
        self._outer = torch.optim.SGD(self.global_weights, outer_lr, outer_momentum, nesterov=outer_momentum > 0)
        self.errors = [[torch.zeros_like(tensor) for tensor in self.global_weights] for _ in range(workers.world_size)]

    def begin(self, lr: float) -> None:
        self._rates.set(lr)

    def model_of(self, rank: int) -> nn.Module:
        return self._models[rank]

    def take(self, rank: int) -> None:
        for optimizer in self.inner[rank]:
            optimizer.step()

    @torch.no_grad()
    def finish(self) -> Cost:
        self._step += 1
        if self._step % self.every:
            return Cost()
        for number, weight in enumerate(self.global_weights):
            sent = []
            for worker, errors in zip(self.weights, self.errors, strict=True):
                error = errors[number].mul_(self.error_decay).add_(weight - worker[number])
                places, means = quantise(error)
                sent.append(means[places].view_as(error))
                error.sub_(sent[-1])
            weight.grad = torch.stack(sent).mean(0)
        self._outer.step()
        for worker in self.weights:
            copy_weights(self.global_weights, worker)
        payload, both = self.traffic()
        return Cost(payload, both, both)

    def traffic(self) -> tuple[int, int]:
        """Returns, in bytes per round, a worker's message and its traffic each way."""
        levels = FLOAT32_BYTES * (1 + LEVELS)
        payload = sum(-(-parameter.numel() * BITS // 8) + levels for parameter in self.parameters)
        return payload, all_gather_bytes(payload, self.workers.world_size)

    def prepare_evaluation(self) -> Cost:
        copy_weights(self.global_weights, self.parameters)
        return Cost()


@torch.no_grad()
def quantise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each element's interval [n], and the mean of each interval's elements [4].

    Four intervals of 1.5 standard deviations about the tensor's mean.

    Examples:
        >>> places, means = quantise(torch.tensor([0.0, 0.0, 0.0, 1.0]))
        >>> means[places].tolist()
        [0.0, 0.0, 0.0, 1.0]
    """
    flat = tensor.flatten()
    width = RANGE * flat.std() / LEVELS
    if len(flat) < 2 or not width > 0:
        return torch.zeros(len(flat), dtype=torch.int64), flat.mean().expand(LEVELS).clone()
    places = ((flat - flat.mean()) / width + LEVELS // 2).round().clamp(0, LEVELS - 1).long()
    sums = flat.new_zeros(LEVELS).index_add_(0, places, flat)
    return places, sums / places.bincount(minlength=LEVELS).clamp(min=1)
