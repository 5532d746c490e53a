"""Extracts coefficients from gradients on a GPU, in one pass over gradient and momentum: steps 1 to 3 of the algorithm.

Fuses core.chunk.read_patch, core.transform.accumulate and core.select.strongest (arXiv 2411.19870, section 3).

Shapes: C chunks, r rows and c columns of a chunk, K kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from demopt.core.chunk import Chunking
from demopt.kernels.triton_device import block_side
from demopt.kernels.triton_table import CODES, matrix, table

_ROWS_AT_ONCE = 16  # chunks of one row per program

#: Precision of the transform's two products: "tf32x3" (tensor cores, about float32 accuracy) or "ieee".
PRECISION = "tf32x3"


def extract(
    gradients: Sequence[Tensor | None],
    chunkings: Sequence[Chunking],
    momentum_Crc: Tensor,
    bases: tuple[Tensor, Tensor],
    decay: float,
    scale: float,
    keep: int,
) -> tuple[Tensor, Tensor]:
    """momentum = decay momentum + scale A G B^T in place; returns the K largest magnitudes of each chunk.

    Returns positions int64 [C, K], ascending, and values float32 [C, K]. Chunks are in the order of the gradients, and
    row by row over each gradient's grid. A missing gradient counts as zeros; among equal magnitudes the first are
    chosen. With K = 0 only the momentum is updated.
    Gradients are float32, bfloat16 or float16; the contiguous momentum and the bases are float32.
    """
    count, r, c = momentum_Crc.shape
    positions = torch.empty(count, keep, dtype=torch.int64, device=momentum_Crc.device)
    values = torch.empty(count, keep, dtype=torch.float32, device=momentum_Crc.device)
    if count == 0:
        return positions, values
    from demopt.kernels.triton_extract_programs import extract_chunks, extract_rows

    # this list keeps copies of gradients without a matrix view alive past the launch
    matrices = [matrix(gradient, whole) for gradient, whole in zip(gradients, chunkings, strict=True)]
    found = table(matrices, chunkings, momentum_Crc.device)
    tensors = (found.members, found.member_of_chunk, momentum_Crc, *bases, positions, values)
    with torch.cuda.device_of(momentum_Crc):
        if r == 1:
            extract_rows[(-(-count // _ROWS_AT_ONCE),)](
                *tensors, decay, scale, keep, count,
                c=c, T=_ROWS_AT_ONCE, BC=block_side(c), CODE=found.code, PRECISION=PRECISION,
            )  # fmt: skip
        else:
            extract_chunks[(count,)](
                *tensors, decay, scale, keep,
                r=r, c=c, BR=block_side(r), BC=block_side(c),
                CODE=found.code, ALIGNED=found.aligned, PRECISION=PRECISION, num_warps=4,
            )  # fmt: skip
    return positions, values


def readable(gradient: Tensor | None) -> bool:
    """Whether `extract` accepts the gradient; it reads a copy if the strides allow no matrix view.

    Examples:
        >>> readable(None), readable(torch.zeros(4, 6).T), readable(torch.zeros(2, dtype=torch.float64))
        (True, True, False)
    """
    return gradient is None or gradient.dtype in CODES
