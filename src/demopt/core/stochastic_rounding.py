"""Rounds float32 to bfloat16 stochastically: up or down, with the probabilities that keep the mean.

Rounded to the nearest, a weight of 1 keeps no change below 2^-9, and so no weight decay with lr x wd below that. The
noise is made of integers, by step, parameter and place alone: all ranks round in the same way, on any hardware.
"""

import functools

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
