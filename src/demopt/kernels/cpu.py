"""The kernels of cpu.c for one chunk group, if demopt was installed with a C compiler; otherwise torch does the same.

Shapes: W ranks, C chunks of a chunk group, N elements in a chunk (r rows, c columns), K kept.
"""

import ctypes
import functools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from demopt.core import exact
from demopt.core.chunking import Chunking
from demopt.kernels.loader import library

SIDE = 64  # the longest side of a chunk that the C buffers hold
LANES = 16  # rows of buffers and bases are padded to a multiple of this many floats
_ALONE = 1 << 17  # up to this many elements one thread is as fast as several

_pointer, _whole, _real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

#: Positions [W, C, K] int16, levels [W, C, K] int8 and codes of scales [W, C] int16 of checked coefficients.
Integers = tuple[Tensor, Tensor, Tensor]


class _Member(ctypes.Structure):
    _fields_ = [
        ("data", _pointer),
        *((name, _whole) for name in ("rows", "columns", "across", "first", "is_bfloat16")),
    ]


class _Basis(ctypes.Structure):
    _fields_ = [
        *((name, _whole) for name in ("size", "folded")),
        *((name, _pointer) for name in ("full", "odd", "even", "middle")),
    ]


class _Extract(ctypes.Structure):
    _fields_ = [
        ("members", _pointer),
        *((name, _whole) for name in ("count", "chunks", "r", "c")),
        ("momentum", _pointer),
        *((name, _Basis) for name in ("rows", "columns")),
        *((name, _real) for name in ("decay", "scale")),
        ("keep", _whole),
        *((name, _pointer) for name in ("positions", "values")),
        ("next", _whole),
    ]


class _Apply(ctypes.Structure):
    _fields_ = [
        ("members", _pointer),
        *((name, _whole) for name in ("count", "first", "chunks", "r", "c", "world_size", "keep")),
        *((name, _pointer) for name in ("positions", "levels", "codes")),
        *((name, _whole) for name in ("coefficient_stride", "code_stride", "guard", "by_senders")),
        *((name, _pointer) for name in ("rows", "columns")),
        *((name, _whole) for name in ("folded", "row_bits", "column_bits")),
        *((name, _real) for name in ("decay", "step")),
        *((name, _whole) for name in ("store", "next")),
    ]


