"""Integers as bits: packed at one width, least significant bit first, and the codes of ascending positions.

Eight values of b bits fill b bytes, so value n starts on a byte boundary if n is a multiple of 8.

Shapes: W ranks, C chunks, N elements in a chunk, K kept.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from demopt.errors import MessageError
from demopt.kernels import codec


@dataclass(frozen=True)
class Plane:
    """Consecutive numbers of equal width in a message: `count` values of `bits` bits per chunk.

    The length of a plane, and where each chunk begins in it, is therefore known without reading any data.

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
    if codec.covers(values):
        return codec.pack(values, bits)
    wide = torch.int32 if bits <= 16 else torch.int64
    groups = torch.zeros((values.numel() + 7) // 8, 8, dtype=wide, device=values.device)
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
    if codec.covers(packed):
        return codec.unpack(packed, bits, count)
    wide = torch.int32 if bits <= 16 else torch.int64
    whole_groups = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % bits))
    lanes = whole_groups.unflatten(-1, (-1, bits)).movedim(-1, 0).to(wide)
    values = torch.empty(8, *lanes.shape[1:], dtype=torch.int64, device=packed.device)
    for value in range(8):
        first, last = value * bits // 8, (value * bits + bits - 1) // 8
        total = torch.zeros_like(lanes[0])
        for byte in range(first, last + 1):
            shift = 8 * byte - value * bits
            total |= lanes[byte] << shift if shift >= 0 else lanes[byte] >> -shift
        values[value] = total.bitwise_and_((1 << bits) - 1)
    return values.movedim(0, -1).flatten(-2)[..., :count]


@dataclass(frozen=True)
class IndexCode:
    """How a chunk's K positions, which ascend strictly, are encoded: `low` low bits of each, and a map of the rest.

    The map has `width` bits: with the high parts in unary, bit high_i + i is set for the i-th position.

    "every" has neither, because all N are kept. "fixed" has all ceil(log2 N) bits of a position and no map.
    "elias-fano" (Elias 1974, Fano 1971), in its fixed-length form, has floor(log2(N / K)) low bits and a map.

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
        """The plane of the low bits, then that of the maps."""
        lows = (Plane(self.keep, self.low),) if self.low else ()
        return (*lows, Plane(self.width, 1)) if self.width else lows

    @property
    def bits(self) -> int:
        """The bits that the positions of a chunk take.

        Examples:
            >>> index_code(keep=4, length=16).bits, index_code(keep=16, length=16).bits
            (15, 0)
        """
        return self.keep * self.low + self.width

    def encode(self, positions_CK: Tensor) -> list[Tensor]:
        """Encodes ascending positions (int64) as uint8 tensors, one per plane."""
        low, width = self.low, self.width
        encoded = [pack(positions_CK & (1 << low) - 1 if width else positions_CK, low)] if low else []
        if width and codec.covers(positions_CK):
            encoded.append(codec.pack_unary(positions_CK, low, width))
        elif width:
            ones = (positions_CK >> low) + torch.arange(self.keep, device=positions_CK.device)
            bitmap = torch.zeros(len(ones), width, dtype=torch.int32, device=ones.device).scatter_(1, ones, 1)
            encoded.append(pack(bitmap, 1))
        return encoded

    def decode(self, planes: list[Tensor], chunks: int) -> Tensor:
        """Decodes planes [W, bytes] to positions int64 [W, C, K]. The caller checks that they ascend and are below N.

        Raises MessageError, with the row as the rank, if a map does not have K ones.
        """
        shape, keep, maps = (len(planes[0]), chunks, self.keep), self.keep, planes[-1]
        if not self.width:
            return unpack(planes[0], self.low, chunks * keep).view(shape)
        read = codec.unpack_unary if codec.covers(maps) else _unpack_unary
        positions, bad = read(maps, chunks, keep, self.low, self.width)
        if bad:
            raise MessageError(f"an index map does not have {keep} ones", bad[0])
        if self.low:
            positions += unpack(planes[0], self.low, chunks * keep).view(shape)
        return positions


@functools.lru_cache(maxsize=4096)
def index_code(keep: int, length: int) -> IndexCode:
    """Returns the shortest code for K of N positions.

    Examples:
        >>> index_code(32, 4096).name, index_code(1, 64).name, index_code(64, 64).name
        ('elias-fano', 'fixed', 'every')
    """
    if keep == length:
        return IndexCode("every", keep, low=0, width=0)
    all_bits, low = (length - 1).bit_length(), (length // keep).bit_length() - 1
    width = keep + (length - 1 >> low)
    if keep * all_bits <= keep * low + width:
        return IndexCode("fixed", keep, all_bits, width=0)
    return IndexCode("elias-fano", keep, low, width)


def _unpack_unary(maps_WB: Tensor, chunks: int, keep: int, low: int, width: int) -> tuple[Tensor, list[int]]:
    """Returns the high parts, shifted left by `low`, int64 [W, C, K], and the rows where a map does not have K ones."""
    bitmap = unpack(maps_WB, 1, chunks * width).view(len(maps_WB), chunks, width)
    wrong = bitmap.sum(-1) != keep
    if bool(wrong.any()):
        return bitmap, wrong.any(1).nonzero().view(-1).tolist()
    ones = bitmap.nonzero()[:, -1].view(len(maps_WB), chunks, keep)
    return (ones - torch.arange(keep, device=ones.device)) << low, []
