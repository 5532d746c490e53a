"""PowerSGD (Vogels, Karimireddy, Jaggi, arXiv 1905.13727): sends gradients as two thin factors, with error feedback.

torch's hook needs DistributedDataParallel and one process per worker. This is the same algorithm, step for step, with
torch's orthogonalisation, for W workers in one process. A test compares it with the hook on real gloo ranks.
"""

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

from laboratory.compare.methods.averaged import BETAS
from laboratory.simulation.workers import (
    FLOAT32_BYTES,
    Cost,
    Mean,
    Method,
    Rates,
    SimulatedWorkers,
    all_reduce_bytes,
    put_gradients,
)

COMPRESSED_ENOUGH = 2  # torch's min_compression_rate: matrices that save less are sent dense


class PowerSGD(Method):
    """Rank-`rank` factors P (n x rank) and Q (m x rank) of each matrix n x m, warm-started; AdamW takes P Q^T.

    Examples:
        >>> len(PowerSGD(SimulatedWorkers(torch.nn.Linear(64, 64), world_size=2), rank=4).matrices)
        1
    """

    bytes_rule = (
        "ring all-reduce of float32 factors: 4 rank (n+m) bytes per matrix n x m instead of 4 n m; the rest dense"
    )
    clips_workers = False

    def __init__(self, workers: SimulatedWorkers, rank: int = 4, weight_decay: float = 0.1) -> None:
        super().__init__(workers)
        self.matrices = [p for p in self.parameters if _worth_it(p, rank)]
        chosen = {id(p) for p in self.matrices}
        self.rest = [p for p in self.parameters if id(p) not in chosen]
        self.inputs = [
            [torch.zeros_like(p) for p in self.matrices] for _ in range(workers.world_size)
        ]  # error, plus gradient
        random = torch.Generator().manual_seed(0)
        self.factors = [torch.randn(p.shape[1], rank, generator=random).to(p.device) for p in self.matrices]
        self._mean = Mean(self.rest)
        self._optimizer = torch.optim.AdamW(self.parameters, lr=1.0, betas=BETAS, weight_decay=weight_decay)
        self._rates = Rates([self._optimizer])
        floats = sum(rank * sum(p.shape) for p in self.matrices) + sum(p.numel() for p in self.rest)
        self._payload = FLOAT32_BYTES * floats

    def begin(self, lr: float) -> None:
        self._rates.set(lr)

    def take(self, rank: int) -> None:
        self._mean.add(self.workers.share(rank))
        for parameter, matrix in zip(self.matrices, self.inputs[rank], strict=True):
            if parameter.grad is not None:
                matrix.add_(parameter.grad)

    def finish(self) -> Cost:
        self._mean.put(clip=0.0)
        for number, parameter in enumerate(self.matrices):
            parameter.grad = self._approximate(number)
        put_gradients(self.parameters, [_gradient(p) for p in self.parameters], self.workers.clip)
        self._optimizer.step()
        ring = all_reduce_bytes(self._payload, self.workers.world_size)
        return Cost(self._payload, ring, ring)

    @torch.no_grad()
    def _approximate(self, number: int) -> Tensor:
        """Returns the mean of all workers' matrices at rank r; each worker keeps the error of its matrix."""
        inputs, factor = [worker[number] for worker in self.inputs], self.factors[number]
        _orthogonalize(factor.unsqueeze(0))
        left = torch.stack([matrix @ factor for matrix in inputs]).sum(0)
        _orthogonalize(left.unsqueeze(0))
        right = torch.stack([matrix.T @ left for matrix in inputs]).mean(0)
        decoded = left @ right.T
        for matrix in inputs:
            matrix.sub_(decoded)
        self.factors[number] = right
        return decoded


def _worth_it(parameter: Tensor, rank: int) -> bool:
    return (
        parameter.dim() == 2
        and min(parameter.shape) >= rank
        and sum(parameter.shape) * rank * COMPRESSED_ENOUGH < parameter.numel()
    )


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
