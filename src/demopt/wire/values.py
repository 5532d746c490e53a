"""Value codecs: how the values of kept coefficients are encoded on the wire.

The sender subtracts the decoded values from its momentum, so error feedback includes the quantisation. A float codec
sends each value as a float. A stepped codec sends small integers, the levels, and one step per chunk: value = level x
step. The step is the upper 12 bits of a float32 without its sign (8 bits of exponent, 4 of mantissa), so that levels x
steps of all ranks can be added as integers.

Shapes: C chunks, K kept.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from demopt.wire.bits import pack, unpack
from demopt.wire.planes import Plane

_STEP_BITS = 12
_STEP_SHIFT = 32 - 1 - _STEP_BITS  # low mantissa bits of a float32 that a step leaves out
_MANTISSA_BITS = 4
_SMALLEST_STEP = 1 << _MANTISSA_BITS  # codes from 1 to below this are subnormal floats: never encoded, and refused


class Codec(ABC):
    """An encoding of the values of chunks as planes."""

    bits: int  # per value, without steps

    @abstractmethod
    def planes(self, keep: int) -> tuple[Plane, ...]:
        """Returns the planes for K values per chunk."""

    @abstractmethod
    def encode(self, values_CK: Tensor) -> list[Tensor]:
        """Encodes finite values as uint8 tensors, one per plane."""

    @abstractmethod
    def decode(self, planes: list[Tensor], chunks: int, keep: int) -> Tensor:
        """Decodes planes [..., bytes] to values [..., C, K], float32 or float64; NaN where a code is invalid."""


class Floats(Codec):
    """Sends each value as a float.

    Example:
        >>> codec = Floats(torch.bfloat16)
        >>> codec.decode(codec.encode(torch.tensor([[1.0, -0.5]])), chunks=1, keep=2)
        tensor([[ 1.0000, -0.5000]])
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.bits = 8 * dtype.itemsize

    def planes(self, keep: int) -> tuple[Plane, ...]:
        return (Plane(keep * self.dtype.itemsize, 8),)

    def encode(self, values_CK: Tensor) -> list[Tensor]:
        return [values_CK.to(self.dtype).reshape(-1).view(torch.uint8)]

    def decode(self, planes: list[Tensor], chunks: int, keep: int) -> Tensor:
        # copied, because a view as another dtype needs an aligned start
        values = torch.empty(*planes[0].shape[:-1], chunks, keep, dtype=self.dtype, device=planes[0].device)
        if values.numel():
            values.view(*planes[0].shape[:-1], chunks * keep).view(torch.uint8).copy_(planes[0])
        return values.to(torch.promote_types(self.dtype, torch.float32))


class Stepped(Codec):
    """Sends levels of `bits` bits and one step per chunk.

    bits = 1: levels -1 and 1, the step is the chunk's mean magnitude. bits = 2: levels -2, -1, 1, 2, the step is two
    thirds of the mean magnitude (near the least squares step for the strongest coefficients of a Gaussian). bits = 8:
    levels -127 to 127, the step is the largest magnitude / 127.

    Example:
        >>> codec = Stepped(bits=1)
        >>> codec.decode(codec.encode(torch.tensor([[3.0, -5.0]])), chunks=1, keep=2)
        tensor([[ 4., -4.]])
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.largest_level = {1: 1, 2: 2, 8: 127}[bits]

    def planes(self, keep: int) -> tuple[Plane, ...]:
        return Plane(1, _STEP_BITS), Plane(keep, self.bits)

    def encode(self, values_CK: Tensor) -> list[Tensor]:
        values = values_CK.to(torch.float32)
        codes_C = step_code(self._step(values.abs()))
        return [pack(codes_C, _STEP_BITS), pack(self._number(values, step_of(codes_C)), self.bits)]

    def decode(self, planes: list[Tensor], chunks: int, keep: int) -> Tensor:
        codes, levels = self.parts(planes, chunks, keep)
        return levels.to(torch.float32) * step_of(codes).unsqueeze(-1)

    def parts(self, planes: list[Tensor], chunks: int, keep: int) -> tuple[Tensor, Tensor]:
        """Decodes int64 step codes [..., C] and levels [..., C, K]; an invalid level makes its chunk's code invalid."""
        codes = unpack(planes[0], _STEP_BITS, chunks)
        numbers = unpack(planes[1], self.bits, chunks * keep)
        levels = self._level(numbers.view(*numbers.shape[:-1], chunks, keep))
        if self.bits == 8:
            codes = codes.masked_fill((levels == -128).any(-1), (1 << _STEP_BITS) - 1)
        return codes, levels

    def _step(self, magnitudes_CK: Tensor) -> Tensor:
        if self.bits == 8:
            return magnitudes_CK.amax(1) / 127
        return magnitudes_CK.mean(1) * (1.0 if self.bits == 1 else 2 / 3)

    def _number(self, values_CK: Tensor, step_C: Tensor) -> Tensor:
        """Quantises values to levels, as the unsigned integers to pack; `_level` maps these back to levels."""
        negative = values_CK < 0
        if self.bits == 1:
            return negative.to(torch.int64)
        if self.bits == 2:
            large = values_CK.abs() >= 1.5 * step_C.unsqueeze(1)
            return negative.to(torch.int64) + 2 * large.to(torch.int64)
        divisor = step_C.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
        return (values_CK / divisor).round_().clamp_(-127, 127).to(torch.int64) & 255

    def _level(self, numbers: Tensor) -> Tensor:
        if self.bits == 1:
            return 1 - 2 * numbers
        if self.bits == 2:
            return (1 - 2 * (numbers & 1)) * (1 + (numbers >> 1))
        return numbers - ((numbers & 128) << 1)


def step_code(step_C: Tensor) -> Tensor:
    """Returns the nearest 12-bit code (int64) of each non-negative step; zero where that code would be subnormal.

    Example:
        >>> step_code(torch.tensor([0.0, 1.0]))
        tensor([   0, 2032])
    """
    raised = step_C.to(torch.float32).view(torch.int32) + (1 << _STEP_SHIFT - 1)
    codes = (raised >> _STEP_SHIFT).to(torch.int64).clamp_(max=(255 << _MANTISSA_BITS) - 1)
    return codes.masked_fill(codes < _SMALLEST_STEP, 0)


def step_of(codes: Tensor) -> Tensor:
    """Returns the float32 step of each code; NaN for codes that no encoder writes.

    Example:
        >>> step_of(torch.tensor([0, 2032, 4095]))
        tensor([0., 1., nan])
    """
    step = (codes.to(torch.int32) << _STEP_SHIFT).view(torch.float32)
    unknown = ((codes > 0) & (codes < _SMALLEST_STEP)) | (codes >= 255 << _MANTISSA_BITS)
    return step.masked_fill(unknown, float("nan"))


CODECS: dict[str, Codec] = {
    "float64": Floats(torch.float64),
    "float32": Floats(torch.float32),
    "bfloat16": Floats(torch.bfloat16),
    "int8": Stepped(8),
    "2-bit": Stepped(2),
    "sign": Stepped(1),
}

VALUES = tuple(CODECS)
