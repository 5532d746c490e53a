"""Selects the kernels for a chunk group."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from demopt.core.chunk import Chunking
from demopt.kernels import cpu, triton_kernels
from demopt.kernels.steps import Steps


class Kernels(Protocol):
    """The interface of a module of kernels; the core functions define what each of them computes.

    Shapes: W ranks, C chunks of a chunk group (r rows, c columns), K kept.
    """

    def readable(self, gradient: Tensor | None) -> bool:
        """Whether `extract` accepts a gradient as it is."""

    def writable(self, parameter: Tensor) -> bool:
        """Whether `apply` accepts a parameter as it is."""

    def extract(
        self,
        gradients: Sequence[Tensor | None],
        chunkings: Sequence[Chunking],
        momentum_Crc: Tensor,
        bases: tuple[Tensor, Tensor],
        decay: float,
        scale: float,
        keep: int,
    ) -> tuple[Tensor, Tensor]:
        """Does `transform.accumulate`, then `select.strongest`; returns positions and values [C, K]."""

    def apply(
        self,
        parameters: Sequence[Tensor],
        chunkings: Sequence[Chunking],
        steps: Steps,
        lr: float,
        weight_decay: float,
        first: int = 0,
    ) -> None:
        """Does `exact.aggregate_steps`, `exact.inverse` and `update.sign`, and updates chunks [first, first + C)."""

    def directions(
        self,
        steps: Steps,
        out_Crc: Tensor,
    ) -> None:
        """Writes the signs to `out_Crc` instead of applying them."""


def kernels_for(wanted: str, chunk_shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """Returns the kernels that cover chunk groups with these chunks, dtype and device, or None.

    `wanted` is "auto" (compiled kernels on CPUs), "triton" (also Triton's on GPUs) or "torch" (None).

    Examples:
        >>> kernels_for("auto", (64, 64), torch.float64, torch.device("cpu")) is None
        True
    """
    offered = {"auto": (cpu,), "triton": (cpu, triton_kernels), "torch": ()}[wanted]
    return next((kernels for kernels in offered if kernels.covers(chunk_shape, dtype, device)), None)
