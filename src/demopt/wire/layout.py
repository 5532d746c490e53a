"""The layout of a message: sections of equal chunks, each made of planes. Shapes and settings alone determine it.

Shapes: W ranks, C chunks, N elements in a chunk, K kept.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from demopt.wire.coefficients import Coefficients
from demopt.wire.indices import decode_indices, encode_indices, index_planes
from demopt.wire.planes import Plane
from demopt.wire.values import CODECS, Stepped

_COEFFICIENTS_AT_ONCE = 1 << 17  # encoding or decoding one takes tens of bytes of memory
GRANULE = 8  # chunks: runs of a multiple of these begin and end on a byte boundary in every plane


@dataclass(frozen=True)
class Section:
    """Chunks of one length, with `keep` coefficients each, whose values are encoded by the codec `values`.

    Example:
        >>> Section(chunks=8, length=4096, keep=32, values="sign").size
        331
    """

    chunks: int
    length: int
    keep: int
    values: str

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """Index planes, then value planes."""
        return index_planes(self.keep, self.length) + CODECS[self.values].planes(self.keep)

    @property
    def size(self) -> int:
        """Bytes in the message."""
        return sum(plane.size(self.chunks) for plane in self.planes)

    def encode(self, positions_CK: Tensor, values_CK: Tensor) -> Tensor:
        """Encodes ascending positions (int64) and finite values as uint8 [size]."""
        codec, runs = CODECS[self.values], self.runs()
        if not runs:
            return torch.empty(0, dtype=torch.uint8, device=values_CK.device)
        encoded = [encode_indices(positions_CK[run], self.length) + codec.encode(values_CK[run]) for run in runs]
        return torch.cat([part for plane in zip(*encoded, strict=True) for part in plane])

    def runs(self, world_size: int = 1) -> list[slice]:
        """Splits the chunks into runs to encode, or to decode for `world_size` ranks, at once, which bounds memory.

        Example:
            >>> Section(chunks=5000, length=4096, keep=32, values="sign").runs()
            [slice(0, 4096, None), slice(4096, 5000, None)]
        """
        step = max(_COEFFICIENTS_AT_ONCE // (world_size * self.keep) // GRANULE, 1) * GRANULE
        return [slice(start, min(start + step, self.chunks)) for start in range(0, self.chunks, step)]

    def decode(self, data_WB: Tensor, start: int, stop: int) -> Coefficients:
        """Decodes the coefficients of chunks [start, stop) from uint8 [W, size]; `start` is a multiple of GRANULE.

        Raises MessageError if a unary index map is invalid; `Coefficients.check` checks everything else.
        """
        index_parts, value_parts = self._parts(data_WB, start, stop)
        chunks, codec = stop - start, CODECS[self.values]
        if self.keep == self.length:
            positions = torch.arange(self.keep, device=data_WB.device).expand(data_WB.shape[0], chunks, self.keep)
        else:
            positions = decode_indices(index_parts, chunks, self.keep, self.length)
        if isinstance(codec, Stepped):
            codes, levels = codec.parts(value_parts, chunks, self.keep)
            return Coefficients(positions, levels=levels, codes=codes)
        return Coefficients(positions, codec.decode(value_parts, chunks, self.keep))

    def sent(self, data_B: Tensor) -> Tensor:
        """Decodes the quantised values [C, K] in uint8 [size], which the sender subtracts from its momentum."""
        codec = CODECS[self.values]
        if not self.chunks:
            return codec.decode(self._parts(data_B, 0, 0)[1], 0, self.keep)
        values = None
        for run in self.runs():
            part = codec.decode(self._parts(data_B, run.start, run.stop)[1], run.stop - run.start, self.keep)
            if values is None:
                values = part.new_empty(self.chunks, self.keep)
            values[run] = part
        assert values is not None
        return values

    def cut(self, data_B: Tensor, start: int, stop: int) -> Tensor:
        """Returns the bytes of a section with chunks [start, stop) only; `start` is a multiple of GRANULE."""
        index_parts, value_parts = self._parts(data_B, start, stop)
        return torch.cat(index_parts + value_parts)

    def _parts(self, data_WB: Tensor, start: int, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the bytes of chunks [start, stop) in each index plane and in each value plane."""
        parts, offset = [], 0
        for plane in self.planes:
            parts.append(data_WB[..., offset + plane.size(start) : offset + plane.size(stop)])
            offset += plane.size(self.chunks)
        split = len(parts) - len(CODECS[self.values].planes(self.keep))
        return parts[:split], parts[split:]


@dataclass(frozen=True)
class Layout:
    """The sections of a message, in order, and where each begins in the body.

    Example:
        >>> layout = Layout((Section(8, 4096, 32, "float32"), Section(3, 64, 1, "float32")))
        >>> layout.starts, layout.size
        ((0, 1311), 1328)
    """

    sections: tuple[Section, ...]
    least: int = 0  # bytes: shorter bodies are padded to it, so that messages of different layouts have equal length

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First byte of each section in the body."""
        sizes = [section.size for section in self.sections]
        return tuple(sum(sizes[:number]) for number in range(len(sizes)))

    def bodies(self, body: Tensor) -> list[Tensor]:
        """Returns views [..., size] of each section's bytes in bodies uint8 [..., n]."""
        parts = zip(self.starts, self.sections, strict=True)
        return [body[..., start : start + section.size] for start, section in parts]

    def join(self, data: list[Tensor], device: torch.device | None = None) -> Tensor:
        """Joins the bytes of all sections to the body, uint8 [size] on `device`; all zeros if `data` is empty.

        Example:
            >>> Layout((Section(1, 1, 1, "float32"),)).join([torch.ones(4, dtype=torch.uint8)])
            tensor([1, 1, 1, 1, 0, 0, 0, 0], dtype=torch.uint8)
        """
        nothing = torch.zeros(0, dtype=torch.uint8, device=device)
        joined = torch.cat([nothing, *(part.to(nothing.device) for part in data)])
        return torch.nn.functional.pad(joined, (0, self.size - joined.numel()))

    @cached_property
    def size(self) -> int:
        """Bytes of the body, including the zeros that pad it to a multiple of 8 and to `least`."""
        return max(self.least, -(-sum(section.size for section in self.sections) // 8) * 8)

    @cached_property
    def kept(self) -> int:
        """Coefficients in one message."""
        return sum(section.chunks * section.keep for section in self.sections)

    @cached_property
    def digest(self) -> int:
        """A 64-bit digest of the sections."""
        return digest(repr(self.sections))


def digest(text: str) -> int:
    """Hashes a text to a 64-bit number, the same on every machine.

    Example:
        >>> digest("demopt") == digest("demopt"), digest("demopt") == digest("Demopt")
        (True, False)
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
