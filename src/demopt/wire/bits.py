"""Integers as bits, packed at one width, least significant bit first; and codes of positions, which ascend in a chunk.

Eight values of b bits fill b bytes, so value n starts on a byte boundary if n is a multiple of 8.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from demopt.core.constants import constant, places
from demopt.kernels import bits as kernels
from demopt.kernels.gate import library

#: Reasons to refuse a message, each with bool [W, ...]: where it holds.
Faults = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Plane:
    """Consecutive numbers of equal width: `count` of `bits` bits per chunk. So its length is known before any data."""

    count: int
    bits: int

    def size(self, chunks: int) -> int:
        """Returns the bytes of this plane for a number of chunks. A multiple of 8 chunks ends on a byte boundary."""
        return (chunks * self.count * self.bits + 7) // 8


def pack(values: Tensor, bits: int) -> Tensor:
    """Packs integers [n] of at most 32 bits into uint8; on an accelerator returns the bits, for `pack_sections`."""
    if values.is_cpu and library() is not None:
        return kernels.pack(values, bits)
    apart = each_bit(values, bits)
    return pack_bits(apart) if values.is_cpu else apart


def pack_sections(sections: Sequence[list[Tensor]]) -> list[Tensor]:
    """Joins each section's planes into uint8 [n]: bits (bool; packed for all sections at once), then bytes (uint8)."""
    bits = [[plane for plane in planes if plane.dtype == torch.bool] for planes in sections]
    sizes = [sum((plane.numel() + 7) // 8 for plane in planes) for planes in bits]
    together = [plane for planes in bits for plane in planes]
    packed = pack_bits(*together) if together else torch.empty(0, dtype=torch.uint8, device="cpu")
    found = []
    for mine, planes in zip(packed.split(sizes), sections, strict=True):
        parts = [mine] * bool(len(mine)) + [plane for plane in planes if plane.dtype != torch.bool]
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


def each_bit(values: Tensor, bits: int) -> Tensor:
    """Returns the lowest bits of integers [...], one by one, as bool [..., bits]; booleans are returned unchanged."""
    if values.dtype == torch.bool:
        return values
    single = constant(tuple(1 << n for n in range(bits)), values.dtype, values.device)
    return values.unsqueeze(-1).bitwise_and(single).ne(0)


def bits_of(packed: Tensor) -> Tensor:
    """Returns the bits of bytes uint8 [..., n], one by one, as bool [..., 8 n]."""
    return each_bit(packed, 8).flatten(-2)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks integers [..., count] from uint8 [..., ceil(count bits / 8)], or from their `bits_of`."""
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


@dataclass(frozen=True)
class IndexCode:
    """A code for a chunk's K strictly ascending positions: the `low` low bits of each, and a map of the high parts.

    The map has `width` bits: with the high parts in unary, bit high_i + i is set for the i-th position.

    If all N coefficients are kept, it has no low bits and no map. Otherwise it is the shorter of two: all ceil(log2 N)
    bits and no map; or Elias-Fano (Elias 1974, Fano 1971), in its fixed-length form, with floor(log2(N / K)) low bits.

    Examples:
        >>> code = index_code(keep=4, length=16)
        >>> planes = code.encode(torch.tensor([[1, 6, 7, 12]]))  # low parts 1 2 3 0, high parts 0 1 1 3
        >>> planes
        [tensor([57], dtype=torch.uint8), tensor([77], dtype=torch.uint8)]
        >>> code.decode([plane.unsqueeze(0) for plane in planes], chunks=1)[0]
        tensor([[[ 1,  6,  7, 12]]])
    """

    keep: int
    length: int
    low: int
    width: int

    @functools.cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The plane of the low bits, then the plane of the maps."""
        lows = (Plane(self.keep, self.low),) if self.low else ()
        return (*lows, Plane(self.width, 1)) if self.width else lows

    @property
    def bits(self) -> int:
        """The bits that the positions of a chunk take."""
        return self.keep * self.low + self.width

    def encode(self, positions_CK: Tensor) -> list[Tensor]:
        """Encodes ascending positions (int64) as planes."""
        low, width, keep = self.low, self.width, self.keep
        chunks, on_cpu = len(positions_CK), positions_CK.is_cpu
        encoded = []
        if low and on_cpu:
            encoded.append(pack(positions_CK & (1 << low) - 1, low))
        elif low:
            high_parts = width - keep + 1 if width else 1
            table = _low_bits(low, high_parts << low, positions_CK.device)
            encoded.append(table.index_select(0, positions_CK.flatten()))
        if not width:
            return encoded
        if on_cpu and library() is not None:
            return [*encoded, kernels.pack_unary(positions_CK, low, width)]
        ones = (positions_CK >> low) + places(keep, torch.int64, positions_CK.device)
        bitmap = torch.zeros(chunks, width, dtype=torch.bool, device=ones.device).scatter_(1, ones, True)
        return [*encoded, pack_bits(bitmap) if on_cpu else bitmap]

    def decode(self, planes: list[Tensor], chunks: int) -> tuple[Tensor, Faults]:
        """Decodes planes [W, bytes], or their bits, to positions int64 [W, C, K], and faults. Waits for no device."""
        keep, low, faults = self.keep, self.low, []
        if self.width:
            if planes[-1].is_cpu and planes[-1].dtype == torch.uint8 and library() is not None:
                positions, wrong = kernels.unpack_unary(planes[-1], chunks, keep, self.width)
            else:
                positions, wrong = self._high_parts(planes[-1], chunks)
            faults.append((f"an index map does not have {keep} ones", wrong))
        if low:
            lows = unpack(planes[0], low, chunks * keep).to(torch.int64).unflatten(-1, (chunks, keep))
            positions = torch.add(lows, positions, alpha=1 << low) if self.width else lows
        if keep > 1:
            faults.append(("indices of a chunk do not ascend", positions[..., 1:] <= positions[..., :-1]))
        if self.length % (1 << low):  # otherwise the last high part ends where the chunk does
            faults.append((f"an index is out of range in a chunk of {self.length}", positions[..., -1] >= self.length))
        return positions, faults

    def _high_parts(self, maps: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
        """Returns high parts int64 [W, C, K], and faults, bool [W, C, n], of maps that do not have K ones."""
        keep, width = self.keep, self.width
        bits = maps if maps.dtype == torch.bool else bits_of(maps)
        bitmap = bits[..., : chunks * width].unflatten(-1, (chunks, width)).view(torch.uint8)
        ordered = bitmap.sort(dim=-1, descending=True, stable=True)  # ones first, each with its place
        around = slice(keep - 1, keep + 1)  # the K-th, and the next, which must be a zero
        wrong = ordered.values[..., around] != constant((1, 0), torch.uint8, bits.device)[: width - keep + 1]
        return ordered.indices[..., :keep] - places(keep, torch.int64, bits.device), wrong


@functools.lru_cache(maxsize=64)
def _low_bits(low: int, count: int, device: torch.device) -> Tensor:
    """Returns bool [count, low]: the lowest bits, one by one, of the numbers from 0 on."""
    return each_bit(torch.arange(count, device="cpu"), low).to(device)


@functools.lru_cache(maxsize=4096)
def index_code(keep: int, length: int) -> IndexCode:
    """Returns the shortest code for K of N positions."""
    if keep == length:
        return IndexCode(keep, length, low=0, width=0)
    all_bits, low = (length - 1).bit_length(), (length // keep).bit_length() - 1
    width = keep + (length - 1 >> low)
    if keep * all_bits <= keep * low + width:
        return IndexCode(keep, length, all_bits, width=0)
    return IndexCode(keep, length, low, width)
