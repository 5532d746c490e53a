"""Value codecs: how the values of kept coefficients are encoded on the wire.

The sender subtracts the decoded values from its momentum, so error feedback includes the quantisation. A float codec
sends each value as a float. A stepped codec sends small integers, the levels, and one step per chunk: value = level x
step. The step is the upper 12 bits of a float32 without its sign (8 bits of exponent, 4 of mantissa), so that levels x
steps of all ranks can be added as integers.

Shapes: C chunks, K kept.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from demopt.wire.bits import Plane, pack, unpack

_STEP_BITS = 12
_STEP_SHIFT = 32 - 1 - _STEP_BITS  # low mantissa bits of a float32 that a step leaves out
_MANTISSA_BITS = 4
_SMALLEST_STEP = 1 << _MANTISSA_BITS  # codes from 1 to below this are subnormal floats: never encoded, and refused


class Codec(ABC):
    """An encoding of the values of chunks as planes."""

    bits: int  # per value, without steps
    dtype = torch.float32  # of decoded values

    @abstractmethod
    def planes(self, keep: int) -> tuple[Plane, ...]:
        """Returns the planes for K values per chunk."""

    @abstractmethod
    def encode(self, values_CK: Tensor) -> list[Tensor]:
        """Encodes finite values as uint8 tensors, one per plane."""

    @abstractmethod
    def decode(self, planes: list[Tensor], chunks: int, keep: int) -> Tensor:
        """Decodes planes [..., bytes] to values [..., C, K]; NaN where a code is invalid."""


class Floats(Codec):
    """Sends each value as a float.

    Examples:
        >>> codec = Floats(torch.bfloat16)
        >>> codec.decode(codec.encode(torch.tensor([[1.0, -0.5]])), chunks=1, keep=2)
        tensor([[ 1.0000, -0.5000]])
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.sent_dtype = dtype
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.bits = 8 * dtype.itemsize

    def planes(self, keep: int) -> tuple[Plane, ...]:
        return (Plane(keep * self.sent_dtype.itemsize, 8),)

    def encode(self, values_CK: Tensor) -> list[Tensor]:
        return [values_CK.to(self.sent_dtype).reshape(-1).view(torch.uint8)]

    def decode(self, planes: list[Tensor], chunks: int, keep: int) -> Tensor:
        # copied, because a view as another dtype needs an aligned start
        values = torch.empty(*planes[0].shape[:-1], chunks, keep, dtype=self.sent_dtype, device=planes[0].device)
        if values.numel():
            values.view(*planes[0].shape[:-1], chunks * keep).view(torch.uint8).copy_(planes[0])
        return values.to(self.dtype)


class Stepped(Codec):
    """Sends levels, which are small integers, and one step per chunk: value = level x step.

    `levels` are all there are; `step` returns the step [C] of chunks from their magnitudes [C, K]. Subclasses say how
    values become levels, and which number in a message stands for which level.
    """

    def __init__(self, levels: Sequence[int], step: Callable[[Tensor], Tensor]) -> None:
        self.bits = (len(levels) - 1).bit_length()
        self.largest_level = max(levels)
        self._spare = len(levels) < 1 << self.bits  # whether some numbers stand for no level
        self._step = step

    def planes(self, keep: int) -> tuple[Plane, ...]:
        return Plane(1, _STEP_BITS), Plane(keep, self.bits)

    def encode(self, values_CK: Tensor) -> list[Tensor]:
        values = values_CK.to(torch.float32)
        codes_C = step_code(self._step(values.abs()))
        return [pack(codes_C, _STEP_BITS), pack(self._numbers(values, step_of(codes_C).unsqueeze(1)), self.bits)]

    def decode(self, planes: list[Tensor], chunks: int, keep: int) -> Tensor:
        codes, levels = self.parts(planes, chunks, keep)
        return levels.to(torch.float32) * step_of(codes).unsqueeze(-1)

    def parts(self, planes: list[Tensor], chunks: int, keep: int) -> tuple[Tensor, Tensor]:
        """Decodes int64 step codes [..., C] and levels [..., C, K]; an invalid level makes its chunk's code invalid."""
        codes = unpack(planes[0], _STEP_BITS, chunks)
        levels = self._levels(unpack(planes[1], self.bits, chunks * keep)).unflatten(-1, (chunks, keep))
        if self._spare:
            unknown = (levels < -self.largest_level) | (levels > self.largest_level)
            codes = codes.masked_fill(unknown.any(-1), (1 << _STEP_BITS) - 1)
        return codes, levels

    @abstractmethod
    def _numbers(self, values_CK: Tensor, steps_C1: Tensor) -> Tensor:
        """Quantises values to levels, as the numbers (int64) to pack."""

    @abstractmethod
    def _levels(self, numbers: Tensor) -> Tensor:
        """Returns the level of each number."""


