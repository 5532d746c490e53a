"""Quantizers: how the values of kept coefficients are encoded on the wire.

The sender subtracts the *decoded* values from its momentum, so error feedback covers the quantization. A float
quantizer sends each value as a float. An integer quantizer sends small integers, the levels, and one scale per chunk:
value = level x scale. A scale is the upper 12 bits of a float32 without its sign (8 bits of exponent, 4 of mantissa),
so that levels x scales of all ranks can be summed as integers.

Both have `bits` per value, `planes` for K values per chunk, and `encode`, which returns uint8 [...] for each plane of
finite values; `numbers` decodes the last plane [..., bytes] to values, float32 or wider, or to levels [..., C, K].
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from demopt.core.exact import EXPONENT_BITS, MANTISSA_BITS
from demopt.wire.bits import Plane, pack, unpack

SCALE_BITS = EXPONENT_BITS + MANTISSA_BITS
_SCALE_SHIFT = 32 - 1 - SCALE_BITS  # low mantissa bits of a float32 that a scale drops
_SMALLEST_SCALE = 1 << MANTISSA_BITS  # codes from 1 up to this are subnormal floats: never encoded, always refused


class FloatQuantizer:
    largest_level = 0  # there are no levels, and no scales

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.bits = 8 * dtype.itemsize

    def planes(self, keep: int) -> tuple[Plane, ...]:
        return (Plane(keep * self.dtype.itemsize, 8),)

    def encode(self, values_CK: Tensor) -> list[Tensor]:
        return [values_CK.to(self.dtype).reshape(-1).view(torch.uint8)]

    def numbers(self, plane: Tensor, chunks: int, keep: int) -> Tensor:
        # a copy, because a view as another dtype needs an aligned start
        values = torch.empty(*plane.shape[:-1], chunks, keep, dtype=self.dtype, device=plane.device)
        if values.numel():
            values.view(*plane.shape[:-1], chunks * keep).view(torch.uint8).copy_(plane)
        return values


class IntegerQuantizer:
    """Sends levels -n to -1, 1 to n, as sign (lowest bit) and magnitude - 1. `scale`: of magnitudes [C, K], to [C]."""

    def __init__(self, largest: int, scale: Callable[[Tensor], Tensor]) -> None:
        self.bits = (2 * largest - 1).bit_length()
        self.largest_level = largest
        self._scale = scale

    def planes(self, keep: int) -> tuple[Plane, ...]:
        return Plane(1, SCALE_BITS), Plane(keep, self.bits)

    def encode(self, values_CK: Tensor) -> list[Tensor]:
        values = values_CK.to(torch.float32)
        code_C, numbers = scale_code(self._scale(values.abs())), values < 0
        for magnitude in range(1, self.largest_level):
            numbers = numbers + (values.abs() >= (magnitude + 0.5) * scale_of(code_C).unsqueeze(1)) * 2
        return [pack(code_C, SCALE_BITS), pack(numbers, self.bits)]

    def numbers(self, plane: Tensor, chunks: int, keep: int) -> Tensor:
        numbers = unpack(plane, self.bits, chunks * keep).unflatten(-1, (chunks, keep))
        signs = torch.rsub(numbers & 1 if self.bits > 1 else numbers, 1, alpha=2)  # 1 - 2 x the sign's bit
        return signs * (1 + (numbers >> 1)) if self.bits > 1 else signs


def scale_code(scale_C: Tensor) -> Tensor:
    """Returns the nearest 12-bit code (int64) of each non-negative scale; zero where that code would be subnormal."""
    finer = scale_C.to(torch.float32).view(torch.int32).flatten() >> _SCALE_SHIFT - 1  # one more bit, to round by
    return _nearest_codes(scale_C.device).index_select(0, finer).view_as(scale_C)


@functools.lru_cache(maxsize=16)
def _nearest_codes(device: torch.device) -> Tensor:
    """Returns the nearest code for every code with a bit more: at most the largest finite one, zero for subnormals."""
    codes = (torch.arange(2 << SCALE_BITS, device="cpu") + 1 >> 1).clamp_(max=(255 << MANTISSA_BITS) - 1)
    return codes.masked_fill(codes < _SMALLEST_SCALE, 0).to(device)


def scale_of(codes: Tensor) -> Tensor:
    """Returns the float32 scale of each code; NaN for codes that no encoder writes."""
    return _scales(codes.device)[codes.to(torch.int64)]


@functools.lru_cache(maxsize=16)
def _scales(device: torch.device) -> Tensor:
    """Returns the scale of every code: a look-up is one operation, where computing it takes several."""
    codes = torch.arange(1 << SCALE_BITS, dtype=torch.int32, device="cpu")
    scales = (codes << _SCALE_SHIFT).view(torch.float32)
    unknown = ((codes > 0) & (codes < _SMALLEST_SCALE)) | (codes >= 255 << MANTISSA_BITS)
    return scales.masked_fill(unknown, float("nan")).to(device)


QUANTIZERS: dict[str, FloatQuantizer | IntegerQuantizer] = {
    "float64": FloatQuantizer(torch.float64),
    "float32": FloatQuantizer(torch.float32),
    # two thirds of the mean is near the least-squares scale for the strongest coefficients of a Gaussian
    "2-bit": IntegerQuantizer(2, scale=lambda magnitudes_CK: magnitudes_CK.mean(1) * (2 / 3)),
    "sign": IntegerQuantizer(1, scale=lambda magnitudes_CK: magnitudes_CK.mean(1)),
}
