"""Integers as bits: packed at one width, least significant bit first.

Eight values of b bits fill b bytes, so value n starts on a byte boundary if n is a multiple of 8.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from demopt.kernels.loader import library


@dataclass(frozen=True)
class Plane:
    """Consecutive numbers of equal width in a message: `count` values of `bits` bits per chunk.

    The length of a plane, and the offset of each chunk in it, is therefore known before any data.

    Examples:
        >>> Plane(count=32, bits=12).size(chunks=8)
        384
    """

    count: int
    bits: int

    def size(self, chunks: int) -> int:
        """Returns the bytes of this plane for a number of chunks. A multiple of 8 chunks ends on a byte boundary."""
        return packed_bytes(chunks * self.count, self.bits)


def packed_bytes(count: int, bits: int) -> int:
    """Returns the bytes that `count` values of `bits` bits take.

    Examples:
        >>> packed_bytes(count=9, bits=3)
        4
    """
    return (count * bits + 7) // 8


def pack(values: Tensor, bits: int) -> Tensor:
    """Packs integers [n] in [0, 2**bits), bits <= 32, into uint8 [packed_bytes(n, bits)]; unused bits are zero.

    Examples:
        >>> pack(torch.tensor([1, 0, 1, 1]), bits=1)
        tensor([13], dtype=torch.uint8)
    """
    if values.is_cpu and (kernels := library()) is not None:
        wide = values.reshape(-1).to(torch.int64).contiguous()
        packed = torch.empty((wide.numel() * bits + 7) // 8, dtype=torch.uint8)
        kernels.demopt_pack(wide.data_ptr(), wide.numel(), bits, packed.data_ptr())
        return packed
    wide_dtype = torch.int32 if bits <= 16 else torch.int64
    groups = torch.zeros((values.numel() + 7) // 8, 8, dtype=wide_dtype, device=values.device)
    groups.view(-1)[: values.numel()] = values.reshape(-1)
    columns = groups.T.contiguous()
    packed = torch.empty(bits, groups.shape[0], dtype=torch.uint8, device=values.device)
    for byte in range(bits):
        lane = torch.zeros_like(columns[0])
        for value in range(8 * byte // bits, (8 * byte + 7) // bits + 1):
            shift = value * bits - 8 * byte
            lane |= columns[value] << shift if shift >= 0 else columns[value] >> -shift
        packed[byte] = lane.bitwise_and_(255)
    return packed.T.reshape(-1)[: (values.numel() * bits + 7) // 8]


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks int64 [..., count] from uint8 [..., packed_bytes(count, bits)].

    Examples:
        >>> unpack(pack(torch.tensor([5, 2, 7]), bits=3), bits=3, count=3)
        tensor([5, 2, 7])
    """
    if packed.is_cpu and (kernels := library()) is not None:
        rows = packed.reshape(math.prod(packed.shape[:-1]), packed.shape[-1])
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        values = torch.empty(len(rows), count, dtype=torch.int64)
        for row, out in zip(rows, values, strict=True):
            kernels.demopt_unpack(row.data_ptr(), count, bits, out.data_ptr())
        return values.view(*packed.shape[:-1], count)
    wide_dtype = torch.int32 if bits <= 16 else torch.int64
    whole_groups = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % bits))
    lanes = whole_groups.unflatten(-1, (-1, bits)).movedim(-1, 0).to(wide_dtype)
    values = torch.empty(8, *lanes.shape[1:], dtype=torch.int64, device=packed.device)
    for value in range(8):
        first, last = value * bits // 8, (value * bits + bits - 1) // 8
        total = torch.zeros_like(lanes[0])
        for byte in range(first, last + 1):
            shift = 8 * byte - value * bits
            total |= lanes[byte] << shift if shift >= 0 else lanes[byte] >> -shift
        values[value] = total.bitwise_and_((1 << bits) - 1)
    return values.movedim(0, -1).flatten(-2)[..., :count]
