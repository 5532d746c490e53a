"""A plane: consecutive numbers of equal width, the same count for every chunk.

The length of a plane and the offset of each chunk in it are therefore known without reading any data.
"""

from dataclasses import dataclass

from demopt.wire.bits import packed_bytes


@dataclass(frozen=True)
class Plane:
    """`count` values of `bits` bits per chunk.

    Example:
        >>> Plane(count=32, bits=12).size(chunks=8)
        384
    """

    count: int
    bits: int

    def size(self, chunks: int) -> int:
        """Returns the bytes of this plane for a number of chunks. A multiple of 8 chunks ends on a byte boundary."""
        return packed_bytes(chunks * self.count, self.bits)
