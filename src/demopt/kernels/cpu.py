"""The kernels of cpu.c, built when demopt is installed with a C compiler; everything also works without them.

Shapes: W ranks, C chunks of a chunk group, N elements in a chunk (r rows, c columns), K kept.
"""

import ctypes
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from demopt.core import exact
from demopt.core.chunk import Chunking
from demopt.kernels.compiled import compiled
from demopt.kernels.steps import Steps

SIDE = 64  # the longest side of a chunk that the C buffers hold
LANES = 16  # rows of buffers and bases are padded to a multiple of this many floats
_ALONE = 1 << 17  # up to this many elements one thread is as fast as several

_pointer, _whole, _real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


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
    return device.type == "cpu" and dtype == torch.float32 and max(chunk_shape) <= SIDE and compiled() is not None


def readable(gradient: Tensor | None) -> bool:
    """Whether `extract` can read a gradient in place."""
    if gradient is None:
        return True
    return gradient.dtype in (torch.float32, torch.bfloat16) and gradient.is_contiguous()


def writable(parameter: Tensor) -> bool:
    """Whether `apply` can update a parameter in place."""
    return parameter.dtype == torch.float32 and parameter.is_contiguous()


def extract(
    gradients: Sequence[Tensor | None],
    chunkings: Sequence[Chunking],
    momentum_Crc: Tensor,
    bases: tuple[Tensor, Tensor],
    decay: float,
    scale: float,
    keep: int,
) -> tuple[Tensor, Tensor]:
    """Does `transform.accumulate` and `select.strongest` in one pass over gradients and momentum.

    Gradients must be `readable`; None counts as zeros. The momentum [C, r, c] is updated in place. Returns positions
    [C, K] (int64, ascending) and values [C, K] (float32).
    """
    count, r, c = momentum_Crc.shape
    positions = torch.empty(count, keep, dtype=torch.int64)
    values = torch.empty(count, keep)
    members = _members(gradients, chunkings)
    rows, columns = _Folded(bases[0], right=False), _Folded(bases[1], right=True)
    job = _Extract(
        ctypes.addressof(members), len(members), count, r, c, momentum_Crc.data_ptr(), rows.struct, columns.struct,
        decay, scale, keep, positions.data_ptr(), values.data_ptr(), 0,
    )  # fmt: skip
    _run("extract", job, momentum_Crc.numel())
    return positions, values


def apply(
    parameters: Sequence[Tensor],
    chunkings: Sequence[Chunking],
    steps: Steps,
    lr: float,
    weight_decay: float,
    first: int = 0,
) -> None:
    """Does steps 6 to 8 of the algorithm for chunks [first, first + C) and update "signum", in one pass.

    The caller has checked the positions; bases are integer bases; parameters must be `writable`. Computes the same
    bits as `exact.aggregate_steps`, `exact.inverse` and `update.sign`.
    """
    members, (r, c) = _members(parameters, chunkings), chunkings[0].chunk_shape
    with _job(steps, members) as job:
        job.first, job.step, job.decay = first, -lr, 1 - lr * weight_decay
        _run("apply", job, steps.positions.shape[1] * r * c)


def directions(
    steps: Steps,
    out_Crc: Tensor,
) -> None:
    """Does the same as `apply`, but writes the signs to `out_Crc` (float32)."""
    count, r, c = out_Crc.shape
    column_of_chunks = Chunking((count * r, c), (r, c), (count, 1))
    with _job(steps, _members([out_Crc], [column_of_chunks])) as job:
        job.store = 1
        _run("apply", job, out_Crc.numel())


