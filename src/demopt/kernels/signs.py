"""The kernels of signs.c for one chunk group: signs of all coefficients, one bit each and a scale per chunk.

Shapes: W ranks, C chunks of a chunk group, N elements in a chunk (r rows, c columns), S = ceil(N / 8) bytes of signs.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from demopt.core import exact
from demopt.core.chunking import Chunking
from demopt.kernels.chunk import POINTER, REAL, WHOLE, Basis, Folded, column_of, members_of, read_from, run

#: Signs [W, C, S] (uint8, lowest bit first, 1 is negative) and codes of scales [W, C] (int16).
Signs = tuple[Tensor, Tensor]
Weights = tuple[int, ...]  # of the ranks, in the mean
UPDATE, UPDATE_BY_SIGN, STORE, STORE_SIGN = range(4)  # the endings of `apply` in signs.c


class _Extract(ctypes.Structure):
    _fields_ = [
        ("members", POINTER),
        *((name, WHOLE) for name in ("count", "chunks", "r", "c")),
        ("momentum", POINTER),
        *((name, Basis) for name in ("rows", "columns")),
        *((name, REAL) for name in ("decay", "scale")),
        *((name, POINTER) for name in ("signs", "codes")),
        ("next", WHOLE),
    ]


class _Settle(ctypes.Structure):
    _fields_ = [
        *((name, WHOLE) for name in ("chunks", "length")),
        *((name, POINTER) for name in ("momentum", "signs", "codes")),
        *((name, REAL) for name in ("step", "decay")),
        ("next", WHOLE),
    ]


class _Received(ctypes.Structure):
    _fields_ = [
        *((name, WHOLE) for name in ("length", "chunks", "world_size", "guard", "total")),
        *((name, POINTER) for name in ("signs", "codes", "weights")),
        *((name, WHOLE) for name in ("sign_stride", "code_stride")),
    ]


class _Apply(ctypes.Structure):
    _fields_ = [
        ("received", _Received),
        ("members", POINTER),
        *((name, WHOLE) for name in ("count", "r", "c")),
        *((name, Basis) for name in ("rows", "columns")),
        *((name, WHOLE) for name in ("row_bits", "column_bits")),
        *((name, REAL) for name in ("basis_unit", "decay", "step")),
        *((name, WHOLE) for name in ("ending", "next")),
    ]


class _Answer(ctypes.Structure):
    _fields_ = [
        ("received", _Received),
        *((name, POINTER) for name in ("error", "sum", "signs", "codes")),
        ("next", WHOLE),
    ]


class SignsKernel:
    """The kernels for chunks of one shape: `extract`, and `apply` and `decode` with integer bases.

    Everything that depends on shapes and bases alone is laid out once, at construction.
    """

    def __init__(
        self,
        chunkings: Sequence[Chunking],
        bases: tuple[Tensor, Tensor],
        inverse_bases: tuple[Tensor, Tensor],
        basis_unit: float,
    ) -> None:
        self._shape = (len(bases[0]), len(bases[1]))
        self._length = self._shape[0] * self._shape[1]
        self._rows, self._columns = Folded(bases[0]), Folded(bases[1], of_columns=True, transposed=True)
        self._inverse_rows, self._inverse_columns = Folded(inverse_bases[0]), Folded(inverse_bases[1], of_columns=True)
        self._basis_unit = basis_unit
        self._operand_bits = [exact.operand_bits(side) for side in self._shape]
        self._members = members_of(chunkings)
        self._chunks = sum(whole.chunks for whole in chunkings)

    def extract(
        self,
        gradients: Iterable[Tensor | None],
        minus: Iterable[Tensor | None] | None,
        momentum_Crc: Tensor,
        factors: tuple[float, float],
    ) -> Signs:
        """Does `transform.accumulate`, and encodes all coefficients, in one pass over gradients and momentum.

        The momentum [C, r, c] is updated in place; `factors` are its decay and the gradients' scale. Returns this
        rank's signs, as W = 1.
        """
        alive = read_from(self._members, gradients, minus)
        found = signs, codes = _empty(self._chunks, self._length)
        job = _Extract(
            ctypes.addressof(self._members), len(self._members), self._chunks, *self._shape, momentum_Crc.data_ptr(),
            self._rows.struct, self._columns.struct, *factors, signs.data_ptr(), codes.data_ptr(), 0,
        )  # fmt: skip
        run("signs_extract", job, momentum_Crc.numel())
        del alive
        return found

    def apply(
        self,
        parameters: Iterable[Tensor],
        received: Signs,
        weights: Weights,
        by_sign: bool,
        factors: tuple[float, float],
    ) -> None:
        """X <- decay X + step U, or + step sign(U), for contiguous float32 parameters: the bits of `exact` and `rules`.

        `factors` are decay and step.
        """
        for member, parameter in zip(self._members, parameters, strict=True):
            member.data, member.is_bfloat16, member.minus = parameter.data_ptr(), False, None
        self._decode(self._members, received, weights, (*factors, UPDATE_BY_SIGN if by_sign else UPDATE))

    def decode(self, received: Signs, weights: Weights, by_sign: bool, out_Crc: Tensor) -> None:
        """Writes U, or its signs, of the received chunks to `out_Crc` (float32)."""
        self._decode(column_of(out_Crc), received, weights, (1.0, 0.0, STORE_SIGN if by_sign else STORE))

    def _decode(self, members: Any, received: Signs, weights: Weights, ending: tuple[float, float, int]) -> None:
        part, alive = _received(received, weights, self._length)
        job = _Apply(
            part, ctypes.addressof(members), len(members), *self._shape,
            self._inverse_rows.struct, self._inverse_columns.struct, *self._operand_bits, self._basis_unit,
            *ending, 0,
        )  # fmt: skip
        run("signs_apply", job, part.chunks * self._length)
        del alive


def answer(received: Signs, weights: Weights, error_CN: Tensor, sum_CN: Tensor) -> Signs:
    """Writes error + Q to `sum_CN`, both float32; returns it encoded, as W = 1: an owner's answer."""
    part, alive = _received(received, weights, error_CN.shape[1])
    found = _empty(*error_CN.shape)
    pointers = (tensor.data_ptr() for tensor in (error_CN, sum_CN, *found))
    run("signs_answer", _Answer(part, *pointers, 0), error_CN.numel())
    del alive
    return found