class Signed(Stepped):
    """Levels without a zero: -n to -1 and 1 to n. The lowest bit of a number is the sign, the others the magnitude - 1.

    Examples:
        >>> codec = Signed(1, step=lambda magnitudes_CK: magnitudes_CK.mean(1))
        >>> codec.decode(codec.encode(torch.tensor([[3.0, -5.0]])), chunks=1, keep=2)
        tensor([[ 4., -4.]])
    """

    def __init__(self, largest: int, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__([*range(-largest, 0), *range(1, largest + 1)], step)

    def _numbers(self, values_CK: Tensor, steps_C1: Tensor) -> Tensor:
        numbers = (values_CK < 0).to(torch.int64)
        for magnitude in range(1, self.largest_level):
            numbers += (values_CK.abs() >= (magnitude + 0.5) * steps_C1) * 2
        return numbers

    def _levels(self, numbers: Tensor) -> Tensor:
        return (1 - 2 * (numbers & 1)) * (1 + (numbers >> 1)) if self.bits > 1 else 1 - 2 * numbers


class Rounded(Stepped):
    """Levels -n to n, the nearest to value / step, as two's complement.

    Examples:
        >>> codec = Rounded(127, step=lambda magnitudes_CK: magnitudes_CK.amax(1) / 127)
        >>> codec.decode(codec.encode(torch.tensor([[127.0, -5.0]])), chunks=1, keep=2)
        tensor([[127.,  -5.]])
    """

    def __init__(self, largest: int, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__(range(-largest, largest + 1), step)

    def _numbers(self, values_CK: Tensor, steps_C1: Tensor) -> Tensor:
        largest, divisor_C1 = self.largest_level, steps_C1.clamp(min=torch.finfo(torch.float32).tiny)
        return (values_CK / divisor_C1).round_().clamp_(-largest, largest).to(torch.int64) & (1 << self.bits) - 1

    def _levels(self, numbers: Tensor) -> Tensor:
        return numbers - ((numbers & 1 << self.bits - 1) << 1)


def step_code(step_C: Tensor) -> Tensor:
    """Returns the nearest 12-bit code (int64) of each non-negative step; zero where that code would be subnormal.

    Examples:
        >>> step_code(torch.tensor([0.0, 1.0]))
        tensor([   0, 2032])
    """
    raised = step_C.to(torch.float32).view(torch.int32) + (1 << _STEP_SHIFT - 1)
    codes = (raised >> _STEP_SHIFT).to(torch.int64).clamp_(max=(255 << _MANTISSA_BITS) - 1)
    return codes.masked_fill(codes < _SMALLEST_STEP, 0)


def step_of(codes: Tensor) -> Tensor:
    """Returns the float32 step of each code; NaN for codes that no encoder writes.

    Examples:
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
    "int8": Rounded(127, step=lambda magnitudes_CK: magnitudes_CK.amax(1) / 127),
    # two thirds of the mean is near the least squares step for the strongest coefficients of a Gaussian
    "2-bit": Signed(2, step=lambda magnitudes_CK: magnitudes_CK.mean(1) * (2 / 3)),
    "sign": Signed(1, step=lambda magnitudes_CK: magnitudes_CK.mean(1)),
}

VALUES = tuple(CODECS)