@contextmanager
def _job(steps: Steps, members: Any) -> Iterator[_Apply]:
    """Yields the C struct that applies steps to members; the context keeps the memory that it points to alive."""
    world_size, count, keep = steps.positions.shape
    (rows, columns), folded = steps.bases, even_and_odd(steps.bases[1])
    r, c = len(rows), len(columns)
    positions, levels = (_rows(tensor, keep) for tensor in (steps.positions, steps.levels))
    if positions.stride(0) != levels.stride(0):
        positions, levels = positions.contiguous(), levels.contiguous()
    codes, padded_rows = steps.codes.contiguous(), _padded(rows)
    padded_columns = _padded(columns[:, : c // 2] if folded else columns)
    yield _Apply(
        ctypes.addressof(members), len(members), 0, count, r, c, world_size, keep,
        positions.data_ptr(), levels.data_ptr(), codes.data_ptr(), positions.stride(0), codes.stride(0),
        exact.guard_bits(world_size, steps.largest_level), steps.reduction == "senders",
        padded_rows.data_ptr(), padded_columns.data_ptr(), folded, exact.operand_bits(r), exact.operand_bits(c),
        1.0, 0.0, 0, 0,
    )  # fmt: skip


def _rows(tensor_WCK: Tensor, keep: int) -> Tensor:
    """Returns the tensor with the K of a chunk, and the chunks of a rank, contiguous."""
    return tensor_WCK if tensor_WCK.stride()[1:] == (keep, 1) else tensor_WCK.contiguous()


def _members(tensors: Sequence[Tensor | None], chunkings: Sequence[Chunking]) -> Any:
    members, first = (_Member * len(chunkings))(), 0
    for member, tensor, whole in zip(members, tensors, chunkings, strict=True):
        member.data = None if tensor is None else tensor.data_ptr()
        member.rows, member.columns = whole.matrix
        member.across, member.first = whole.grid[1], first
        member.is_bfloat16 = tensor is not None and tensor.dtype == torch.bfloat16
        first += whole.chunks
    return members


class _Folded:
    """A basis in the form that `transform_rows` (left) or `transform_columns` (right: transposed, padded) needs."""

    def __init__(self, basis: Tensor, right: bool) -> None:
        size = basis.shape[0]
        folded = foldable(basis)
        parts = [basis[1::2, : size // 2], basis[::4, : size // 4], basis[2::4, : size // 4]] if folded else [basis]
        self.parts = [_padded(part.T) if right else part.contiguous() for part in parts]
        pointers = [part.data_ptr() for part in self.parts]
        self.struct = _Basis(size, folded, *((None, *pointers) if folded else (pointers[0], None, None, None)))


@functools.lru_cache(maxsize=256)
def foldable(basis: Tensor) -> bool:
    """Whether rows alternate between even and odd, and so do the halves of the even rows, as in a DCT."""
    size, tolerance = basis.shape[0], 4 * torch.finfo(torch.float32).eps * float(basis.abs().max())
    if size % 4 or size < 8:
        return False
    signs = torch.tensor([1.0, -1.0]).repeat(size // 2).view(-1, 1)
    half, quarter = basis[::2, : size // 2], signs[: size // 2]
    unlike = (basis.flip(1) - signs * basis).abs().max(), (half.flip(1) - quarter * half).abs().max()
    return float(max(unlike)) <= tolerance


@functools.lru_cache(maxsize=256)
def even_and_odd(basis: Tensor) -> bool:
    """Whether rows alternate exactly between even and odd about their middle."""
    signs = torch.tensor([1.0, -1.0]).repeat(basis.shape[0])[: basis.shape[0]].view(-1, 1)
    return basis.shape[0] % 2 == 0 and torch.equal(basis.flip(1), signs * basis)


def _padded(matrix: Tensor) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % LANES)).contiguous()


def _run(name: str, job: Any, elements: int) -> None:
    """Calls the kernel from as many threads as torch uses; each thread takes chunks until none are left."""
    loaded = compiled()
    function = getattr(loaded, f"demopt_{name}_v{loaded.demopt_level()}")
    others = [
        threading.Thread(target=function, args=(ctypes.byref(job),))
        for _ in range(torch.get_num_threads() - 1 if elements > _ALONE else 0)
    ]
    for thread in others:
        thread.start()
    function(ctypes.byref(job))
    for thread in others:
        thread.join()
