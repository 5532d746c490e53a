"""Sends some elements of each worker's accumulated momentum: the largest (Deep Gradient Compression), or random ones.

Deep Gradient Compression is Lin et al., arXiv 1712.01887, sections 3.1 and 3.2: momentum correction, local clipping and
momentum factor masking. Its density warm-up is left out: runs here are shorter than the paper's.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from laboratory.simulation.workers import (
    FLOAT32_BYTES,
    Cost,
    Method,
    SimulatedWorkers,
    all_gather_bytes,
    all_reduce_bytes,
)

INDEX_BYTES = 4


class Sparse(Method):
    """U <- m U + G; V <- V + U; sends V at `positions` and zeroes U and V there; X <- X - lr times the mean sent."""

    def __init__(self, workers: SimulatedWorkers, density: float = 0.01, momentum: float = 0.9) -> None:
        super().__init__(workers)
        self.momentum, self._lr, self._step = momentum, 0.0, 0
        self.kept = [max(1, round(density * parameter.numel())) for parameter in self.parameters]
        flat = [parameter.detach().reshape(-1) for parameter in self.parameters]
        self.momenta = [[torch.zeros_like(tensor) for tensor in flat] for _ in range(workers.world_size)]
        self.unsent = [[torch.zeros_like(tensor) for tensor in flat] for _ in range(workers.world_size)]
        self._sums = [torch.zeros_like(tensor) for tensor in flat]

    @abstractmethod
    def positions(self, number: int, unsent: Tensor) -> Tensor:
        """Returns the elements of parameter `number` that a worker sends."""

    @abstractmethod
    def traffic(self) -> tuple[int, int]:
        """Returns, in bytes per step, a worker's message and its traffic each way."""

    def begin(self, lr: float) -> None:
        self._lr = lr

    @torch.no_grad()
    def take(self, rank: int) -> None:
        for number, parameter in enumerate(self.parameters):
            momentum, unsent = self.momenta[rank][number], self.unsent[rank][number]
            momentum.mul_(self.momentum)
            if parameter.grad is not None:
                momentum.add_(parameter.grad.reshape(-1))
            unsent.add_(momentum)
            chosen = self.positions(number, unsent)
            self._sums[number].index_add_(0, chosen, unsent[chosen])
            momentum[chosen] = 0
            unsent[chosen] = 0

    @torch.no_grad()
    def finish(self) -> Cost:
        for parameter, total in zip(self.parameters, self._sums, strict=True):
            parameter.add_(total.view_as(parameter), alpha=-self._lr / self.workers.world_size)
            total.zero_()
        self._step += 1
        payload, both = self.traffic()
        return Cost(payload, both, both)


class DGC(Sparse):
    """Deep Gradient Compression: each worker sends its largest elements.

    Examples:
        >>> DGC(SimulatedWorkers(torch.nn.Linear(10, 10), world_size=4), density=0.1).traffic()
        (88, 264)
    """

    bytes_rule = "all-gather of 8 bytes (index and float32) per kept element: (W-1) B each way"

    def positions(self, number: int, unsent: Tensor) -> Tensor:
        """Returns the positions of largest magnitude."""
        return unsent.abs().topk(self.kept[number], sorted=False).indices

    def traffic(self) -> tuple[int, int]:
        """Counts indices and values, sent to every other worker."""
        payload = (INDEX_BYTES + FLOAT32_BYTES) * sum(self.kept)
        return payload, all_gather_bytes(payload, self.workers.world_size)


class RandomK(Sparse):
    """Random-K: all workers draw the same positions from a shared seed, so that only values travel.

    Examples:
        >>> RandomK(SimulatedWorkers(torch.nn.Linear(10, 10), world_size=4), density=0.1).traffic()
        (44, 66)
    """

    bytes_rule = "ring all-reduce of 4 bytes per kept element, no indices: 2 (W-1)/W B each way"

    def positions(self, number: int, unsent: Tensor) -> Tensor:
        """Draws new positions for each step and parameter, without repetition."""
        seed = self._step * len(self.parameters) + number
        order = torch.randperm(unsent.numel(), generator=torch.Generator().manual_seed(seed))
        return order[: self.kept[number]].to(unsent.device)

    def traffic(self) -> tuple[int, int]:
        """Counts values alone, in a ring all-reduce."""
        payload = FLOAT32_BYTES * sum(self.kept)
        return payload, all_reduce_bytes(payload, self.workers.world_size)
