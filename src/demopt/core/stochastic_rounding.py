"""Rounds float32 to bfloat16 stochastically: up or down, with the probabilities that keep the mean.

Rounded to the nearest, a weight of 1 keeps no change below 2^-9, and so no weight decay with lr x wd below that. The
noise is made of integers, by step, parameter and place alone: all ranks round in the same way, on any hardware.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

_LEVELS = 1 << 16  # float32 numbers for each bfloat16 number; also how many numbers of noise there are
_ALL = (1 << 64) - 1


def to_bfloat16(values: Tensor, seed: tuple[int, int], first: int = 0) -> None:
    """Rounds contiguous float32 values, in place, to numbers that bfloat16 holds: places [first, first + n) of a seed.

    `seed` is (step, number of the parameter). Values that bfloat16 represents stay as they are.

    Examples:
        >>> values = torch.full((1 << 16,), 1 + 2.0**-10)  # bfloat16 numbers are 1 and 1 + 2^-7
        >>> to_bfloat16(values, seed=(3, 0))
        >>> values.unique().tolist(), values.mean().item() == 1 + 2.0**-10
        ([1.0, 1.0078125], True)
    """
    bits, noise = values.view(-1).view(torch.int32), _noise(str(values.device))
    done = 0
    while done < len(bits):
        run, inside = divmod(first + done, _LEVELS)
        count = min(len(bits) - done, _LEVELS - inside)
        start = inside + _mixed(*seed, run) % _LEVELS
        bits[done : done + count] += noise[start : start + count]  # as a whole number, a float grows with its magnitude
        done += count
    bits.bitwise_and_(-_LEVELS)


def rows_to_bfloat16(values_CN: Tensor, step: int, runs: Sequence[tuple[int, int, int, int]]) -> None:
    """Rounds the rows of several parameters as `to_bfloat16` does, in few operations: an accelerator pays for each.

    `runs` are first row, number of rows, number of the parameter, and which of the parameter's rows is the first.

    Examples:
        >>> values = torch.full((6, 4), 1 + 2.0**-10)
        >>> one, other = values[:2].clone(), values[2:].clone()
        >>> rows_to_bfloat16(values, 3, [(0, 2, 7, 0), (2, 4, 8, 5)])
        >>> to_bfloat16(one, (3, 7)), to_bfloat16(other, (3, 8), first=5 * 4)
        (None, None)
        >>> torch.equal(values, torch.cat((one, other)))
        True
    """
    length, starts = values_CN.shape[1], torch.zeros(len(values_CN), dtype=torch.int64)
    if _LEVELS % length:  # a row may then have numbers of two runs of noise
        for first, rows, number, place in runs:
            to_bfloat16(values_CN[first : first + rows], (step, number), place * length)
        return
    for first, rows, number, place in runs:
        places = torch.arange(place, place + rows) * length
        mixed = _mixed_by(places // _LEVELS, _mixed(step, number))
        starts[first : first + rows] = places % _LEVELS + mixed
    starts = starts.to(values_CN.device, non_blocking=True)
    bits = values_CN.view(torch.int32)
    bits += _noise(str(values_CN.device)).unfold(0, length, 1)[starts]
    bits.bitwise_and_(-_LEVELS)


def _mixed_by(last: Tensor, state: int) -> Tensor:
    """Returns the lowest 16 bits of `_mixed`, for many last numbers after the same others, whose state is given.

    Examples:
        >>> _mixed_by(torch.tensor([5, 6]), _mixed(1, 2)).tolist() == [_mixed(1, 2, last) % 2**16 for last in (5, 6)]
        True
    """

    def signed(number: int) -> int:
        return number - (1 << 64) if number >> 63 else number

    def shifted(mixed: Tensor, by: int) -> Tensor:  # as of numbers without a sign
        return mixed >> by & (1 << 64 - by) - 1

    mixed = last + signed((state + 0x9E3779B97F4A7C15) & _ALL)
    mixed = (mixed ^ shifted(mixed, 30)) * signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ shifted(mixed, 27)) * signed(0x94D049BB133111EB)
    return (mixed ^ shifted(mixed, 31)) & _LEVELS - 1


@functools.lru_cache(maxsize=16)
def _noise(device: str) -> Tensor:
    """Returns the numbers [0, 2^16), in an order without pattern, twice over: 2^16 in a row are each of them once.

    Examples:
        >>> len(set(_noise("cpu")[5 : 5 + (1 << 16)].tolist())) == 1 << 16
        True
    """
    numbers = torch.arange(_LEVELS)
    for factor, shift in ((0x9E37, 7), (0x6A3D, 9), (0xB531, 8)):  # each odd, so no two numbers become one
        numbers = (numbers + 0x3C6E) * factor % _LEVELS
        numbers ^= numbers >> shift
    return numbers.repeat(2).to(device, torch.int32)


def _mixed(*numbers: int) -> int:
    """Returns a whole number that looks drawn at random, the same for the same numbers (Steele et al. 2014's mixer).

    Examples:
        >>> _mixed(1, 2) == _mixed(1, 2), _mixed(1, 2) == _mixed(2, 1)
        (True, False)
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _ALL
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _ALL
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _ALL
        state ^= state >> 31
    return state
