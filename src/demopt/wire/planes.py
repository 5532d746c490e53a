"""A plane: a run of equally wide numbers, the same count for every chunk.

So a plane's length, and each chunk's place in it, are known without reading anything.
"""

from dataclasses import dataclass

from demopt.wire.bits import packed_bytes


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
        """Bytes of this plane for a number of chunks. A multiple of 8 chunks ends on a byte."""
        return packed_bytes(chunks * self.count, self.bits)
