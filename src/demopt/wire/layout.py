"""The layout of a message: sections of equal chunks, each made of planes. Shapes and settings alone determine it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from demopt.core.constants import places
from demopt.core.exact import largest_exponents
from demopt.wire.bits import Faults, IndexCode, Plane, bits_of, index_code, pack, unpack
from demopt.wire.coefficients import Coefficients, SignBits, Strongest, code_faults, encode_signs, number_faults, refuse
from demopt.wire.quantizers import QUANTIZERS, SCALE_BITS, scale_code

_COEFFICIENTS_AT_ONCE = 1 << 17  # encoding or decoding one takes tens of bytes of memory
_DEVICE_COEFFICIENTS_AT_ONCE = 1 << 23  # an accelerator has more, and pays for each operation
GRANULE = 8  # chunks: spans of a multiple of these begin and end on a byte boundary in every plane
SIGN_GRANULE = 2  # the same where all coefficients' signs are sent: two scales are three bytes


@dataclass(frozen=True)
class Section:
    """Chunks of one length, with `keep` coefficients each, whose values the quantizer `values` encodes.

    Signs of all coefficients (`keep` = `length`, values "sign") are whole bytes per chunk, and decode to `SignBits`.
    """

    chunks: int
    length: int
    keep: int
    values: str

    @cached_property
    def index(self) -> IndexCode:
        return index_code(self.keep, self.length)

    @cached_property
    def all_signs(self) -> bool:
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
    def spans(self) -> list[slice]:
        """The chunks in spans that are encoded or decoded at once, to bound memory; one empty span without chunks."""
        return self._runs(_COEFFICIENTS_AT_ONCE)

    @cached_property
    def device_spans(self) -> list[slice]:
        """The spans that an accelerator encodes or decodes at once; one for signs of all, which are eight to a byte."""
        return self._runs((self.chunks + GRANULE) * self.keep if self.all_signs else _DEVICE_COEFFICIENTS_AT_ONCE)

    def _runs(self, coefficients: int) -> list[slice]:
        step = max(coefficients // self.keep // GRANULE, 1) * GRANULE
        return [slice(start, min(start + step, self.chunks)) for start in range(0, max(self.chunks, 1), step)]

    def encode(self, positions_CK: Tensor, values_CK: Tensor) -> list[Tensor]:
        """Encodes ascending positions (int64; for signs of all, any tensor) and finite values for `pack_sections`."""
        if self.all_signs:
            signs_CS, scale_C = encode_signs(values_CK)
            return sign_planes(signs_CS, scale_code(scale_C))
        spans, quantizer = self.spans if values_CK.is_cpu else self.device_spans, QUANTIZERS[self.values]
        encoded = [self.index.encode(positions_CK[span]) + quantizer.encode(values_CK[span]) for span in spans]
        return [each for plane in zip(*encoded, strict=True) for each in plane]

    def decode(
        self, data_WB: Tensor, span: slice, bits_Wb: Tensor | None = None, codes_WC: Tensor | None = None
    ) -> tuple[Coefficients, Faults]:
        """Decodes the coefficients of a span of chunks from uint8 [W, size], without waiting for the device.

        Also returns the faults. A span begins at a granule. `bits_Wb`, the narrow planes' bits, and `codes_WC`, the
        codes of all chunks' scales, are given if decoded already; then the codes' faults are known, too.
        """
        # The planes of positions come first; there are none where all coefficients are sent.
        parts, chunks, split = self.cut(data_WB, span, bits_Wb), span.stop - span.start, len(self.index.planes)
        quantizer, faults, samples = QUANTIZERS[self.values], Faults(), (1,) * len(data_WB)
        if not quantizer.largest_level:
            codes = None
        elif codes_WC is None:
            codes = unpack(parts[split], SCALE_BITS, chunks)
            faults += code_faults(codes)
        else:
            codes = codes_WC[:, span]
        if self.all_signs:
            assert codes is not None
            signs = parts[1].unflatten(-1, (chunks, (self.length + 7) // 8))
            return SignBits(signs, length=self.length, codes=codes, samples=samples), faults
        if self.keep == self.length:
            positions = places(self.keep, torch.int64, data_WB.device).expand(len(data_WB), chunks, -1)
        else:
            positions, wrong = self.index.decode(parts[:split], chunks)
            faults = wrong + faults
        numbers = quantizer.numbers(parts[-1], chunks, self.keep)
        if codes is None:
            faults += number_faults(numbers)
        return Strongest(positions, numbers, length=self.length, codes=codes, samples=samples), faults

    def checked(self, data_WB: Tensor, rank: int | None = None) -> Coefficients:
        """Decodes and checks all chunks on a CPU, in compact form; MessageError, of `rank`, if one is invalid."""
        parts: list[Coefficients] = []
        for span in [slice(0, self.chunks)] if self.all_signs else self.spans:
            part, faults = self.decode(data_WB, span)
            refuse(faults, rank)
            parts.append(part.compact())
        return Coefficients.cat(parts, dim=1)

    @cached_property
    def narrow_bytes(self) -> int:
        """The bytes of the planes that an accelerator decodes from their bits: all but a last plane of whole bytes."""
        return self.size if self.planes[-1].bits != 8 else self.size - self.sizes[-1]

    @cached_property
    def codes(self) -> slice:
        """The bits of the codes of scales; empty without scales."""
        start = 8 * sum(self.sizes[: len(self.index.planes)])  # of positions, none where all are sent
        return slice(start, start + SCALE_BITS * self.chunks * bool(QUANTIZERS[self.values].largest_level))

    def cut(self, data_WB: Tensor, span: slice, bits_Wb: Tensor | None = None) -> list[Tensor]:
        """Returns the bytes of a span of chunks in each plane, as views; for narrow planes the bits, if given."""
        parts, begin = [], 0
        for plane, size in zip(self.planes, self.sizes, strict=True):
            bits = plane.count * plane.bits  # of a chunk
            first, last = (span.start * bits + 7) // 8, (span.stop * bits + 7) // 8  # of no chunks, no bytes
            if bits_Wb is not None and begin < self.narrow_bytes:
                parts.append(bits_Wb[..., 8 * (begin + first) : 8 * (begin + last)])
            else:
                parts.append(data_WB[..., begin + first : begin + last])
            begin += size
        return parts


def sign_planes(signs_CS: Tensor, codes_C: Tensor) -> list[Tensor]:
    """Returns the planes of a section of `all_signs`: codes of scales, then signs as in `SignBits`."""
    return [pack(codes_C, SCALE_BITS), signs_CS.flatten()]


@dataclass(frozen=True)
class Layout:
    sections: tuple[Section, ...]  # of a message, in order
    least: int = 0  # bytes: shorter bodies are padded to it, so that messages of different layouts have equal length

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each section in the body."""
        return [section.size for section in self.sections]

    def bodies(self, body: Tensor) -> list[Tensor]:
        """Returns views [..., n] of each section's bytes in bodies uint8 [..., size], with or without their padding."""
        return list(body[..., : sum(self.sizes)].split(self.sizes, dim=-1)) if self.sizes else []

    def checked(self, bodies_WB: Tensor, rank: int | None = None) -> list[Coefficients]:
        """Decodes and checks all sections on a CPU, as `Section.checked` does each."""
        pairs = zip(self.sections, self.bodies(bodies_WB.cpu()), strict=True)
        return [section.checked(data, rank) for section, data in pairs]

    def decode(self, bodies_WB: Tensor, devices: Sequence[torch.device]) -> tuple[list[Coefficients], Faults]:
        """Decodes all sections, their narrow planes at once: few launches. Waits for no device; also returns faults."""
        datas, sections = self.bodies(bodies_WB), self.sections
        narrow = [data[..., : section.narrow_bytes] for section, data in zip(sections, datas, strict=True)]
        bits = bits_of(torch.cat(narrow, -1)).split([8 * section.narrow_bytes for section in sections], -1)
        coded = [mine[..., section.codes] for section, mine in zip(sections, bits, strict=True)]
        counts = [each.shape[-1] // SCALE_BITS for each in coded]
        codes = unpack(torch.cat(coded, -1), SCALE_BITS, sum(counts))
        faults, found = code_faults(codes), []
        given = zip(datas, bits, codes.split(counts, -1), strict=True)
        for section, device, (data, mine, own) in zip(sections, devices, given, strict=True):
            here, parts = (data.to(device), mine.to(device), own.to(device)), []
            for span in section.device_spans:
                part, wrong = section.decode(here[0], span, *here[1:])
                parts.append(part)
                faults += wrong
            found.append(Coefficients.cat(parts, dim=1))
        if len(codes) > 1:  # one rank's are not summed
            tops = largest_exponents(codes).split(counts)
            found = [replace(each, top=top.to(device)) for each, top, device in zip(found, tops, devices, strict=True)]
        return found, faults

    @cached_property
    def size(self) -> int:
        """Bytes of the body, with the zeros that pad it to a multiple of 8 and to `least`; ValueError above 32 bits."""
        size = max(self.least, -(-sum(self.sizes) // 8) * 8)
        if size > (most := (1 << 32) - 1):
            advice = "a smaller top_k (LocalDeMo's default sends every coefficient's sign), or shard the model (FSDP2)"
            raise ValueError(
                f"a message would have {size:,} bytes, and its header counts up to {most:,}: give {advice}"
            )
        return size

    @cached_property
    def kept(self) -> int:
        """Coefficients in one message."""
        return sum(section.chunks * section.keep for section in self.sections)

    @cached_property
    def digest(self) -> int:
        return digest(repr(self.sections))


def digest(text: str) -> int:
    """Hashes a text to a 64-bit number, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
