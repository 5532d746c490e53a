"""Orthonormal transforms of chunks: Z = A X B^T and X = A^T Z B, with one basis for rows and one for columns.

Shapes: X, Z [C, r, c]; A [r, r]; B [c, c]. The rows of a basis are its basis vectors.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

_ROUNDING = 1e-12
Bases = tuple[Tensor, Tensor]  # for rows, and for columns
Factors = tuple[float, float]  # on the present values, and on the added ones


def _dct(size: int) -> Tensor:
    """Orthonormal DCT-II: the cosine of each element's angle, reduced to one turn first."""
    angles = (2 * torch.arange(size, device="cpu") + 1) * torch.arange(size, device="cpu").unsqueeze(1) % (4 * size)
    basis: Tensor = torch.cos(angles.double() * (math.pi / (2 * size))) * math.sqrt(2 / size)
    basis[0] = math.sqrt(1 / size)
    return basis


TRANSFORMS: dict[str, Callable[[int], Tensor]] = {
    "dct": _dct,
    "identity": lambda size: torch.eye(size, dtype=torch.float64, device="cpu"),
}
#: The transforms' numbers in saved states; 1 and 2 were other transforms and are not reused.
TRANSFORM_NUMBERS = {"dct": 0, "identity": 3}


@functools.lru_cache(maxsize=256)
def basis(name: str, size: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    """Returns a transform's orthonormal basis [size, size], built in float64 and rounded to dtype. Do not modify it.

    Below float64, entries that are zero in exact arithmetic are zero: rounding errors differ between machines.
    """
    exact = TRANSFORMS[name](size)
    if dtype != torch.float64:
        exact = exact.where(exact.abs() > _ROUNDING, 0.0)
    return exact.to(dtype=dtype, device=device).contiguous()


def accumulate(Z_Crc: Tensor, X_Crc: Tensor, bases: Bases, spare_Crc: Tensor, factors: Factors) -> None:
    """Z <- b Z + s A X B^T for every chunk, in place; `factors` are b and s. Overwrites the spare."""
    times_rows(X_Crc, bases[0], spare_Crc)
    count, r, c = X_Crc.shape
    flat = Z_Crc.view(count * r, c)
    torch.addmm(flat, spare_Crc.view(count * r, c), bases[1].T, beta=factors[0], alpha=factors[1], out=flat)


def inverse(chunks_Crc: Tensor, bases: Bases, spare_Crc: Tensor) -> None:
    """Z <- A^T Z B for every chunk, in place; overwrites the spare."""
    times_rows(chunks_Crc, bases[0].T, spare_Crc)
    count, r, c = chunks_Crc.shape
    torch.mm(spare_Crc.view(count * r, c), bases[1], out=chunks_Crc.view(count * r, c))


def times_rows(chunks_Crc: Tensor, rows_rr: Tensor, out_Crc: Tensor) -> None:
    """out[i] = A chunks[i]; chunks of one row (vectors) are only scaled by A's single entry, which is +-1."""
    count, r, _ = chunks_Crc.shape
    if r == 1:
        torch.mul(chunks_Crc, rows_rr.view(1, 1, 1), out=out_Crc)
    else:
        torch.bmm(rows_rr.expand(count, r, r), chunks_Crc, out=out_Crc)