def settle(momentum_CN: Tensor, sent: Signs, alpha: float = 1.0, decay: float = 1.0) -> None:
    """momentum <- decay (momentum - alpha q), for signs that one rank sent (W = 1)."""
    signs, codes = _dense(sent)
    pointers = momentum_CN.data_ptr(), signs.data_ptr(), codes.data_ptr()
    run("signs_settle", _Settle(*momentum_CN.shape, *pointers, alpha, decay, 0), momentum_CN.numel())


def _empty(chunks: int, length: int) -> Signs:
    signs = torch.empty(1, chunks, (length + 7) // 8, dtype=torch.uint8)
    return signs, torch.empty(1, chunks, dtype=torch.int16)


def _dense(sent: Signs) -> Signs:
    """Returns signs [W, C, S] of which each rank's are contiguous, and contiguous codes [W, C] as int16."""
    signs, codes = sent
    whole = signs.stride(2) == 1 and signs.stride(1) == signs.shape[2]
    return signs if whole else signs.contiguous(), codes.to(torch.int16).contiguous()


def _received(received: Signs, weights: Weights, length: int) -> tuple[_Received, tuple[Tensor, ...]]:
    signs, codes = _dense(received)
    listed, total = torch.tensor(weights), sum(weights)
    part = _Received(
        length, signs.shape[1], len(weights), exact.guard_bits(total, 1), total,
        signs.data_ptr(), codes.data_ptr(), listed.data_ptr(), signs.stride(0), codes.stride(0),
    )  # fmt: skip
    return part, (signs, codes, listed)
