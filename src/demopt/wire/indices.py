"""Codes for the positions of kept coefficients, which ascend within a chunk.

Shapes: W ranks, C chunks, N elements in a chunk, K kept.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from demopt.errors import MessageError
from demopt.kernels.loader import library
from demopt.wire.bits import Plane, bits_of, pack, places, unpack

_NOWHERE = 1 << 40  # beyond any chunk


@dataclass(frozen=True)
class IndexCode:
    """A code for a chunk's K strictly ascending positions: the `low` low bits of each, and a map of the high parts.

    The map has `width` bits: with the high parts in unary, bit high_i + i is set for the i-th position.

    "every" has neither, because all N coefficients are kept. "fixed" has all ceil(log2 N) bits of a position and no
    map. "elias-fano" (Elias 1974, Fano 1971), in its fixed-length form, has floor(log2(N / K)) low bits and a map.

    Examples:
        >>> code = index_code(keep=4, length=16)
        >>> planes = code.encode(torch.tensor([[1, 6, 7, 12]]))  # low parts 1 2 3 0, high parts 0 1 1 3
        >>> planes
        [tensor([57], dtype=torch.uint8), tensor([77], dtype=torch.uint8)]
        >>> code.decode([plane.unsqueeze(0) for plane in planes], chunks=1)
        tensor([[[ 1,  6,  7, 12]]])
    """

    name: str
    keep: int
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
        """Encodes ascending positions (int64) as uint8 tensors, one per plane."""
        low, width, keep = self.low, self.width, self.keep
        encoded = [pack(positions_CK & (1 << low) - 1 if width else positions_CK, low)] if low else []
        if not width:
            return encoded
        chunks = len(positions_CK)
        if positions_CK.is_cpu and (kernels := library()) is not None:
            maps = torch.zeros((chunks * width + 7) // 8, dtype=torch.uint8)
            positions = positions_CK.contiguous()
            kernels.demopt_pack_unary(positions.data_ptr(), chunks, keep, low, width, maps.data_ptr())
            return [*encoded, maps]
        ones = (positions_CK >> low) + places(keep, torch.int64, positions_CK.device)
        bitmap = torch.zeros(chunks, width, dtype=torch.uint8, device=ones.device).scatter_(1, ones, 1)
        return [*encoded, pack(bitmap, 1)]

    def decode(self, planes: list[Tensor], chunks: int) -> Tensor:
        """Decodes planes [W, bytes] to positions int64 [W, C, K]. The caller checks that they ascend and are below N.

        Raises MessageError, with the row as the rank, if a map does not have K ones; on an accelerator, positions are
        then out of range.
        """
        shape, keep, maps = (len(planes[0]), chunks, self.keep), self.keep, planes[-1]
        if not self.width:
            return unpack(planes[0], self.low, chunks * keep).view(shape)
        positions = self._high_parts(maps, chunks)
        if self.low:
            positions += unpack(planes[0], self.low, chunks * keep).view(shape)
        return positions

    def _high_parts(self, maps_WB: Tensor, chunks: int) -> Tensor:
        """Returns the high parts, shifted left by `low`, int64 [W, C, K]."""
        keep, low, width, kernels = self.keep, self.low, self.width, library() if maps_WB.is_cpu else None
        if kernels is None:
            bits = maps_WB if maps_WB.dtype == torch.bool else bits_of(maps_WB)
            bitmap = bits[..., : chunks * width].unflatten(-1, (chunks, width)).view(torch.uint8)
            wrong: Tensor = bitmap.sum(-1) != keep
            steps = places(keep, torch.int64, bitmap.device)
            if not bitmap.is_cpu:  # without waiting: `Coefficients.invalid` finds the positions out of range
                ones: Tensor = bitmap.sort(dim=-1, descending=True, stable=True).indices[..., :keep]
                return ((ones - steps) << low).masked_fill_(wrong.unsqueeze(-1), _NOWHERE)
            if bool(wrong.any()):
                self._refuse(int(wrong.any(1).nonzero()[0]))
            ones = bitmap.nonzero()[:, -1].view(len(maps_WB), chunks, keep)
            return (ones - steps) << low
        positions = torch.empty(len(maps_WB), chunks, keep, dtype=torch.int64)
        for rank, (row, out) in enumerate(zip(maps_WB, positions, strict=True)):
            maps = row.contiguous()
            if not kernels.demopt_unpack_unary(maps.data_ptr(), chunks, keep, low, width, out.data_ptr()):
                self._refuse(rank)
        return positions

    def _refuse(self, rank: int) -> None:
        raise MessageError(f"an index map does not have {self.keep} ones", rank)


@functools.lru_cache(maxsize=4096)
def index_code(keep: int, length: int) -> IndexCode:
    """Returns the shortest code for K of N positions."""
    if keep == length:
        return IndexCode("every", keep, low=0, width=0)
    all_bits, low = (length - 1).bit_length(), (length // keep).bit_length() - 1
    width = keep + (length - 1 >> low)
    if keep * all_bits <= keep * low + width:
        return IndexCode("fixed", keep, all_bits, width=0)
    return IndexCode("elias-fano", keep, low, width)
