"""PowerSGD (Vogels, Karimireddy, Jaggi, arXiv 1905.13727): sends gradients as two thin factors, with error feedback.

torch's hook needs DistributedDataParallel and one process per worker. This is the same algorithm, step for step, with
torch's orthogonalisation, for W workers in one process. A test compares it with the hook on real gloo ranks.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

from demopt.compare.methods.ddp import BETAS
from demopt.exchange.wrappers import all_reduce_bytes
from demopt.simulate.method import Fleet, Mean, Method, put_gradients, set_rate
from demopt.train.method import FLOAT32_BYTES, Cost

COMPRESSED_ENOUGH = 2  # torch's min_compression_rate: matrices that save less are sent dense


class PowerSGD(Method):
    """Rank-`rank` factors P (n x rank) and Q (m x rank) of each matrix n x m, warm-started; AdamW takes P Q^T.

    Examples:
        >>> len(PowerSGD(Fleet(torch.nn.Linear(64, 64), world_size=2), rank=4).matrices)
        1
    """

    bytes_rule = (
        "ring all-reduce of float32 factors: 4 rank (n+m) bytes a matrix n x m instead of 4 n m; the rest dense"
    )
    clips_workers = False

    def __init__(self, fleet: Fleet, rank: int = 4, weight_decay: float = 0.1) -> None:
        super().__init__(fleet)
        self.matrices = [p for p in self.parameters if _worth_it(p, rank)]
        chosen = {id(p) for p in self.matrices}
        self.rest = [p for p in self.parameters if id(p) not in chosen]
        self.inputs = [
            [torch.zeros_like(p) for p in self.matrices] for _ in range(fleet.world_size)
        ]  # error, plus gradient
        random = torch.Generator().manual_seed(0)
        self.factors = [torch.randn(p.shape[1], rank, generator=random).to(p.device) for p in self.matrices]
        self._mean = Mean(self.rest, fleet.world_size)
        self._optimizer = torch.optim.AdamW(self.parameters, betas=BETAS, weight_decay=weight_decay)
        floats = sum(rank * sum(p.shape) for p in self.matrices) + sum(p.numel() for p in self.rest)
        self._payload = FLOAT32_BYTES * floats

    def begin(self, lr: float) -> None:
        set_rate([self._optimizer], lr)

    def take(self, rank: int) -> None:
        self._mean.add()
        for parameter, matrix in zip(self.matrices, self.inputs[rank], strict=True):
            if parameter.grad is not None:
                matrix.add_(parameter.grad)

    def finish(self) -> Cost:
        began = time.perf_counter()
        self._mean.put(clip=0.0)
        for number, parameter in enumerate(self.matrices):
            parameter.grad = self._approximate(number)
        put_gradients(self.parameters, [_gradient(p) for p in self.parameters], self.fleet.clip)
        self._optimizer.step()
        ring = all_reduce_bytes(self._payload, self.fleet.world_size)
        return Cost(self._payload, ring, ring, time.perf_counter() - began, None)

    @torch.no_grad()
    def _approximate(self, number: int) -> Tensor:
        """Returns the mean of all workers' matrices at rank r; each worker keeps the error of its own matrix."""
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
