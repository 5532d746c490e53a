"""The input of `apply` kernels: the coefficients of all ranks as levels and step codes."""

from typing import NamedTuple

from torch import Tensor


class Steps(NamedTuple):
    """Checked coefficients of some chunks, and the settings that reduce them to one direction.

    Positions and levels [W, C, K] (no level larger than `largest_level`) and step codes [W, C] are integers; `bases`
    are the integer bases of rows and columns; `reduction` is one of `core.aggregate.REDUCTIONS`.

    Shapes: W ranks, C chunks, K kept.
    """

    positions: Tensor
    levels: Tensor
    codes: Tensor
    bases: tuple[Tensor, Tensor]
    largest_level: int
    reduction: str
