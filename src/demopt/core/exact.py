"""Decodes in integers, so that every machine computes the same bits.

All sums here are over integers in float32 tensors. Every partial sum stays below 2**24, where float32 adds exactly, so
order, blocking, threads and devices do not matter. Rounding is elementwise: after scaling by a power of two, or in one
correctly rounded division.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from demopt.core.aggregate import aggregate, aggregate_at_once
from demopt.core.constants import constant
from demopt.core.transform import Bases, basis, times_rows

_EXACT = 1 << 24  # float32 represents every integer up to this
_BASIS_LIMIT = 127  # largest entry of an integer basis
_TIE = 1e-9  # two machines' float64 cosines differ by far less; entries other than halves are further from a half
_OPERAND_BITS = 11  # of operands of products: exact even where hardware multiplies float32 as TF32
MANTISSA_BITS = 4  # of the code of a scale; the bits above are the exponent
EXPONENT_BITS = 8
_GUARD_BITS = 3  # extra low bits when scales are aligned to the largest exponent
_LARGEST_TOTAL = _EXACT >> MANTISSA_BITS + 1 + _GUARD_BITS  # of weights: sums of signs are exact with all guard bits


@functools.lru_cache(maxsize=256)
def integer_basis(name: str, size: int, device: str = "cpu") -> Tensor:
    """Returns the basis [size, size] times 127 / its largest entry, rounded. Do not modify it."""
    exact = basis(name, size)
    return rounded(exact * (_BASIS_LIMIT / exact.abs().max())).to(torch.float32).to(device)


def rounded(entries: Tensor) -> Tensor:
    """Rounds to nearest, halves away from zero, even where float64 misses the half by a rounding error.

    Examples:
        >>> rounded(torch.tensor([63.5 - 1e-12, -63.5 + 1e-12, 63.4], dtype=torch.float64))
        tensor([ 64., -64.,  63.], dtype=torch.float64)
    """
    return entries.sign() * (entries.abs() + 0.5 + _TIE).floor()


def basis_unit(name: str, size: int) -> float:
    """Returns the factor that makes the integer basis orthonormal again."""
    return float(basis(name, size).abs().max()) / _BASIS_LIMIT


def aggregate_integers(
    positions_WCK: Tensor,
    integers: tuple[Tensor, Tensor],
    largest_level: int,
    reduction: str,
    pair_2CN: Tensor,
    by_sign: bool,
    top_C: Tensor | None,
) -> Tensor | None:
    """Exact `aggregate` for levels and codes of scales; returns the unit [C] of the integers in `out`; `by_sign`: None.

    `integers` are levels [W, C, K], none larger than `largest_level`, and codes [W, C]; `top_C` their
    `largest_exponents`, if known; `pair_2CN` (float32) is `out`, and a spare. A chunk's scales are aligned to their
    largest exponent over the ranks, as integers with `guard_bits` bits below the mantissa; lower bits are rounded off.
    """
    levels_WCK, codes_WC = integers
    guard = guard_bits(levels_WCK.shape[0], largest_level)
    aligned_WC, top_C = _aligned(codes_WC, guard, top_C)
    values_WCK = levels_WCK * aligned_WC.unsqueeze(-1)
    if pair_2CN.is_cpu:
        aggregate(positions_WCK, values_WCK, reduction, *pair_2CN)
    else:
        aggregate_at_once(positions_WCK, values_WCK, reduction, pair_2CN)
    return None if by_sign else _tables(guard, top_C.device)[1][top_C]


def aggregate_signs(
    negative_WCN: Tensor, codes_WC: Tensor, weights: Sequence[int], out_CN: Tensor, by_sign: bool, top_C: Tensor | None
) -> Tensor | None:
    """The exact weighted mean of signs (`negative_WCN`: bool) times scales; all else as in `aggregate_integers`."""
    guard = guard_bits(sum(weights), 1)
    aligned_WC, top_C = _aligned(codes_WC, guard, top_C)
    if set(weights) != {1}:
        aligned_WC = aligned_WC * constant(weights, aligned_WC.dtype, aligned_WC.device).unsqueeze(-1)
    positive_WC1 = aligned_WC.unsqueeze(-1)
    negative_WC1 = 0 - positive_WC1  # not -x, which would give zero a sign
    for rank, is_negative_CN in enumerate(negative_WCN):
        if rank == 0:
            torch.where(is_negative_CN, negative_WC1[0], positive_WC1[0], out=out_CN)
        else:
            out_CN.add_(torch.where(is_negative_CN, negative_WC1[rank], positive_WC1[rank]))
    if sum(weights) > 1:  # by a tensor: for a Python number, a GPU multiplies by its reciprocal
        out_CN.div_(constant((sum(weights),), out_CN.dtype, out_CN.device))
    return None if by_sign else _tables(guard, top_C.device)[1][top_C]


@functools.lru_cache(maxsize=256)
def weights_of(samples: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the ranks' weights in a mean: whole numbers, in the ratio of their samples, with an exact sum.

    Where an exact sum does not allow the ratio's numbers, weights are halved and rounded down, but to 1 at least.

    Examples:
        >>> weights_of((8, 8, 8, 8)), weights_of((32, 48)), weights_of((1, 10**6))
        ((1, 1, 1, 1), (2, 3), (1, 62500))
    """
    divisor = math.gcd(*samples)
    weights = tuple(count // divisor for count in samples)
    while sum(weights) > _LARGEST_TOTAL:
        weights = tuple(max(1, weight // 2) for weight in weights)
        if len(weights) > _LARGEST_TOTAL:
            raise ValueError(f"exact sums of {len(weights)} ranks do not fit; use exact=False")
    return weights


def largest_exponents(codes_WC: Tensor) -> Tensor:
    """Returns the largest exponent of each chunk's scales over the ranks, [C]."""
    return codes_WC.amax(0) >> MANTISSA_BITS


def _aligned(codes_WC: Tensor, guard: int, top_C: Tensor | None) -> tuple[Tensor, Tensor]:
    """Aligns each chunk's scales to their largest exponent; returns integers [W, C] and that exponent [C]."""
    codes_WC = codes_WC.to(torch.int64)
    top_C = largest_exponents(codes_WC) if top_C is None else top_C
    return _tables(guard, codes_WC.device)[0][codes_WC, top_C], top_C


@functools.lru_cache(maxsize=64)
def _tables(guard: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tables for `_aligned`: mantissas, with `guard` bits below, by code and largest exponent; units by exponent."""
    exponents = torch.arange(1 << EXPONENT_BITS, device="cpu")
    codes = torch.arange(1 << EXPONENT_BITS + MANTISSA_BITS, device="cpu")
    mantissas = (codes & (1 << MANTISSA_BITS) - 1) + (1 << MANTISSA_BITS) << guard
    mantissas = mantissas.masked_fill(codes >> MANTISSA_BITS == 0, 0)
    below = (exponents - (codes >> MANTISSA_BITS).unsqueeze(1)).clamp(0, 30)
    aligned = (mantissas.unsqueeze(1) + (1 << below >> 1)) >> below
    units = _power_of_two(exponents - 127 - MANTISSA_BITS - guard)
    return aligned.to(torch.float32).to(device), units.to(device)


@functools.lru_cache(maxsize=256)
def guard_bits(world_size: int, largest_level: int) -> int:
    """Returns the bits below a mantissa, at most 3, that keep sums of all ranks exact; ValueError if even 0 do not."""
    spare = math.floor(math.log2(_EXACT / (world_size * largest_level << MANTISSA_BITS + 1)))
    if spare < 0:
        raise ValueError(f"exact sums of {world_size} ranks at levels to {largest_level} do not fit; use exact=False")
    return min(_GUARD_BITS, spare)


def inverse(chunks_Crc: Tensor, bases: Bases, spare_Crc: Tensor, positive_zeros: bool = False) -> list[Tensor]:
    """Computes A^T Z B in place for integer bases; returns units [C] whose product is the integers' unit.

    Before each of the two passes the chunk is scaled by a power of two and rounded, so that no sum can exceed 2**24.
    The units leave out the bases' own. `positive_zeros`: no zero is negative, as after adding +0.
    """
    count, r, c = chunks_Crc.shape
    units = [_shrink(chunks_Crc, r)] if r > 1 else []
    times_rows(chunks_Crc, bases[0].T, spare_Crc)
    units.append(_shrink(spare_Crc, c))
    flat, out = spare_Crc.view(count * r, c), chunks_Crc.view(count * r, c)
    if positive_zeros and not out.is_cpu:  # a GPU adds a vector within the product
        torch.addmm(constant((0.0,) * c, out.dtype, out.device), flat, bases[1], out=out)
    else:
        torch.mm(flat, bases[1], out=out)
        if positive_zeros:
            out.add_(0.0)
    return units


def _shrink(chunks_Crc: Tensor, terms: int) -> Tensor:
    """Scales chunks by powers of two, and rounds: `terms` products then sum exactly. Returns inverse powers, [C]."""
    if chunks_Crc.is_cpu:  # over rows first: on a CPU, reductions over a strided dimension are by far the fastest
        largest_C = torch.maximum(chunks_Crc.amax(1), chunks_Crc.amin(1).neg_()).amax(1).abs_()  # -0 has a sign
    else:
        largest_C = torch.linalg.vector_norm(chunks_Crc, math.inf, dim=(1, 2))
    exponents_C = largest_C.view(torch.int32) >> 23  # biased, as floats store them
    powers_2C = _powers(operand_bits(terms), exponents_C.device).index_select(1, exponents_C)
    chunks_Crc.mul_(powers_2C[0].view(-1, 1, 1)).round_()
    return powers_2C[1]


@functools.lru_cache(maxsize=64)
def _powers(bits: int, device: torch.device) -> Tensor:
    """Returns [2, 256]: 2**(bits - e) and its inverse, by the biased exponent of floats below 2**e."""
    exponents = torch.arange(256, device="cpu") - 126
    exponents[0] = 0  # of zero
    return torch.stack((_power_of_two(bits - exponents), _power_of_two(exponents - bits))).to(device)


@functools.lru_cache(maxsize=256)
def operand_bits(terms: int) -> int:
    """Returns the bits of the integers that may be multiplied by a basis of `terms` rows."""
    return min(_OPERAND_BITS, math.floor(math.log2(_EXACT / (_BASIS_LIMIT * terms))))


def _power_of_two(exponents: Tensor) -> Tensor:
    """Builds float32 2**exponents from bits; exponents below the normal range give the smallest normal number."""
    return (exponents.clamp(-126, 127) + 127 << 23).to(torch.int32).view(torch.float32)
