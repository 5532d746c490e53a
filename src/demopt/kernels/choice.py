"""Which kernels work on a bucket."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from demopt.core.chunk import Tiling
from demopt.kernels import cpu, triton_kernels
from demopt.kernels.steps import Steps


class Kernels(Protocol):
    """What a module of kernels offers; each function is defined by what core does in its place.

    Shapes: W ranks, C chunks of a bucket (r rows, c columns), K kept.
    """

    def readable(self, gradient: Tensor | None) -> bool:
        """Whether `extract` can read a gradient where it lies."""

    def writable(self, parameter: Tensor) -> bool:
        """Whether `apply` can update a parameter where it lies."""

    def extract(
        self,
        gradients: Sequence[Tensor | None],
        tilings: Sequence[Tiling],
        momentum_Crc: Tensor,
        bases: tuple[Tensor, Tensor],
        decay: float,
        scale: float,
        keep: int,
    ) -> tuple[Tensor, Tensor]:
        """`transform.accumulate`, then `select.strongest`: positions and values [C, K]."""

    def apply(
        self,
        parameters: Sequence[Tensor],
        tilings: Sequence[Tiling],
        steps: Steps,
        lr: float,
        weight_decay: float,
        first: int = 0,
    ) -> None:
        """`exact.aggregate_steps`, `exact.inverse`, `update.sign` and the update of tiles [first, first + C)."""

    def directions(
        self,
        steps: Steps,
        out_Crc: Tensor,
    ) -> None:
        """As `apply`, but the signs themselves."""


def kernels_for(tile: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """The kernels that cover buckets of such tiles, if any.

    Example:
        >>> kernels_for((64, 64), torch.float64, torch.device("cpu")) is None
        True
    """
    for kernels in (cpu, triton_kernels):
        if kernels.covers(tile, dtype, device):
            return kernels
    return None
