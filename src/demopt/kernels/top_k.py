"""The kernels of top_k.c for one chunk group: its strongest coefficients, and updates by sign that decode them.

Shapes: W ranks, C chunks of a chunk group, N elements in a chunk (r rows, c columns), K kept.
"""

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from demopt.core import exact
from demopt.core.chunking import Chunking
from demopt.kernels.chunk import (
    POINTER,
    REAL,
    WHOLE,
    Basis,
    Folded,
    column_of,
    members_of,
    padded,
    read_from,
    run,
)

#: Positions [W, C, K], levels [W, C, K] and codes of scales [W, C] of checked coefficients, of any integer dtypes.
Integers = tuple[Tensor, Tensor, Tensor]


class _Extract(ctypes.Structure):
    _fields_ = [
        ("members", POINTER),
        *((name, WHOLE) for name in ("count", "chunks", "r", "c")),
        ("momentum", POINTER),
        *((name, Basis) for name in ("rows", "columns")),
        *((name, REAL) for name in ("decay", "scale")),
        ("keep", WHOLE),
        *((name, POINTER) for name in ("positions", "values")),
        ("next", WHOLE),
    ]


class _Apply(ctypes.Structure):
    _fields_ = [
        ("members", POINTER),
        *((name, WHOLE) for name in ("count", "chunks", "r", "c", "world_size", "keep")),
        *((name, POINTER) for name in ("positions", "levels", "codes")),
        *((name, WHOLE) for name in ("guard", "by_senders")),
        *((name, POINTER) for name in ("rows", "columns")),
        *((name, WHOLE) for name in ("folded", "row_bits", "column_bits")),
        *((name, REAL) for name in ("decay", "step")),
        *((name, WHOLE) for name in ("store", "next")),
    ]


class TopKKernel:
    """The kernels for chunks of one shape: `extract`, and `apply` and `decode`, by sign alone, with integer bases.

    Everything that depends on shapes and bases alone is laid out once, at construction.
    """

    def __init__(
        self,
        chunkings: Sequence[Chunking],
        bases: tuple[Tensor, Tensor],
        inverse_bases: tuple[Tensor, Tensor],
        keep: int,
        largest_level: int,
    ) -> None:
        r, c = self._shape = (len(bases[0]), len(bases[1]))
        self._keep = keep
        self._largest_level = largest_level
        self._rows, self._columns = Folded(bases[0]), Folded(bases[1], of_columns=True, transposed=True)
        rows, columns = inverse_bases
        self._halved = even_and_odd(columns)
        self._inverse_rows = padded(rows)
        self._inverse_columns = padded(columns[:, : c // 2] if self._halved else columns)
        self._operand_bits = exact.operand_bits(r), exact.operand_bits(c)
        self._members = members_of(chunkings)
        self._chunks = sum(whole.chunks for whole in chunkings)

    def extract(
        self,
        gradients: Iterable[Tensor | None],
        minus: Iterable[Tensor | None] | None,
        momentum_Crc: Tensor,
        factors: tuple[float, float],
    ) -> tuple[Tensor, Tensor]:
        """Does `transform.accumulate` and `top_k.strongest` in one pass over gradients and momentum.

        The momentum [C, r, c] is updated in place; `factors` are its decay and the gradients' scale; `minus` is
        subtracted from the gradients. Returns positions [C, K] (int64, ascending) and values [C, K] (float32).
        """
        alive = read_from(self._members, gradients, minus)
        positions = torch.empty(self._chunks, self._keep, dtype=torch.int64)
        values = torch.empty(self._chunks, self._keep)
        job = _Extract(
            ctypes.addressof(self._members), len(self._members), self._chunks, *self._shape, momentum_Crc.data_ptr(),
            self._rows.struct, self._columns.struct, *factors, self._keep, positions.data_ptr(), values.data_ptr(),
            0,
        )  # fmt: skip
        run("top_k", job, momentum_Crc.numel())
        del alive
        return positions, values

    def apply(
        self, parameters: Iterable[Tensor], integers: Integers, reduction: str, factors: tuple[float, float]
    ) -> None:
        """X <- decay X + step sign(U), for contiguous float32 parameters: the bits of `exact` and `rules.sign`.

        The coefficients are those of all chunks; `factors` are decay and step.
        """
        for member, parameter in zip(self._members, parameters, strict=True):
            member.data, member.is_bfloat16, member.minus = parameter.data_ptr(), False, None
        self._decode(self._members, integers, reduction, (*factors, 0))

    def decode(self, integers: Integers, reduction: str, out_Crc: Tensor) -> None:
        """Writes the signs of U of some chunks to `out_Crc` (float32)."""
        self._decode(column_of(out_Crc), integers, reduction, (1.0, 0.0, 1))

    def _decode(self, members: Any, integers: Integers, reduction: str, ending: tuple[float, float, int]) -> None:
        dtypes = (torch.int16, torch.int8, torch.int16)
        positions, levels, codes = (each.to(dtype).contiguous() for each, dtype in zip(integers, dtypes, strict=True))
        world_size, count, keep = positions.shape
        job = _Apply(
            ctypes.addressof(members), len(members), count, *self._shape, world_size, keep,
            positions.data_ptr(), levels.data_ptr(), codes.data_ptr(),
            exact.guard_bits(world_size, self._largest_level), reduction == "senders",
            self._inverse_rows.data_ptr(), self._inverse_columns.data_ptr(), self._halved, *self._operand_bits,
            *ending, 0,
        )  # fmt: skip
        run("signum", job, count * self._shape[0] * self._shape[1])


@functools.lru_cache(maxsize=256)
def even_and_odd(basis: Tensor) -> bool:
    """Whether rows alternate exactly between even and odd about their middle."""
    signs = torch.tensor([1.0, -1.0]).repeat(basis.shape[0])[: basis.shape[0]].view(-1, 1)
    return basis.shape[0] % 2 == 0 and torch.equal(basis.flip(1), signs * basis)
