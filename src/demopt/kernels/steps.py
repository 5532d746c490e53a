"""What kernels decode: the coefficients of all ranks, as levels and step codes."""

from typing import NamedTuple

from torch import Tensor


class Steps(NamedTuple):
    """Coefficients of some tiles, checked, and how they become one direction.

    Positions and levels [W, C, K] (no level larger than `largest_level`) and step codes [W, C] are integers; `bases`
    are the integer bases of rows and columns; `reduction` is one of core.aggregate's.

    Shapes: W ranks, C chunks (tiles), K kept.
    """

    positions: Tensor
    levels: Tensor
    codes: Tensor
    bases: tuple[Tensor, Tensor]
    largest_level: int
    reduction: str
