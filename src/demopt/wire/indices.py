"""Codes for the positions of kept coefficients, which ascend within a chunk.

Shapes: W ranks, C chunks, N elements in a chunk, K kept.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from demopt.core.constants import constant, masks, places
from demopt.kernels import bits as kernels
from demopt.kernels.loader import library
from demopt.wire.bits import Plane, bits_of, pack, pack_bits, unpack
from demopt.wire.coefficients import Faults


@dataclass(frozen=True)
class IndexCode:
    """A code for a chunk's K strictly ascending positions: the `low` low bits of each, and a map of the high parts.

    The map has `width` bits: with the high parts in unary, bit high_i + i is set for the i-th position.

    Where all N coefficients are kept, it has neither. Otherwise the shorter of two: all ceil(log2 N) bits of a position
    and no map; or Elias-Fano (Elias 1974, Fano 1971), in its fixed-length form, with floor(log2(N / K)) low bits.

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
        """Decodes planes [W, bytes], or their `bits_of`, to positions int64 [W, C, K], without waiting for the device.

        Returns also faults: of maps that do not have K ones, of positions that do not ascend, or reach N.
        """
        keep, low, faults = self.keep, self.low, []
        lows = unpack(planes[0], low, chunks * keep).to(torch.int64).unflatten(-1, (chunks, keep)) if low else None
        if not self.width:
            assert lows is not None
            positions = lows
        else:
            if planes[-1].is_cpu and planes[-1].dtype == torch.uint8 and library() is not None:
                positions, wrong = kernels.unpack_unary(planes[-1], chunks, keep, self.width)
            else:
                positions, wrong = self._high_parts(planes[-1], chunks)
            faults.append((f"an index map does not have {keep} ones", wrong))
            if lows is not None:
                positions = torch.add(lows, positions, alpha=1 << low)
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
    """Returns bool [count, low]: the lowest bits of the numbers from 0 on, each alone."""
    numbers = torch.arange(count, device="cpu")
    return numbers.unsqueeze(1).bitwise_and(masks(low, numbers.dtype, numbers.device)).ne(0).to(device)


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
