"""The layout of a message: sections of equal chunks, each made of planes. Shapes and settings alone determine it.

Shapes: W ranks, C chunks, N elements in a chunk, K kept.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from demopt.errors import MessageError
from demopt.wire.bits import Plane, bits_of, joined, pack, unpack
from demopt.wire.coefficients import Coefficients, SignBits, encode_signs
from demopt.wire.indices import IndexCode, index_code
from demopt.wire.quantizers import QUANTIZERS, SCALE_BITS, FloatQuantizer

_COEFFICIENTS_AT_ONCE = 1 << 17  # encoding or decoding one takes tens of bytes of memory
_DEVICE_COEFFICIENTS_AT_ONCE = 1 << 23  # an accelerator has more, and pays for each operation
GRANULE = 8  # chunks: runs of a multiple of these begin and end on a byte boundary in every plane
SIGN_GRANULE = 2  # the same where all coefficients' signs are sent: two scales are three bytes


@dataclass(frozen=True)
class Section:
    """Chunks of one length, with `keep` coefficients each, whose values the quantizer `values` encodes.

    Signs of all coefficients (`keep` = `length`, values "sign") are whole bytes per chunk, and decode to `SignBits`.

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
        """The code of the positions."""
        return index_code(self.keep, self.length)

    @cached_property
    def all_signs(self) -> bool:
        """Whether it holds the sign of every coefficient."""
        return self.keep == self.length and self.values == "sign"

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """Index planes, then value planes."""
        if self.all_signs:
            return Plane(1, SCALE_BITS), Plane((self.length + 7) // 8, 8)
        return self.index.planes + QUANTIZERS[self.values].planes(self.keep)

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
        """The chunks in runs that are encoded or decoded at once, which bounds memory."""
        return self._runs(_COEFFICIENTS_AT_ONCE)

    @cached_property
    def device_runs(self) -> list[slice]:
        """The chunks in runs, as an accelerator encodes or decodes them; signs of all, eight to a byte, in one."""
        return self._runs((self.chunks + GRANULE) * self.keep if self.all_signs else _DEVICE_COEFFICIENTS_AT_ONCE)

    def _runs(self, coefficients: int) -> list[slice]:
        step = max(coefficients // self.keep // GRANULE, 1) * GRANULE
        return [slice(start, min(start + step, self.chunks)) for start in range(0, self.chunks, step)]

    def join_signs(self, signs_CS: Tensor, codes_C: Tensor) -> Tensor:
        """Joins encoded signs, uint8 [C, ceil(N / 8)], and codes of scales to uint8 [size]."""
        return joined([pack(codes_C, SCALE_BITS), signs_CS.flatten()])

    def encode(self, positions_CK: Tensor, values_CK: Tensor) -> Tensor:
        """Encodes ascending positions (int64) and finite values as uint8 [size].

        Signs of all coefficients need no positions: any tensor will do.
        """
        if self.all_signs:
            return self.join_signs(*encode_signs(values_CK))
        encoded = []
        for run in (self.runs if values_CK.is_cpu else self.device_runs) or [slice(0, 0)]:
            encoded.append(self.index.encode(positions_CK[run]) + QUANTIZERS[self.values].encode(values_CK[run]))
        return joined(
            encoded[0] if len(encoded) == 1 else [each for plane in zip(*encoded, strict=True) for each in plane]
        )

    def decode(
        self, data_WB: Tensor, start: int, stop: int, marks: list[Tensor] | None = None
    ) -> Coefficients | SignBits:
        """Decodes the coefficients of chunks [start, stop) from uint8 [W, size]; `start` begins a granule.

        Raises MessageError if an index map is invalid; `Coefficients.check` checks everything else. With `marks`, to
        which the errors of positions are then added, it does not wait for the device.
        """
        parts, quantizer, chunks = self._parts(data_WB, start, stop), QUANTIZERS[self.values], stop - start
        if marks is not None:
            parts = self._as_bits(data_WB, parts)
        if self.all_signs:
            signs = parts[1].unflatten(-1, (chunks, (self.length + 7) // 8))
            return SignBits(signs, unpack(parts[0], SCALE_BITS, chunks), self.length, (1,) * len(signs))
        split = len(self.index.planes)
        if self.keep == self.length:
            positions = torch.arange(self.keep, device=data_WB.device).expand(len(data_WB), chunks, self.keep)
        elif marks is None:
            positions = self.index.decode(parts[:split], chunks)
        else:
            positions, wrong = self.index.unchecked(parts[:split], chunks, self.length)
            marks += wrong
        if isinstance(quantizer, FloatQuantizer):
            return Coefficients(positions, quantizer.decode(parts[split:], chunks, self.keep))
        codes, levels = quantizer.parts(parts[split:], chunks, self.keep)
        return Coefficients(positions, levels=levels, codes=codes)

    def received(self, data_WB: Tensor, rank: int | None = None) -> Coefficients | SignBits:
        """Decodes and checks all chunks, once; compact, to be kept until everything else is checked.

        Raises MessageError if a coefficient is invalid; `rank` is the sender of a single row.
        """
        parts: list[Coefficients | SignBits] = []
        try:
            for run in [slice(0, self.chunks)] if self.all_signs else self.runs or [slice(0, 0)]:
                part = self.decode(data_WB, run.start, run.stop)
                part.check(self.length)
                parts.append(part.compact(self.length))
        except MessageError as error:
            raise MessageError(error.reason, error.rank if rank is None else rank) from None
        return parts[0] if len(parts) == 1 else Coefficients.joined(parts)  # type: ignore[arg-type]

    def unchecked(self, data_WB: Tensor) -> tuple[Coefficients | SignBits, list[Tensor]]:
        """Decodes all chunks as `received` does, without waiting for the device.

        Returns them, and marks, bool [W, n], of all that `received` would refuse in a rank's bytes.
        """
        found: list[Coefficients | SignBits] = []
        marks: list[Tensor] = []
        for run in self.device_runs or [slice(0, 0)]:
            found.append(self.decode(data_WB, run.start, run.stop, marks))
            marks.append(found[-1].invalid())
        return found[0] if len(found) == 1 else Coefficients.joined(found), marks  # type: ignore[arg-type]

    def cut(self, data_B: Tensor, start: int, stop: int) -> list[Tensor]:
        """Returns the bytes of a section with chunks [start, stop) only, in parts; `start` begins a granule."""
        return self._parts(data_B, start, stop)

    def _as_bits(self, data_WB: Tensor, parts: list[Tensor]) -> list[Tensor]:
        """Returns the parts of planes, those of narrow numbers as bits, all in two operations; they come first."""
        narrow = [part for part, plane in zip(parts, self.planes, strict=True) if plane.bits != 8]
        if not narrow or not data_WB.numel():
            return parts
        sizes = [part.shape[-1] for part in narrow]
        whole = sizes == self.sizes[: len(narrow)]
        joined = data_WB[..., : sum(sizes)] if whole else torch.cat(narrow, dim=-1)
        return [*bits_of(joined).split([8 * size for size in sizes], dim=-1), *parts[len(narrow) :]]

    def _parts(self, data_WB: Tensor, start: int, stop: int) -> list[Tensor]:
        """Returns the bytes of chunks [start, stop) in each plane, as views."""
        planes = data_WB.split(self.sizes, dim=-1)
        if stop - start == self.chunks:
            return list(planes)
        parts = []
        for plane, data in zip(self.planes, planes, strict=True):
            bits = plane.count * plane.bits  # of a chunk
            first, last = ((chunk * bits + 7) // 8 for chunk in (start, stop))  # of no chunks, no bytes
            parts.append(data[..., first:last])
        return parts


class Sized(Protocol):
    """A section of a body, whose bytes are known before any data."""

    @property
    def size(self) -> int:
        """Bytes in the message."""


S = TypeVar("S", bound=Sized)


@dataclass(frozen=True)
class Layout(Generic[S]):
    """The sections of a message, in order."""

    sections: tuple[S, ...]
    least: int = 0  # bytes: shorter bodies are padded to it, so that messages of different layouts have equal length

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each section in the body, and of the padding after them."""
        sizes = [section.size for section in self.sections]
        return [*sizes, self.size - sum(sizes)]

    def bodies(self, body: Tensor) -> list[Tensor]:
        """Returns views [..., n] of each section's bytes in bodies uint8 [..., size]."""
        return list(body.split(self.sizes, dim=-1)[:-1])

    @cached_property
    def size(self) -> int:
        """Bytes of the body, including the zeros that pad it to a multiple of 8 and to `least`."""
        return max(self.least, -(-sum(section.size for section in self.sections) // 8) * 8)

    @cached_property
    def kept(self: "Layout[Section]") -> int:
        """Coefficients in one message."""
        return sum(section.chunks * section.keep for section in self.sections)

    @cached_property
    def digest(self) -> int:
        """A 64-bit digest of the sections."""
        return digest(repr(self.sections))


def padded_alike(layouts: list[Layout[S]]) -> list[Layout[S]]:
    """Returns the layouts with padding to the size of the largest."""
    least = max(layout.size for layout in layouts)
    return [replace(layout, least=least) for layout in layouts]


def digest(text: str) -> int:
    """Hashes a text to a 64-bit number, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
