"""GaLore (Zhao et al., arXiv 2403.03507) as a compressor: workers send projected gradients; Adam runs on them."""

import torch
from torch import Tensor, nn

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


class GaLore(Method):
    """Projects each matrix's shorter side: R = P^T G, P its `rank` leading singular vectors, new every `gap` steps.

    This projects the mean gradient rather than each worker's: projection is linear, so the results are equal up to
    rounding. Vectors and small matrices are sent dense, to the same AdamW. X <- X - lr `scale` P Adam(R).

    Examples:
        >>> galore = GaLore(SimulatedWorkers(nn.Linear(32, 64), world_size=2), rank=4, gap=2)
        >>> galore.floats(refresh=False), galore.floats(refresh=True)
        (320, 2112)
    """

    bytes_rule = (
        "ring all-reduce of float32: 4 rank max(n,m) bytes per matrix n x m, but 4 n m every gap steps; the rest dense"
    )
    clips_workers = False

    def __init__(
        self, workers: SimulatedWorkers, rank: int = 8, gap: int = 50, scale: float = 0.25, weight_decay: float = 0.1
    ) -> None:
        super().__init__(workers)
        self.rank, self.gap, self.scale, self.weight_decay = rank, gap, scale, weight_decay
        self.matrices = [p for p in self.parameters if p.dim() == 2 and min(p.shape) > rank]
        chosen = {id(p) for p in self.matrices}
        self.rest = [p for p in self.parameters if id(p) not in chosen]
        # AdamW steps these small stand-ins. Each starts a step at zero, so it ends at -lr times AdamW's direction.
        self.low = [nn.Parameter(p.new_zeros(rank, max(p.shape))) for p in self.matrices]
        self.bases: list[Tensor] = []
        self._mean = Mean(self.parameters)
        groups = [{"params": self.low, "weight_decay": 0.0}, {"params": self.rest, "weight_decay": weight_decay}]
        self._optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1.0, betas=BETAS)
        self._rates = Rates([self._optimizer])
        self._step, self._lr = 0, 0.0

    def floats(self, refresh: bool) -> int:
        """Returns the number of floats that a step sums over the workers."""
        small = sum(p.numel() for p in self.rest)
        return small + sum((p if refresh else low).numel() for p, low in zip(self.matrices, self.low, strict=True))

    def begin(self, lr: float) -> None:
        self._lr = lr
        self._rates.set(lr)

    def take(self, rank: int) -> None:
        self._mean.add(self.workers.share(rank))

    @torch.no_grad()
    def finish(self) -> Cost:
        refresh = self._step % self.gap == 0
        self._mean.put(clip=0.0)
        gradients = [_wide(_gradient(p)) for p in self.matrices]
        if refresh:
            self.bases = [torch.linalg.svd(g, full_matrices=False).U[:, : self.rank] for g in gradients]
        projected = [basis.T @ g for basis, g in zip(self.bases, gradients, strict=True)]
        put_gradients([*self.low, *self.rest], [*projected, *map(_gradient, self.rest)], self.workers.clip)
        self._optimizer.step()
        for parameter, basis, low in zip(self.matrices, self.bases, self.low, strict=True):
            parameter.mul_(1 - self._lr * self.weight_decay)
            _wide(parameter).add_(basis @ low, alpha=self.scale)
            low.zero_()
        self._step += 1
        payload = FLOAT32_BYTES * self.floats(refresh)
        ring = all_reduce_bytes(payload, self.workers.world_size)
        return Cost(payload, ring, ring)


def _wide(matrix: Tensor) -> Tensor:
    """Returns a view of the matrix with its shorter side first."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
