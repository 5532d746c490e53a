"""Reduces the coefficients of all ranks to one update (arXiv 2411.19870, section 3).

Shapes: W ranks, C chunks, N elements in a chunk, K kept.
"""

import torch
from torch import Tensor

REDUCTIONS = ("senders", "mean")


def aggregate(
    positions_WCK: Tensor, values_WCK: Tensor, reduction: str, out_CN: Tensor, spare_CN: Tensor | None = None
) -> None:
    """Writes the reduced coefficients to `out_CN`, dense, with zeros where no rank sent anything.

    "senders" divides each sum by the number of ranks that sent that position, "mean" by W. Ranks are added one at a
    time, in order, so that the sum has the same bits on all ranks and every device. `spare_CN`, shaped like `out_CN`,
    is overwritten and saves an allocation.

    Example:
        >>> positions = torch.tensor([[[0, 2]], [[0, 1]]])
        >>> values, out = torch.tensor([[[4.0, 2.0]], [[2.0, 6.0]]]), torch.empty(1, 4)
        >>> aggregate(positions, values, "senders", out), out
        (None, tensor([[3., 6., 2., 0.]]))
        >>> aggregate(positions, values, "mean", out), out
        (None, tensor([[3., 3., 1., 0.]]))
    """
    world_size = positions_WCK.shape[0]
    out_CN.zero_()
    for positions_CK, values_CK in zip(positions_WCK, values_WCK, strict=True):
        out_CN.scatter_add_(1, positions_CK, values_CK.to(out_CN.dtype))
    if world_size == 1:
        return
    if reduction == "mean":
        out_CN.div_(
            out_CN.new_full((1,), world_size)
        )  # a tensor: for a Python number, a GPU multiplies by its reciprocal
    else:
        _divide_by_senders(positions_WCK, out_CN, torch.empty_like(out_CN) if spare_CN is None else spare_CN)


def _divide_by_senders(positions_WCK: Tensor, out_CN: Tensor, senders_CN: Tensor) -> None:
    """Divides only at positions that a rank sent; ranks that sent the same position write the same quotient."""
    one = out_CN.new_ones(())
    senders_CN.zero_()
    for positions_CK in positions_WCK:
        senders_CN.scatter_add_(1, positions_CK, one.expand(positions_CK.shape))
    sent_CM = positions_WCK.transpose(0, 1).flatten(1)
    quotients_CM = out_CN.gather(1, sent_CM).div_(senders_CN.gather(1, sent_CM))
    out_CN.scatter_(1, sent_CM, quotients_CM)
