"""The wire format in plain Python, bit by bit, from docs/wire-format.md: integers of any size, no tensors."""

import math
import struct
from collections.abc import Sequence

import numpy as np

MASK = 2**64 - 1
CODES = range(16, 255 << 4)  # of scales that are normal floats


def packed(numbers: Sequence[int], width: int) -> bytes:
    """Numbers of `width` bits, the first in the lowest bits, as one big little-endian integer."""
    total = 0
    for place, number in enumerate(numbers):
        total |= number << (place * width)
    return total.to_bytes((len(numbers) * width + 7) // 8, "little")


def weight(number: int) -> int:
    """Odd 64-bit weight of word `number`, counted from 0: splitmix64."""
    return mixed((number + 1) * 0x9E3779B97F4A7C15 & MASK) | 1


def mixed(z: int) -> int:
    """splitmix64's finaliser."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def word_sum(words: Sequence[int]) -> int:
    """Sum of weighted words modulo 2**64; beyond 2**16 words, of the mixed sums of blocks of that many."""
    if len(words) > 1 << 16:
        return word_sum([mixed(word_sum(words[at : at + (1 << 16)])) for at in range(0, len(words), 1 << 16)])
    return sum(word * weight(number) for number, word in enumerate(words)) & MASK


def checksum(data: bytes) -> int:
    return word_sum(struct.unpack(f"<{len(data) // 8}Q", data))


def index_planes(chunks: Sequence[Sequence[int]], length: int) -> list[bytes]:
    """The index planes of ascending positions, in the shortest code."""
    keep = len(chunks[0])
    if keep == length:
        return []
    width = math.ceil(math.log2(length))
    low = int(math.log2(length / keep))
    highest = (length - 1) >> low
    if keep * width <= keep * low + keep + highest:
        return [packed([position for chunk in chunks for position in chunk], width)]
    lows = [position % 2**low for chunk in chunks for position in chunk]
    maps: list[int] = []
    for chunk in chunks:
        for high in range(highest + 1):  # a one for each index with this high part, then a zero
            maps += [1] * sum(position >> low == high for position in chunk) + [0]
        maps.pop()  # the last zero says nothing
    return ([packed(lows, low)] if low else []) + [packed(maps, 1)]


def scale_of(code: int) -> float:
    """Eight bits of exponent and four of mantissa, as in float32."""
    if code == 0:
        return 0.0
    return math.ldexp(1 + code % 16 / 16, code // 16 - 127)


def scale_code(scale: float) -> int:
    """The code with the nearest scale, the larger of two; zero below the smallest normal float32."""
    if scale < scale_of(CODES[0]) - math.ldexp(1, -132):  # half of the distance between codes there
        return 0
    fraction, exponent = math.frexp(scale)  # scale = fraction 2**exponent, 0.5 <= fraction < 1
    return min(CODES[-1], 16 * (exponent + 125) + math.floor(fraction * 32 + 0.5))


def quantized(chunk: Sequence[float], values: str) -> tuple[float, list[int]]:
    """A chunk's scale, rounded to a code's, and its levels."""
    mean = float(np.float32(sum(map(abs, chunk))) / np.float32(len(chunk)))
    wanted = {"sign": mean, "2-bit": float(np.float32(mean) * np.float32(2 / 3))}[values]
    scale = scale_of(scale_code(wanted))
    return scale, [level(value, scale, values) for value in chunk]


def level(value: float, scale: float, values: str) -> int:
    """The integer that stands for a value, in units of its chunk's scale."""
    sign = -1 if value < 0 else 1
    return 2 * sign if values == "2-bit" and abs(value) >= 1.5 * scale else sign


def value_planes(chunks: Sequence[Sequence[float]], values: str) -> list[bytes]:
    """The value planes of float32 numbers; with "float64", of float64 ones."""
    flat = [value for chunk in chunks for value in chunk]
    if values == "float64":
        return [struct.pack(f"<{len(flat)}d", *flat)]
    if values == "float32":
        return [struct.pack(f"<{len(flat)}f", *flat)]
    pairs = [quantized(chunk, values) for chunk in chunks]
    numbers = [number(level) for _, levels in pairs for level in levels]
    return [packed([scale_code(scale) for scale, _ in pairs], 12), packed(numbers, {"sign": 1, "2-bit": 2}[values])]


def number(level: int) -> int:
    """A level as it is packed: the sign bit, then a bit for "large"."""
    return int(level < 0) + 2 * (abs(level) - 1)


def all_signs(chunks: Sequence[Sequence[float]]) -> bytes:
    """Signs of all coefficients: scales, then whole bytes per chunk, the first sign in the lowest bit."""
    scales, _ = value_planes(chunks, "sign")
    return scales + b"".join(packed([int(value < 0) for value in chunk], 1) for chunk in chunks)


def section(positions: Sequence[Sequence[int]], chunks: Sequence[Sequence[float]], length: int, values: str) -> bytes:
    if values == "sign" and len(chunks[0]) == length:
        return all_signs(chunks)
    return b"".join(index_planes(positions, length) + value_planes(chunks, values))


def message(sections: Sequence[bytes], fields: dict[str, int]) -> bytes:
    """A whole message: 64 bytes of header, the sections, zeros up to a multiple of 8."""
    body = b"".join(sections)
    body += bytes(-len(body) % 8)
    head = struct.pack("<4sHH", b"DeMo", 2, fields.get("flags", 0))
    head += struct.pack("<QII", fields["round_number"], fields["rank"], fields["world_size"])
    head += struct.pack("<QQQ", fields["layout"], fields["settings"], fields.get("fingerprint", 0))
    head += struct.pack("<II", len(body), fields.get("samples", 1))
    total = checksum(head + bytes(8) + body)
    return head + struct.pack("<Q", total) + body
