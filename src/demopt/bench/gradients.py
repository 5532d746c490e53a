"""Synthetic gradients, new before every step.

They are normal noise whose scale varies between parameters over two orders of magnitude, as it does between layers.
Constant gradients would make every momentum a multiple of them, and top-k's work too regular. The noise is drawn once
into a pool and copied from another place at each step, so it costs one copy and the memory of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

POOL = (1 << 22) + 15  # elements; odd, so that rows of parameters and of the pool do not line up
_STRIDE = 1_000_003  # elements; spreads the places of ranks and rounds over the pool


class Gradients:
    """Sets the `.grad` of parameters, by rank and round, in buffers allocated once.

    Examples:
        >>> parameter = Parameter(torch.zeros(2, 3))
        >>> gradients = Gradients([parameter], pool=101)
        >>> gradients.fill(rank=0, turn=0)
        >>> first = parameter.grad.clone()
        >>> gradients.fill(rank=0, turn=1)
        >>> bool((parameter.grad == first).all())
        False
    """

    def __init__(self, parameters: Sequence[Parameter], pool: int = POOL) -> None:
        self._parameters = parameters
        draw = torch.Generator().manual_seed(0)
        self._pool = torch.randn(pool, generator=draw).to(parameters[0].device)
        self._scales = (10 ** (-2 * torch.rand(len(parameters), generator=draw) - 1)).tolist()
        self._buffers = [torch.empty_like(parameter) for parameter in parameters]

    def fill(self, rank: int, turn: int) -> None:
        """Set the gradients of a rank in a round, also where an optimizer has replaced `.grad` by its own."""
        place = (rank * 7919 + turn * 104_729) * _STRIDE % len(self._pool)
        for parameter, buffer, scale in zip(self._parameters, self._buffers, self._scales, strict=True):
            _copy_around(buffer.view(-1), self._pool, place)
            buffer.mul_(scale)
            place = (place + buffer.numel()) % len(self._pool)
            parameter.grad = buffer


def _copy_around(target: Tensor, pool: Tensor, place: int) -> None:
    """Fill target from the pool, starting at `place` and wrapping around."""
    done = 0
    while done < target.numel():
        count = min(target.numel() - done, len(pool) - place)
        target[done : done + count].copy_(pool[place : place + count])
        done, place = done + count, 0
