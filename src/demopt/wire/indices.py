"""Index codes: which positions of a chunk were kept, as bits. The positions of a chunk are strictly ascending.

A code cuts its bits into planes. In a plane every chunk has the same number of values, all of the same width, so that
a plane's length and each chunk's place in it are known without reading anything.

Shapes: C chunks, N elements in a chunk, K kept.
"""

from dataclasses import dataclass

from torch import Tensor

from demopt.wire.bits import pack, packed_bytes, unpack


@dataclass(frozen=True)
class Plane:
    """`count` values of `bits` bits a chunk.

    Example:
        >>> Plane(count=32, bits=12).size(chunks=8)
        384
    """

    count: int
    bits: int

    def size(self, chunks: int) -> int:
        """Bytes of this plane for a number of chunks. The first 8 n chunks take exactly size(8 n)."""
        return packed_bytes(chunks * self.count, self.bits) if self.bits else 0


def fixed_planes(keep: int, length: int) -> tuple[Plane, ...]:
    """ceil(log2 N) bits an index; none where every position is kept.

    Example:
        >>> fixed_planes(32, 4096), fixed_planes(64, 64)
        ((Plane(count=32, bits=12),), ())
    """
    return () if keep == length else (Plane(keep, (length - 1).bit_length()),)


def fixed_encode(positions_CK: Tensor, length: int) -> list[Tensor]:
    """Planes, uint8, of positions [C, K] (int64)."""
    return [pack(positions_CK, plane.bits) for plane in fixed_planes(positions_CK.shape[1], length)]


def fixed_decode(planes: list[Tensor], chunks: int, keep: int, length: int) -> Tensor:
    """Positions int64 [..., C, K] of planes [..., bytes]; what the bits say, unchecked."""
    (plane,) = fixed_planes(keep, length)
    flat = unpack(planes[0], plane.bits, chunks * keep)
    return flat.view(*flat.shape[:-1], chunks, keep)
