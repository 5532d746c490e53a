"""Applies the coefficients of all ranks on a GPU, in one pass over the parameters: steps 6 to 8 of the algorithm.

Fuses core.exact.aggregate_steps, core.exact.inverse and core.update.sign, bit for bit (docs/exact.md), with decoupled
weight decay and the parameter update (arXiv 2411.19870, section 3).

Shapes: W ranks, C chunks, r rows and c columns of a chunk, K kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from demopt.core import exact
from demopt.core.chunk import Chunking
from demopt.kernels.steps import Steps
from demopt.kernels.triton_device import block_side
from demopt.kernels.triton_table import CODES, matrix, table

_ROWS_AT_ONCE = 16  # chunks of one row per program
_NARROW_LEVEL = 8  # up to this level, level x step (at most 31 << 3) is exact in float16

#: Precision of the inverse's two products, which are exact in both: "tf32" (tensor cores) or "ieee".
PRECISION = "tf32"


def apply(
    parameters: Sequence[Tensor],
    chunkings: Sequence[Chunking],
    steps: Steps,
    lr: float,
    weight_decay: float,
    first: int = 0,
) -> None:
    """parameters <- (1 - lr weight_decay) parameters - lr sign(U), in place, with U decoded from the steps.

    The steps hold the coefficients of chunks [first, first + C) of all the parameters' chunks; others are unchanged.

    Step codes must not be negative.
    Parameters are float32, bfloat16 or float16; the arithmetic is float32's, rounded once to the parameter's dtype.
    A zero of U counts as +1, except in chunks for which all steps are zero, where the sign is zero.
    Raises ValueError if there are too many ranks for an exact sum.
    """
    world_size, count, keep = steps.positions.shape
    guard = exact.guard_bits(world_size, steps.largest_level)
    if count == 0:
        return
    from demopt.kernels.triton_apply_programs import apply_chunks, apply_rows

    matrices = [matrix(parameter, whole) for parameter, whole in zip(parameters, chunkings, strict=True)]
    found = table(matrices, chunkings, steps.positions.device)
    r, c = chunkings[0].chunk_shape
    sent = (tensor.contiguous() for tensor in (steps.positions, steps.levels, steps.codes))
    tensors = (found.members, found.member_of_chunk, *sent, *steps.bases)
    numbers = (world_size, keep, guard, count, first, 1.0 - lr * weight_decay, float(lr))
    shared = {
        "CODE": found.code,
        "MEAN": steps.reduction == "mean",
        "BITS_C": exact.operand_bits(c),
        "PRECISION": PRECISION,
    }
    with torch.cuda.device_of(steps.positions):
        if r == 1:
            apply_rows[(-(-count // _ROWS_AT_ONCE),)](
                *tensors, *numbers, c=c, T=_ROWS_AT_ONCE, BC=block_side(c), **shared, enable_fp_fusion=False
            )
        else:
            apply_chunks[(count,)](
                *tensors, *numbers, r=r, c=c, BR=block_side(r), BC=block_side(c), BITS_R=exact.operand_bits(r),
                ALIGNED=found.aligned, WIDE=steps.largest_level > _NARROW_LEVEL, **shared, num_warps=8,
                enable_fp_fusion=False,
            )  # fmt: skip
    _write_back(parameters, matrices)


def directions(
    steps: Steps,
    out_Crc: Tensor,
) -> None:
    """Does the same as `apply`, but writes the signs to the contiguous `out_Crc`."""
    count, r, c = out_Crc.shape
    column_of_chunks = Chunking((count * r, c), (r, c), (count, 1))
    apply([out_Crc.zero_().view(-1, c)], [column_of_chunks], steps, -1.0, 0.0)


def writable(parameter: Tensor) -> bool:
    """Whether `apply` accepts the parameter; it updates a copy and copies back if the strides allow no matrix view.

    Examples:
        >>> writable(torch.zeros(4, 6, dtype=torch.bfloat16).T), writable(torch.zeros(2, dtype=torch.float64))
        (True, False)
    """
    return parameter.dtype in CODES


def _write_back(parameters: Sequence[Tensor], matrices: Sequence[Tensor | None]) -> None:
    """Copies results back to parameters whose strides, such as channels_last, allow no matrix view."""
    for parameter, worked in zip(parameters, matrices, strict=True):
        assert worked is not None
        if worked.numel() and worked.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            parameter.detach().copy_(worked.view(parameter.shape))
