"""Integers as bits: packed at one width, least significant bit first.

Eight values of b bits fill b bytes, so value n starts on a byte boundary if n is a multiple of 8.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from demopt.core.constants import constant, masks, places
from demopt.kernels import bits as kernels
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
    """Packs integers [n] in [0, 2**bits), bits <= 32, into uint8 [packed_bytes(n, bits)]; unused bits are zero.

    On an accelerator it returns the bits (bool), which `pack_sections` packs with those of other planes.
    """
    if values.is_cpu and library() is not None:
        return kernels.pack(values, bits)
    apart = _apart(values, bits)
    return pack_bits(apart) if values.is_cpu else apart


def pack_sections(sections: Sequence[list[Tensor]]) -> list[Tensor]:
    """Joins the planes of each section, bytes (uint8) or bits (bool), to uint8 [n]; in a section bits come first.

    The bits of all sections are packed at once.

    Examples:
        >>> pack_sections([[torch.tensor([True, False, True]), torch.tensor([7], dtype=torch.uint8)]])
        [tensor([5, 7], dtype=torch.uint8)]
    """
    bits: list[Tensor] = []
    rest: list[list[Tensor]] = []  # of each section
    sizes = []  # of its bits, in bytes
    for planes in sections:
        rest.append([])
        sizes.append(0)
        for plane in planes:
            if plane.dtype == torch.bool:
                bits.append(plane)
                sizes[-1] += (plane.numel() + 7) // 8
            else:
                rest[-1].append(plane)
    packed = pack_bits(*bits) if bits else torch.empty(0, dtype=torch.uint8, device="cpu")
    found = []
    for mine, planes in zip(packed.split(sizes), rest, strict=True):
        parts = [mine, *planes] if len(mine) else planes
        found.append(torch.cat(parts) if len(parts) > 1 else (*parts, mine)[0])
    return found


def pack_bits(*planes: Tensor) -> Tensor:
    """Packs planes, bool [...], into uint8 [n], eight to a byte; unused bits of a plane are zero."""
    parts = []
    for plane in planes:
        parts.append(plane.reshape(-1))
        if spare := -plane.numel() % 8:
            parts.append(constant((False,) * spare, torch.bool, plane.device))
    octets = (torch.cat(parts) if len(parts) > 1 else parts[0]).view(torch.uint8).view(-1, 8)
    packed: Tensor = (octets << places(8, torch.uint8, octets.device)).sum(1, dtype=torch.uint8)
    return packed


def _apart(values: Tensor, bits: int) -> Tensor:
    """Returns the lowest bits of integers [...], each alone, as bool [..., bits]; of booleans themselves."""
    if values.dtype == torch.bool:
        return values
    return values.unsqueeze(-1).bitwise_and(masks(bits, values.dtype, values.device)).ne(0)


def bits_of(packed: Tensor) -> Tensor:
    """Returns the bits of bytes uint8 [..., n], each alone, as bool [..., 8 n]."""
    return _apart(packed, 8).flatten(-2)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks integers [..., count] from uint8 [..., packed_bytes(count, bits)], or from their `bits_of`."""
    if packed.is_cpu and packed.dtype == torch.uint8 and library() is not None:
        rows = packed.reshape(math.prod(packed.shape[:-1]), packed.shape[-1])
        return kernels.unpack(rows, bits, count).view(*packed.shape[:-1], count)
    if bits == 8 and packed.dtype != torch.bool:
        return packed[..., :count].to(torch.int64)
    each = packed if packed.dtype == torch.bool else bits_of(packed)
    each = each[..., : count * bits].unflatten(-1, (count, bits))
    if bits == 1:
        single: Tensor = each.squeeze(-1).view(torch.int8)
        return single
    each = each.view(torch.uint8)  # compiled code does not shift booleans
    numbers: Tensor = (each << places(bits, torch.int32 if bits < 31 else torch.int64, packed.device)).sum(-1)
    return numbers
