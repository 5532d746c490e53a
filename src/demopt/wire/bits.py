"""Integers as bits: packed at one width, least significant bit first.

Eight values of b bits fill b bytes, so value n starts on a byte boundary if n is a multiple of 8.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from demopt.kernels.loader import library


@dataclass(frozen=True)
class Plane:
    """Consecutive numbers of equal width in a message: `count` values of `bits` bits per chunk.

    The length of a plane, and the offset of each chunk in it, is therefore known before any data.
    """

    count: int
    bits: int

    def size(self, chunks: int) -> int:
        """Returns the bytes of this plane for a number of chunks. A multiple of 8 chunks ends on a byte boundary."""
        return packed_bytes(chunks * self.count, self.bits)


def packed_bytes(count: int, bits: int) -> int:
    """Returns the bytes that `count` values of `bits` bits take."""
    return (count * bits + 7) // 8


def pack(values: Tensor, bits: int) -> Tensor:
    """Packs integers [n] in [0, 2**bits), bits <= 32, into uint8 [packed_bytes(n, bits)]; unused bits are zero."""
    if values.is_cpu and (kernels := library()) is not None:
        wide = values.reshape(-1).to(torch.int64).contiguous()
        packed = torch.empty((wide.numel() * bits + 7) // 8, dtype=torch.uint8)
        kernels.demopt_pack(wide.data_ptr(), wide.numel(), bits, packed.data_ptr())
        return packed
    flat = values.reshape(-1)
    flat = torch.nn.functional.pad(flat, (0, spare)) if (spare := -values.numel() % 8) else flat
    flat = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
    together = 8 // math.gcd(8, bits)  # so many values fill whole bytes
    if bits > 1 and together * bits < 64:
        words = (flat.view(-1, together) << places(together, torch.int64, flat.device, bits)).sum(1)
        packed = words.view(torch.uint8).view(-1, 8)[:, : together * bits // 8].flatten()
    else:
        each = (flat.unsqueeze(1) >> places(bits, flat.dtype, flat.device)).bitwise_and_(1) if bits > 1 else flat
        packed = (each.view(-1, 8) << places(8, each.dtype, each.device)).sum(1, dtype=torch.uint8)
    return packed[: packed_bytes(values.numel(), bits)]


@functools.lru_cache(maxsize=256)
def places(count: int, dtype: torch.dtype, device: torch.device, every: int = 1) -> Tensor:
    """Returns the numbers 0, every, 2 every, ..., `count` of them, to shift by. Do not modify it."""
    return (torch.arange(count, dtype=dtype) * every).to(device)


@functools.lru_cache(maxsize=16)
def masks(device: torch.device) -> Tensor:
    """Returns the eight bits of a byte, each alone. Do not modify it."""
    return (1 << torch.arange(8)).to(torch.uint8).to(device)


def bits_of(packed: Tensor) -> Tensor:
    """Returns the bits of bytes uint8 [..., n], each alone, as bool [..., 8 n]."""
    return packed.unsqueeze(-1).bitwise_and(masks(packed.device)).ne(0).flatten(-2)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks int64 [..., count] from uint8 [..., packed_bytes(count, bits)], or from their `bits_of`.

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
    if bits == 8 and packed.dtype != torch.bool:
        return packed[..., :count].to(torch.int64)
    each = packed if packed.dtype == torch.bool else bits_of(packed)
    each = each[..., : count * bits].unflatten(-1, (count, bits))
    if bits == 1:
        single: Tensor = each.squeeze(-1)
        return single.to(torch.int64)
    each = each.view(torch.uint8)  # compiled code does not shift booleans
    numbers: Tensor = (each << places(bits, torch.int32 if bits < 31 else torch.int64, packed.device)).sum(-1)
    return numbers
