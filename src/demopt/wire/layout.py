"""What a message looks like: sections of equal chunks, each a run of planes. Known from shapes and settings alone.

Shapes: W ranks, C chunks, N elements in a chunk, K kept.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from demopt.wire import indices, values
from demopt.wire.indices import Plane


@dataclass(frozen=True)
class Section:
    """Chunks of one length: `keep` coefficients each, their values in the codec `values`.

    Example:
        >>> Section(chunks=8, length=4096, keep=32, values="float32").size
        1408
    """

    chunks: int
    length: int
    keep: int
    values: str

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """Index planes, then value planes."""
        return self._index_planes + values.planes(self.values, self.keep)

    @cached_property
    def _index_planes(self) -> tuple[Plane, ...]:
        return indices.fixed_planes(self.keep, self.length)

    @property
    def size(self) -> int:
        """Bytes in the message."""
        return sum(plane.size(self.chunks) for plane in self.planes)

    def encode(self, positions_CK: Tensor, values_CK: Tensor) -> Tensor:
        """uint8 [size] of ascending positions (int64) and values."""
        index = indices.fixed_encode(positions_CK, self.length) if self._index_planes else []
        return torch.cat(index + values.encode(self.values, values_CK))

    def positions(self, data: Tensor, start: int, stop: int) -> Tensor:
        """Positions (int64) [..., C, K] of chunks [start, stop) of uint8 [..., size]; what the bits say, unchecked.

        `start` is a multiple of 8, because only there a chunk begins on a byte in every plane.
        """
        chunks = stop - start
        if not self._index_planes:
            return torch.arange(self.keep, device=data.device).expand(*data.shape[:-1], chunks, self.keep)
        parts = self._parts(data, start, stop)[: len(self._index_planes)]
        return indices.fixed_decode(parts, chunks, self.keep, self.length)

    def sent(self, data: Tensor, start: int, stop: int) -> Tensor:
        """Values [..., C, K] of chunks [start, stop), as `positions`: what the wire carries, quantisation included."""
        parts = self._parts(data, start, stop)[len(self._index_planes) :]
        return values.decode(self.values, parts, stop - start, self.keep)

    def _parts(self, data: Tensor, start: int, stop: int) -> list[Tensor]:
        """The bytes of chunks [start, stop) in each plane."""
        parts, offset = [], 0
        for plane in self.planes:
            parts.append(data[..., offset + plane.size(start) : offset + plane.size(stop)])
            offset += plane.size(self.chunks)
        return parts


@dataclass(frozen=True)
class Layout:
    """The sections of a message, in order, and where each begins in the body.

    Example:
        >>> layout = Layout((Section(8, 4096, 32, "float32"), Section(3, 64, 1, "float32")))
        >>> layout.starts, layout.size
        ((0, 1408), 1424)
    """

    sections: tuple[Section, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First byte of each section in the body."""
        sizes = [section.size for section in self.sections]
        return tuple(sum(sizes[:number]) for number in range(len(sizes)))

    def bodies(self, messages: Tensor, header_bytes: int) -> list[Tensor]:
        """Each section's bytes, views [..., size], of messages uint8 [..., B]."""
        begins = [header_bytes + start for start in self.starts]
        return [messages[..., at : at + part.size] for at, part in zip(begins, self.sections, strict=True)]

    @cached_property
    def size(self) -> int:
        """Bytes of the body, filled with zeros up to a multiple of 8."""
        return -(-sum(section.size for section in self.sections) // 8) * 8

    @cached_property
    def kept(self) -> int:
        """Coefficients in one message."""
        return sum(section.chunks * section.keep for section in self.sections)

    @cached_property
    def digest(self) -> int:
        """64 bits that differ between layouts."""
        return digest(repr(self.sections))


def digest(text: str) -> int:
    """A 64-bit number from a text, the same on every machine.

    Example:
        >>> digest("demopt") == digest("demopt"), digest("demopt") == digest("Demopt")
        (True, False)
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
