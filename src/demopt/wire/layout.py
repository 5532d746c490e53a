"""The layout of a message: sections of equal chunks, each made of planes. Shapes and settings alone determine it.

Shapes: W ranks, C chunks, N elements in a chunk, K kept.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from demopt.wire.bits import IndexCode, Plane, index_code
from demopt.wire.coefficients import Coefficients
from demopt.wire.values import CODECS, Stepped

_COEFFICIENTS_AT_ONCE = 1 << 17  # encoding or decoding one takes tens of bytes of memory
GRANULE = 8  # chunks: runs of a multiple of these begin and end on a byte boundary in every plane


@dataclass(frozen=True)
class Section:
    """Chunks of one length, with `keep` coefficients each, whose values are encoded by the codec `values`.

    Examples:
        >>> Section(chunks=8, length=4096, keep=32, values="sign").size
        331
    """

    chunks: int
    length: int
    keep: int
    values: str

    @cached_property
    def index(self) -> IndexCode:
        """How positions are encoded."""
        return index_code(self.keep, self.length)

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """Index planes, then value planes."""
        return self.index.planes + CODECS[self.values].planes(self.keep)

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each plane."""
        return [plane.size(self.chunks) for plane in self.planes]

    @cached_property
    def size(self) -> int:
        """Bytes in the message."""
        return sum(self.sizes)

    @cached_property
    def runs(self) -> list[slice]:
        """The chunks in runs that one rank encodes at once, which bounds memory.

        Examples:
            >>> Section(chunks=5000, length=4096, keep=32, values="sign").runs
            [slice(0, 4096, None), slice(4096, 5000, None)]
        """
        step = max(_COEFFICIENTS_AT_ONCE // self.keep // GRANULE, 1) * GRANULE
        return [slice(start, min(start + step, self.chunks)) for start in range(0, self.chunks, step)]

    def encode(self, positions_CK: Tensor, values_CK: Tensor) -> Tensor:
        """Encodes ascending positions (int64) and finite values as uint8 [size]."""
        data = torch.empty(self.size, dtype=torch.uint8, device=values_CK.device)
        for run in self.runs:
            encoded = self.index.encode(positions_CK[run]) + CODECS[self.values].encode(values_CK[run])
            for part, written in zip(self._parts(data, run.start, run.stop), encoded, strict=True):
                part.copy_(written)
        return data

    def decode(self, data_WB: Tensor, start: int, stop: int) -> Coefficients:
        """Decodes the coefficients of chunks [start, stop) from uint8 [W, size]; `start` is a multiple of GRANULE.

        Raises MessageError if an index map is invalid; `Coefficients.check` checks everything else.
        """
        parts, codec, chunks = self._parts(data_WB, start, stop), CODECS[self.values], stop - start
        split = len(self.index.planes)
        if self.keep == self.length:
            positions = torch.arange(self.keep, device=data_WB.device).expand(data_WB.shape[0], chunks, self.keep)
        else:
            positions = self.index.decode(parts[:split], chunks)
        if isinstance(codec, Stepped):
            codes, levels = codec.parts(parts[split:], chunks, self.keep)
            return Coefficients(positions, levels=levels, codes=codes)
        return Coefficients(positions, codec.decode(parts[split:], chunks, self.keep))

    def checked(self, data_WB: Tensor, start: int, stop: int) -> Coefficients:
        """Does `decode`, checks everything and returns it compact, to be kept until it is applied."""
        coefficients = self.decode(data_WB, start, stop)
        coefficients.check(self.length)
        return coefficients.compact(self.length)

    def sent(self, data_B: Tensor) -> Tensor:
        """Decodes the quantised values [C, K] in uint8 [size], which the sender subtracts from its momentum."""
        codec = CODECS[self.values]
        values = torch.empty(self.chunks, self.keep, dtype=codec.dtype, device=data_B.device)
        for run in self.runs:
            planes = self._parts(data_B, run.start, run.stop)[len(self.index.planes) :]
            values[run] = codec.decode(planes, run.stop - run.start, self.keep)
        return values

    def cut(self, data_B: Tensor, start: int, stop: int) -> Tensor:
        """Returns the bytes of a section with chunks [start, stop) only; `start` is a multiple of GRANULE."""
        return torch.cat(self._parts(data_B, start, stop))

    def _parts(self, data_WB: Tensor, start: int, stop: int) -> list[Tensor]:
        """Returns the bytes of chunks [start, stop) in each plane, views."""
        planes = data_WB.split(self.sizes, dim=-1)
        if stop - start == self.chunks:
            return list(planes)
        parts = []
        for plane, data in zip(self.planes, planes, strict=True):
            bits = plane.count * plane.bits  # of a chunk
            parts.append(data[..., start * bits // 8 : (stop * bits + 7) // 8])
        return parts


@dataclass(frozen=True)
class Layout:
    """The sections of a message, in order.

    Examples:
        >>> layout = Layout((Section(8, 4096, 32, "float32"), Section(3, 64, 1, "float32")))
        >>> layout.sizes, layout.size
        ([1311, 15, 2], 1328)
    """

    sections: tuple[Section, ...]
    least: int = 0  # bytes: shorter bodies are padded to it, so that messages of different layouts have equal length

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each section in the body, and of the zeros behind them."""
        sizes = [section.size for section in self.sections]
        return [*sizes, self.size - sum(sizes)]

    def bodies(self, body: Tensor) -> list[Tensor]:
        """Returns views [..., n] of each section's bytes in bodies uint8 [..., size]."""
        return list(body.split(self.sizes, dim=-1)[:-1])

    def join(self, data: list[Tensor], device: torch.device | None = None) -> Tensor:
        """Joins the bytes of all sections to the body, uint8 [size] on `device`; all zeros if `data` is empty.

        Examples:
            >>> Layout((Section(1, 1, 1, "float32"),)).join([torch.ones(4, dtype=torch.uint8)])
            tensor([1, 1, 1, 1, 0, 0, 0, 0], dtype=torch.uint8)
        """
        body = torch.zeros(self.size, dtype=torch.uint8, device=device)
        for part, given in zip(body.split(self.sizes), data, strict=False):
            part.copy_(given)
        return body

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

    Examples:
        >>> digest("demopt") == digest("demopt"), digest("demopt") == digest("Demopt")
        (True, False)
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