def covers(chunk_shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels cover chunks of this shape, dtype and device.

    Examples:
        >>> covers((64, 65), torch.float32, torch.device("cpu"))
        False
    """
    return device.type == "cpu" and dtype == torch.float32 and max(chunk_shape) <= SIDE and library() is not None


class ChunkKernels:
    """The kernels for chunks of one shape: `extract`, and `apply` or `signs` if the bases to decode with are integers.

    Everything that depends on shapes and bases alone is laid out once, at construction.
    """

    def __init__(self, chunkings: Sequence[Chunking], bases: tuple[Tensor, Tensor], keep: int) -> None:
        self._shape = (len(bases[0]), len(bases[1]))
        self._keep = keep
        self._rows, self._columns = _Folded(bases[0], right=False), _Folded(bases[1], right=True)
        self._members = _members(chunkings)
        self._chunks = sum(whole.chunks for whole in chunkings)

    def extract(
        self, gradients: Iterable[Tensor | None], momentum_Crc: Tensor, decay: float, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Does `transform.accumulate` and `top_k.strongest` in one pass over gradients and momentum.

        Gradients are contiguous float32 or bfloat16; None counts as zeros. The momentum [C, r, c] is updated in place.
        Returns positions [C, K] (int64, ascending) and values [C, K] (float32).
        """
        for member, gradient in zip(self._members, gradients, strict=True):
            member.data = None if gradient is None else gradient.data_ptr()
            member.is_bfloat16 = gradient is not None and gradient.dtype == torch.bfloat16
        positions = torch.empty(self._chunks, self._keep, dtype=torch.int64)
        values = torch.empty(self._chunks, self._keep)
        job = _Extract(
            ctypes.addressof(self._members), len(self._members), self._chunks, *self._shape, momentum_Crc.data_ptr(),
            self._rows.struct, self._columns.struct, decay, scale, self._keep, positions.data_ptr(), values.data_ptr(),
            0,
        )  # fmt: skip
        _run("extract", job, momentum_Crc.numel())
        return positions, values


class SignKernels:
    """The kernels for steps 6 to 8 with update "signum" and exact decoding, for chunks of one shape."""

    def __init__(self, chunkings: Sequence[Chunking], integer_bases: tuple[Tensor, Tensor], largest_level: int) -> None:
        rows, columns = integer_bases
        r, c = self._shape = (len(rows), len(columns))
        self._members = _members(chunkings)
        self._largest_level = largest_level
        self._folded = even_and_odd(columns)
        self._rows, self._columns = _padded(rows), _padded(columns[:, : c // 2] if self._folded else columns)
        self._bits = (exact.operand_bits(r), exact.operand_bits(c))

    def apply(
        self, parameters: Iterable[Tensor], integers: Integers, reduction: str, lr: float, weight_decay: float
    ) -> None:
        """Updates the contiguous float32 parameters in one pass, with the bits of `exact` and `rules.sign`.

        The coefficients are those of all chunks.
        """
        for member, parameter in zip(self._members, parameters, strict=True):
            member.data, member.is_bfloat16 = parameter.data_ptr(), False
        self._decode(self._members, integers, reduction, (1 - lr * weight_decay, -lr, 0))

    def signs(self, integers: Integers, reduction: str, out_Crc: Tensor) -> None:
        """Writes the signs of some chunks to `out_Crc` (float32) instead of applying them."""
        count, r, c = out_Crc.shape
        one_column = _members([Chunking((count * r, c), (r, c), (count, 1))])
        one_column[0].data, one_column[0].is_bfloat16 = out_Crc.data_ptr(), False
        self._decode(one_column, integers, reduction, (1.0, 0.0, 1))

    def _decode(self, members: Any, integers: Integers, reduction: str, ending: tuple[float, float, int]) -> None:
        positions, levels, codes = (tensor.contiguous() for tensor in integers)
        world_size, count, keep = positions.shape
        job = _Apply(
            ctypes.addressof(members), len(members), 0, count, *self._shape, world_size, keep,
            positions.data_ptr(), levels.data_ptr(), codes.data_ptr(), count * keep, count,
            exact.guard_bits(world_size, self._largest_level), reduction == "senders",
            self._rows.data_ptr(), self._columns.data_ptr(), self._folded, *self._bits, *ending, 0,
        )  # fmt: skip
        _run("apply", job, count * self._shape[0] * self._shape[1])


class _Folded:
    """A basis in the form that `transform_rows` (left) or `transform_columns` (right: transposed, padded) needs."""

    def __init__(self, basis: Tensor, right: bool) -> None:
        size = basis.shape[0]
        folded = foldable(basis)
        parts = [basis[1::2, : size // 2], basis[::4, : size // 4], basis[2::4, : size // 4]] if folded else [basis]
        self.parts = [_padded(part.T) if right else part.contiguous() for part in parts]
        pointers = [part.data_ptr() for part in self.parts]
        self.struct = _Basis(size, folded, *((None, *pointers) if folded else (pointers[0], None, None, None)))


def _members(chunkings: Sequence[Chunking]) -> Any:
    members, first = (_Member * len(chunkings))(), 0
    for member, whole in zip(members, chunkings, strict=True):
        member.rows, member.columns = whole.matrix
        member.across, member.first = whole.grid[1], first
        first += whole.chunks
    return members


@functools.lru_cache(maxsize=256)
def foldable(basis: Tensor) -> bool:
    """Whether rows alternate between even and odd, and so do the halves of the even rows, as in a DCT."""
    size, tolerance = basis.shape[0], 4 * torch.finfo(torch.float32).eps * float(basis.abs().max())
    if size % 4 or size < 8:
        return False
    signs = torch.tensor([1.0, -1.0]).repeat(size // 2).view(-1, 1)
    half, quarter = basis[::2, : size // 2], signs[: size // 2]
    differences = (basis.flip(1) - signs * basis).abs().max(), (half.flip(1) - quarter * half).abs().max()
    return float(max(differences)) <= tolerance


@functools.lru_cache(maxsize=256)
def even_and_odd(basis: Tensor) -> bool:
    """Whether rows alternate exactly between even and odd about their middle."""
    signs = torch.tensor([1.0, -1.0]).repeat(basis.shape[0])[: basis.shape[0]].view(-1, 1)
    return basis.shape[0] % 2 == 0 and torch.equal(basis.flip(1), signs * basis)


def _padded(matrix: Tensor) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % LANES)).contiguous()


def _run(name: str, job: Any, elements: int) -> None:
    """Calls the kernel from as many threads as torch uses; each thread takes chunks until none are left."""
    loaded = library()
    function = getattr(loaded, f"demopt_{name}_v{loaded.demopt_level()}")
    threads = [
        threading.Thread(target=function, args=(ctypes.byref(job),))
        for _ in range(torch.get_num_threads() - 1 if elements > _ALONE else 0)
    ]
    for thread in threads:
        thread.start()
    function(ctypes.byref(job))
    for thread in threads:
        thread.join()
