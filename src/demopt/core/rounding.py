"""Adds to parameters and rounds the result once; to bfloat16 at random, up or down, so that the mean is kept.

Rounded to nearest, a weight of 1 would lose every change below 2^-9, and so weight decay with lr x wd below that. The
noise is integers that depend only on round, parameter and place, so all ranks round alike on any hardware.
"""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_LEVELS = 1 << 16  # float32 numbers per bfloat16 number, and the number of noise values


def decay_and_add(target: Tensor, direction: Tensor, decay: float, seed: tuple[int, int] | None = None) -> None:
    """target <- decay target + direction, in place; a narrower target is rounded once.

    `seed`: the round's number, and that of a matrix or a batch of them, which is rounded at random if it is bfloat16.
    """
    wide = target if target.dtype.itemsize >= direction.dtype.itemsize else target.to(direction.dtype)
    if decay != 1:
        wide.mul_(decay)
    wide.add_(direction)
    if wide is target:
        return
    if seed is not None and target.dtype == torch.bfloat16:
        wide = wide.contiguous()
        rows, (round_number, number) = wide.flatten(0, -2), seed
        to_bfloat16(rows, round_number, [(0, len(rows), number, 0)])
    target.copy_(wide)


def to_bfloat16(values_CN: Tensor, round_number: int, spans: Sequence[tuple[int, int, int, int]]) -> None:
    """Rounds contiguous float32 rows of parameters, in place, to numbers of bfloat16; such numbers stay unchanged.

    Each of `spans` has its first row, its number of rows, the parameter's number, and its first row in the parameter. A
    few operations round all spans, because an accelerator pays for each operation.

    Examples:
        >>> values = torch.full((2, 1 << 16), 1 + 2.0**-10)  # bfloat16 numbers are 1 and 1 + 2^-7
        >>> to_bfloat16(values, 3, [(0, 2, 7, 0)])
        >>> values.unique().tolist(), values.mean().item() == 1 + 2.0**-10
        ([1.0, 1.0078125], True)
    """
    numbers_C, rows_C = torch.zeros(2, len(values_CN), dtype=torch.int64, device="cpu")
    for first, count, number, place in spans:
        numbers_C[first : first + count] = number
        rows_C[first : first + count] = torch.arange(place, place + count, device="cpu")
    mixed_C = splitmix64(splitmix64(splitmix64(torch.tensor(round_number, device="cpu")) + numbers_C) + rows_C)
    starts_C = (mixed_C % _LEVELS).to(values_CN.device, non_blocking=True)  # of the noise for each row
    noise, bits = _noise(str(values_CN.device)), values_CN.view(torch.int32)
    for part in bits.split(_LEVELS, dim=1):
        part += noise.unfold(0, part.shape[1], 1)[starts_C]  # a float's bits, as an integer, grow with its magnitude
    bits.bitwise_and_(-_LEVELS)


@functools.lru_cache(maxsize=16)
def _noise(device: str) -> Tensor:
    """Returns the numbers [0, 2^16) in an order without pattern, twice: any 2^16 in a row contain each number once."""
    numbers = torch.arange(_LEVELS, device="cpu")
    for factor, shift in ((0x9E37, 7), (0x6A3D, 9), (0xB531, 8)):  # each odd, so no two numbers become one
        numbers = (numbers + 0x3C6E) * factor % _LEVELS
        numbers ^= numbers >> shift
    return numbers.repeat(2).to(device, torch.int32)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products have the precision of their factors, even if a script steps in autocast."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def splitmix64(x: Tensor) -> Tensor:
    """Mixes each int64, as the finaliser of splitmix64 (Steele, Lea, Flood 2014): no two numbers become one."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)
