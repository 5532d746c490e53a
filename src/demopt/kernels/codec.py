"""Compiled bit packing, in one pass; wire.bits and wire.indices define the formats.

Shapes: W ranks, C chunks, K kept.
"""

import math

import torch
from torch import Tensor

from demopt.kernels.compiled import compiled


def covers(tensor: Tensor) -> bool:
    """Whether these functions support a tensor.

    Examples:
        >>> covers(torch.zeros(1, device="meta"))
        False
    """
    return tensor.device.type == "cpu" and compiled() is not None


def pack(values: Tensor, bits: int) -> Tensor:
    """Packs integers [n] in [0, 2**bits) into uint8 [(n bits + 7) / 8]."""
    wide = values.reshape(-1).to(torch.int64).contiguous()
    packed = torch.empty((wide.numel() * bits + 7) // 8, dtype=torch.uint8)
    compiled().demopt_pack(wide.data_ptr(), wide.numel(), bits, packed.data_ptr())
    return packed


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks int64 [..., count] from uint8 [..., n], where n bytes hold at least count values."""
    rows = packed.reshape(math.prod(packed.shape[:-1]), packed.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    values = torch.empty(len(rows), count, dtype=torch.int64)
    for row, out in zip(rows, values, strict=True):
        compiled().demopt_unpack(row.data_ptr(), count, bits, out.data_ptr())
    return values.view(*packed.shape[:-1], count)


def pack_unary(positions_CK: Tensor, low: int, width: int) -> Tensor:
    """Packs the unary maps of ascending positions with `low` low bits, `width` bits per chunk, into uint8 [n]."""
    chunks, keep = positions_CK.shape
    maps = torch.zeros((chunks * width + 7) // 8, dtype=torch.uint8)
    positions = positions_CK.contiguous()
    compiled().demopt_pack_unary(positions.data_ptr(), chunks, keep, low, width, maps.data_ptr())
    return maps


def unpack_unary(maps_WB: Tensor, chunks: int, keep: int, low: int, width: int) -> tuple[Tensor, list[int]]:
    """Returns the high parts, shifted left by `low`, int64 [W, C, K], and the rows where a map does not have K ones."""
    positions = torch.empty(len(maps_WB), chunks, keep, dtype=torch.int64)
    bad = []
    for number, (row, out) in enumerate(zip(maps_WB, positions, strict=True)):
        maps = row.contiguous()
        if not compiled().demopt_unpack_unary(maps.data_ptr(), chunks, keep, low, width, out.data_ptr()):
            bad.append(number)
    return positions, bad
