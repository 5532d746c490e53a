"""A reduction that ranks share: each reduces one part of the values, and hands it to all.

Shapes: W ranks, E elements.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from demopt.exchange.interface import Exchange


def reduce_in_parts(values_E: Tensor, exchange: Exchange, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the reduced values [E], the same bits on every rank; `reduce` makes [n] of [W, n], of the same dtype.

    Examples:
        >>> from demopt.exchange import SingleRank
        >>> reduce_in_parts(torch.ones(3), SingleRank(), lambda rows: rows.sum(0))
        tensor([1., 1., 1.])
    """
    ranks, count, dtype = exchange.world_size, values_E.numel(), values_E.dtype
    rows = torch.nn.functional.pad(values_E, (0, -count % ranks)).view(ranks, -1)
    mine = reduce(exchange.all_to_all(rows.view(torch.uint8)).view(dtype))
    return exchange.all_gather(mine.view(torch.uint8)).view(dtype).view(-1)[:count]
