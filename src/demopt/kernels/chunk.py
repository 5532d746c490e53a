"""The structures of chunk.h: where chunks lie in parameters, transforms as kernels need them, and threads.

Shapes: C chunks of a chunk group, r rows and c columns of a chunk.
"""

import ctypes
import functools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from demopt.core.chunking import Chunking
from demopt.kernels.loader import library

SIDE = 64  # the longest side of a chunk that the C buffers hold
LANES = 16  # rows of buffers and bases are padded to a multiple of this many floats
_IS_BFLOAT16 = {"data": "is_bfloat16", "minus": "minus_is_bfloat16"}  # the fields of `Member` that tell dtypes
_ALONE = 1 << 17  # up to this many elements one thread is as fast as several

POINTER, WHOLE, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def fields(*kinds: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Returns the fields of a structure: kinds, each with the names of its next fields."""
    return [(name, kind) for kind, names in kinds for name in names.split()]


class Member(ctypes.Structure):
    """One parameter, or its gradient, viewed as a matrix."""

    _fields_ = fields(
        (POINTER, "data"),
        (WHOLE, "rows columns across first is_bfloat16"),
        (POINTER, "minus"),
        (WHOLE, "minus_is_bfloat16"),
    )


class Basis(ctypes.Structure):
    """A basis as `Folded` lays it out."""

    _fields_ = fields((WHOLE, "size folded"), (POINTER, "full odd even middle"))


def covers(chunk_shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels cover chunks of this shape, dtype and device.

    Examples:
        >>> covers((64, 65), torch.float32, torch.device("cpu"))
        False
    """
    return device.type == "cpu" and dtype == torch.float32 and max(chunk_shape) <= SIDE and library() is not None


class Folded:
    """A basis in the form that kernels need: its rows halved twice if they alternate between even and odd, as in a DCT.

    `of_columns`: for transforms of columns, whose rows are padded; `transposed`: for the forward one.
    """

    def __init__(self, basis: Tensor, of_columns: bool = False, transposed: bool = False) -> None:
        size = basis.shape[0]
        folded = foldable(basis)
        parts = [basis[1::2, : size // 2], basis[::4, : size // 4], basis[2::4, : size // 4]] if folded else [basis]
        parts = [part.T for part in parts] if transposed else parts
        self.parts = [padded(part) if of_columns else part.contiguous() for part in parts]
        pointers = [part.data_ptr() for part in self.parts]
        self.struct = Basis(size, folded, *((None, *pointers) if folded else (pointers[0], None, None, None)))


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


def padded(matrix: Tensor) -> Tensor:
    """Returns a contiguous copy whose rows are padded to a multiple of LANES."""
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % LANES)).contiguous()


def members_of(chunkings: Sequence[Chunking]) -> Any:
    """Returns the C array of a chunk group's members, without their data."""
    members, first = (Member * len(chunkings))(), 0
    for member, whole in zip(members, chunkings, strict=True):
        member.rows, member.columns = whole.matrix
        member.across, member.first = whole.grid[1], first
        first += whole.chunks
    return members


def column_of(chunks_Crc: Tensor) -> Any:
    """Returns chunks one below the other as the C array of one member."""
    count, r, c = chunks_Crc.shape
    members = members_of([Chunking((count * r, c), (r, c), (count, 1))])
    members[0].data = chunks_Crc.data_ptr()
    return members


def read_from(
    members: Any, tensors: Iterable[Tensor | None], minus: Iterable[Tensor | None] | None = None
) -> list[Tensor]:
    """Makes members read these tensors, less those of `minus`; None counts as zeros.

    Returns the tensors that must stay alive: copies of those that are not contiguous float32 or bfloat16.
    """
    alive = []
    subtracted = [None] * len(members) if minus is None else minus
    for member, tensor, less in zip(members, tensors, subtracted, strict=True):
        member.data = member.minus = None
        for name, given in (("data", tensor), ("minus", less)) if tensor is not None else ():
            if given is not None:
                wide = given if given.dtype in (torch.float32, torch.bfloat16) else given.to(torch.float32)
                read = wide.contiguous()
                setattr(member, name, read.data_ptr())
                setattr(member, _IS_BFLOAT16[name], read.dtype == torch.bfloat16)
                alive.append(read)
    return alive


def run(name: str, job: Any, elements: int) -> None:
    """Calls the kernel from as many threads as torch uses; each thread takes chunks until none are left.

    It returns, or raises KeyboardInterrupt, only after all threads, because the caller then frees the job's memory.
    """
    loaded = library()
    function = getattr(loaded, f"demopt_{name}_v{loaded.demopt_level()}")
    threads: list[threading.Thread] = []
    interrupt: BaseException | None = None
    try:
        for _ in range(torch.get_num_threads() - 1 if elements > _ALONE else 0):
            threads.append(threading.Thread(target=function, args=(ctypes.byref(job),)))
            threads[-1].start()
    except RuntimeError:  # the machine has no more threads: those that there are do the work
        pass
    except BaseException as error:
        interrupt = error
    try:
        function(ctypes.byref(job))
    except BaseException as error:
        interrupt = error
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt
