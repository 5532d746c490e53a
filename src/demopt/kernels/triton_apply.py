"""Coefficients of all ranks to parameters on a GPU, in one pass over the parameters: steps 6 to 8 of the algorithm.

It fuses core.exact.aggregate_steps, core.exact.inverse and core.update.sign, bit for bit (docs/exact.md), with the
decoupled weight decay and the step itself (arXiv 2411.19870, section 3).

Shapes: W ranks, C tiles, r rows and c columns of a tile, K kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from demopt.core import exact
from demopt.core.chunk import Tiling
from demopt.kernels.triton_device import LONGEST_SIDE, block_side, runs_on
from demopt.kernels.triton_table import CODES, matrix, table

_SHORT_TILES = 16  # of one row, that a program works on
_NARROW_LEVEL = 8  # up to here, a level times a step (at most 31 << 3) is exact in float16

#: Of the two products of the inverse, which are exact in either: "tf32" (tensor cores) or "ieee".
PRECISION = "tf32"


def covers(tile: tuple[int, int], keep: int, transform: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `apply` takes parameters of a dtype, K of tiles of these sides, and an exact transform, on a device.

    Not the identity: its zeros are not ties.

    Example:
        >>> covers((64, 64), 32, "dct", torch.float32, torch.device("cpu"))
        False
    """
    fits = max(tile) <= LONGEST_SIDE and 1 <= keep <= tile[0] * tile[1]
    exactly = transform in exact.TRANSFORMS and transform != "identity"
    return fits and exactly and dtype in CODES and runs_on(device)


def apply(
    parameters: Sequence[Tensor],
    tilings: Sequence[Tiling],
    positions_WCK: Tensor,
    levels_WCK: Tensor,
    codes_WC: Tensor,
    bases: tuple[Tensor, Tensor],
    largest_level: int,
    reduction: str,
    lr: float,
    weight_decay: float,
    first: int = 0,
) -> None:
    """parameters <- (1 - lr weight_decay) parameters - lr sign(U), in place, U from the integer `bases`.

    The coefficients are those of tiles [first, first + C) of all the parameters' tiles; the others stay as they are.

    Positions, levels (none larger than `largest_level`) and step codes are integers; codes are not negative.
    Parameters are float32, bfloat16 or float16; the arithmetic is float32's, rounded once to the parameter's dtype.
    A zero of U counts as +1, except in chunks to which no rank sent anything, where the sign is zero.
    ValueError where so many ranks are summed that the sum may not be exact.
    """
    world, count, keep = positions_WCK.shape
    guard = exact.guard_bits(world, largest_level)
    if count == 0:
        return
    from demopt.kernels.triton_apply_programs import apply_rows, apply_tiles

    matrices = [matrix(parameter, whole) for parameter, whole in zip(parameters, tilings, strict=True)]
    found = table(matrices, tilings, positions_WCK.device)
    r, c = tilings[0].tile
    positions, levels, codes = positions_WCK.contiguous(), levels_WCK.contiguous(), codes_WC.contiguous()
    tensors = (found.members, found.member_of_tile, positions, levels, codes, *bases)
    numbers = (world, keep, guard, count, first, 1.0 - lr * weight_decay, float(lr))
    shared = {"CODE": found.code, "MEAN": reduction == "mean", "BITS_C": exact.operand_bits(c), "PRECISION": PRECISION}
    with torch.cuda.device_of(positions_WCK):
        if r == 1:
            apply_rows[(-(-count // _SHORT_TILES),)](
                *tensors, *numbers, c=c, T=_SHORT_TILES, BC=block_side(c), **shared, enable_fp_fusion=False
            )
        else:
            apply_tiles[(count,)](
                *tensors, *numbers, r=r, c=c, BR=block_side(r), BC=block_side(c), BITS_R=exact.operand_bits(r),
                ALIGNED=found.aligned, WIDE=largest_level > _NARROW_LEVEL, **shared, num_warps=8,
                enable_fp_fusion=False,
            )  # fmt: skip
    _write_back(parameters, matrices)


def directions(
    positions_WCK: Tensor,
    levels_WCK: Tensor,
    codes_WC: Tensor,
    bases: tuple[Tensor, Tensor],
    largest_level: int,
    reduction: str,
    out_Crc: Tensor,
) -> None:
    """As `apply`, but the signs themselves go to the contiguous `out_Crc`."""
    count, r, c = out_Crc.shape
    column_of_tiles = Tiling((count * r, c), (r, c), (count, 1))
    sent = positions_WCK, levels_WCK, codes_WC
    apply([out_Crc.zero_().view(-1, c)], [column_of_tiles], *sent, bases, largest_level, reduction, -1.0, 0.0)


def writable(parameter: Tensor) -> bool:
    """Whether `apply` takes the parameter; where its strides give no view of its matrix, a copy is worked on.

    Example:
        >>> writable(torch.zeros(4, 6, dtype=torch.bfloat16).T), writable(torch.zeros(2, dtype=torch.float64))
        (True, False)
    """
    return parameter.dtype in CODES


def _write_back(parameters: Sequence[Tensor], matrices: Sequence[Tensor | None]) -> None:
    """Copies where a parameter's strides, such as channels_last, gave no view of its matrix."""
    for parameter, worked in zip(parameters, matrices, strict=True):
        assert worked is not None
        if worked.numel() and worked.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            parameter.detach().copy_(worked.view(parameter.shape))
