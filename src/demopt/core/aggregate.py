"""Reduces the coefficients of all ranks to one update (arXiv 2411.19870, section 3)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from demopt.core.constants import constant, places

REDUCTIONS = ("senders", "mean")


def aggregate(positions_WCK: Tensor, values_WCK: Tensor, reduction: str, out_CN: Tensor, spare_CN: Tensor) -> None:
    """Writes the reduced coefficients to `out_CN`, dense, with zeros where no rank sent anything.

    "senders" divides each sum by the number of ranks that sent that position, "mean" by W. Ranks are added one at a
    time, in order, so that the sum has the same bits on all ranks and every device. Overwrites the spare.
    """
    world_size = positions_WCK.shape[0]
    out_CN.zero_()
    for positions_CK, values_CK in zip(positions_WCK, values_WCK, strict=True):
        out_CN.scatter_add_(1, positions_CK, values_CK.to(out_CN.dtype))
    if world_size == 1:
        return
    if reduction == "mean":  # by a tensor: for a Python number, a GPU multiplies by its reciprocal
        out_CN.div_(constant((world_size,), out_CN.dtype, out_CN.device))
        return
    # Divides only at positions that a rank sent; ranks that sent the same one write the same quotient.
    senders_CN, one = spare_CN.zero_(), out_CN.new_ones(())
    for positions_CK in positions_WCK:
        senders_CN.scatter_add_(1, positions_CK, one.expand(positions_CK.shape))
    sent_CM = positions_WCK.transpose(0, 1).flatten(1)
    out_CN.scatter_(1, sent_CM, out_CN.gather(1, sent_CM).div_(senders_CN.gather(1, sent_CM)))


def aggregate_at_once(positions_WCK: Tensor, values_WCK: Tensor, reduction: str, pair_2CN: Tensor) -> None:
    """`aggregate` of whole numbers, exact in any order, in one operation. The contiguous pair's second gets counts."""
    world_size, (_, chunks, length), device = len(positions_WCK), pair_2CN.shape, pair_2CN.device
    counted = world_size > 1 and reduction != "mean"
    out, values = pair_2CN if counted else pair_2CN[:1], values_WCK.to(pair_2CN.dtype)
    starts = places(len(out) * chunks, torch.int64, device, length).view(len(out), 1, chunks, 1)
    flat_places = positions_WCK + starts  # of sums, then of counts
    if counted:
        values = torch.stack((values, constant((1,), values.dtype, device).expand_as(values)))
    flat, flat_places = out.view(-1), flat_places.flatten(1)
    flat.zero_().scatter_add_(0, flat_places.flatten(), values.flatten())
    if world_size > 1 and not counted:
        flat.div_(constant((world_size,), flat.dtype, device))
    elif counted:
        sums, divisors = flat.gather(0, flat_places.flatten()).view(2, -1)
        flat.scatter_(0, flat_places[0], sums.div_(divisors))  # ranks with the same position write the same


def aggregate_dense(values_WCN: Tensor, weights: Sequence[int], out_CN: Tensor) -> None:
    """Writes the weighted mean of all coefficients over the ranks to `out_CN`; ranks are added in order."""
    out_CN.zero_()
    for values_CN, weight in zip(values_WCN, weights, strict=True):
        out_CN.add_(values_CN.to(out_CN.dtype).mul_(weight))
    if sum(weights) > 1:  # by a tensor, as in `aggregate`
        out_CN.div_(constant((sum(weights),), out_CN.dtype, out_CN.device))
