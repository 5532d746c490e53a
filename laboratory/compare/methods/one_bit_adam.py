"""1-bit Adam (arXiv 2102.02888, algorithm 1): Adam first, then a fixed second moment and signs of momenta both ways."""

import torch
from torch import Tensor

from laboratory.simulation.workers import FLOAT32_BYTES, Cost, Mean, Method, SimulatedWorkers, all_reduce_bytes


class OneBitAdam(Method):
    """Dense Adam for `dense` steps; then a worker sends the signs of its momentum, and the server those of the mean.

    Both keep what the signs left out. A tensor of signs has one scale, its root mean square, as in the authors' code.

    Examples:
        >>> OneBitAdam(SimulatedWorkers(torch.nn.Linear(10, 10), world_size=4), dense=0).traffic()
        (23, 35)
    """

    bytes_rule = "ring all-reduce of float32 gradients while dense; then a bit per element and 4 bytes per tensor"

    def __init__(
        self,
        workers: SimulatedWorkers,
        dense: int = 60,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(workers)
        self.dense, self.betas, self.eps, self.weight_decay = dense, betas, eps, weight_decay
        self._step, self._lr = 0, 0.0
        self._mean = Mean(self.parameters)
        self.momenta, self.squares, self.server_errors = (self._zeros() for _ in range(3))
        self.errors = [self._zeros() for _ in range(workers.world_size)]
        self._sums = self._zeros()

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros_like(parameter) for parameter in self.parameters]

    def begin(self, lr: float) -> None:
        self._step, self._lr = self._step + 1, lr

    @torch.no_grad()
    def take(self, rank: int) -> None:
        if self._step <= self.dense:
            self._mean.add(1 / self.workers.world_size)
            return
        for number, parameter in enumerate(self.parameters):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            own = self.momenta[number].lerp(gradient, 1 - self.betas[0])
            self._sums[number].add_(_signs(own, self.errors[rank][number]))

    @torch.no_grad()
    def finish(self) -> Cost:
        if self._step <= self.dense:
            self._take_mean()
        else:
            for momentum, total, error in zip(self.momenta, self._sums, self.server_errors, strict=True):
                momentum.copy_(_signs(total / self.workers.world_size, error))
                total.zero_()
        first, second = (1 - beta ** min(self._step, self.dense) if self.dense else 1.0 for beta in self.betas)
        for parameter, momentum, square in zip(self.parameters, self.momenta, self.squares, strict=True):
            parameter.mul_(1 - self._lr * self.weight_decay)
            parameter.addcdiv_(momentum / first, (square / second).sqrt_().add_(self.eps), value=-self._lr)
        payload, both = self.traffic()
        return Cost(payload, both, both)

    def _take_mean(self) -> None:
        """Adam's moments of the mean gradient; workers clip their own."""
        self._mean.put(clip=0.0)
        for parameter, momentum, square in zip(self.parameters, self.momenta, self.squares, strict=True):
            assert parameter.grad is not None
            momentum.lerp_(parameter.grad, 1 - self.betas[0])
            square.mul_(self.betas[1]).addcmul_(parameter.grad, parameter.grad, value=1 - self.betas[1])

    def traffic(self) -> tuple[int, int]:
        """Returns, in bytes per step, a worker's message and its traffic each way."""
        if 0 < self._step <= self.dense:
            payload = FLOAT32_BYTES * self.workers.elements
        else:
            payload = sum(-(-parameter.numel() // 8) + FLOAT32_BYTES for parameter in self.parameters)
        return payload, all_reduce_bytes(payload, self.workers.world_size)


def _signs(tensor: Tensor, error: Tensor) -> Tensor:
    """Returns tensor + error as signs times its root mean square; what they leave out becomes the error."""
    whole = tensor + error
    sent = torch.where(whole < 0, -1.0, 1.0) * whole.square().mean().sqrt()
    error.copy_(whole - sent)
    return sent
