"""The kernels of step.c for one chunk group: coefficients from gradients, and updates that decode them.

First come the structures of chunk.h: where chunks lie in parameters, and transforms as kernels need them.

Shapes: W ranks, C chunks of a chunk group, N elements in a chunk (r rows, c columns), K kept, S = ceil(N / 8) bytes of
signs (lowest bit first, 1 is negative).
"""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from demopt.core import exact, transform
from demopt.core.chunking import Chunking, matrix_of
from demopt.core.transform import Factors
from demopt.interrupts import uninterrupted
from demopt.kernels.gate import address, as_contiguous, check_apart, library

SIDE = 64  # the longest side of a chunk that the C buffers hold
LANES = 16  # rows of buffers and bases are padded to a multiple of this many floats
_STACK = 1 << 20  # bytes, enough for a kernel's buffers
_STARTS = threading.RLock()  # guards the stack size of new threads, which holds for the whole process
_ALONE = 1 << 17  # up to this many elements one thread is as fast as several
_REDUCTIONS = ("mean", "senders")  # as in coefficients.h

Tensors = Sequence[Tensor | None]  # of parameters; None: all zeros

KINDS: dict[str, Any] = {"pointer": ctypes.c_void_p, "whole": ctypes.c_int64, "real": ctypes.c_float}


def fields(text: str) -> list[tuple[str, Any]]:
    """Parses a C structure's fields: each kind, or structure of this module, comes before the names that have it."""
    groups = [group.split() for group in text.split(";")]
    return [(name, KINDS.get(kind) or globals()[kind]) for kind, *names in groups for name in names]


class Matrix(ctypes.Structure):
    """One parameter, or its gradient, viewed as a matrix."""

    _fields_ = fields(
        "pointer data; whole rows columns across first data_is_bfloat16; pointer minus; whole minus_is_bfloat16"
    )


class Basis(ctypes.Structure):
    """A basis for kernels; `of_columns` pads rows; `transposed`: for columns of the forward transform.

    A DCT's is folded: its rows alternate between even and odd about their middle, and so do the halves of even ones.
    """

    _fields_ = fields("whole size folded; pointer full odd even middle")

    def __init__(self, basis: Tensor, is_dct: bool, of_columns: bool = False, transposed: bool = False) -> None:
        size, folded = len(basis), is_dct and len(basis) % 4 == 0 and len(basis) > 4
        parts = [basis[1::2, : size // 2], basis[::4, : size // 4], basis[2::4, : size // 4]] if folded else [basis]
        parts = [part.T for part in parts] if transposed else parts
        self.alive = [padded(part) if of_columns else part.contiguous() for part in parts]  # the C pointers need them
        pointers = [address("basis", part, torch.float32) for part in self.alive]
        super().__init__(size, folded, *((None, *pointers) if folded else pointers))


def covers(chunk_shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype == torch.float32 and max(chunk_shape) <= SIDE and library() is not None


def padded(matrix: Tensor) -> Tensor:
    """Returns a contiguous copy whose rows are padded to a multiple of LANES."""
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % LANES)).contiguous()


def matrices_of(chunkings: Sequence[Chunking]) -> Any:
    """Returns the C array of a chunk group's matrices, without their data."""
    matrices, first = (Matrix * len(chunkings))(), 0
    for matrix, cut in zip(matrices, chunkings, strict=True):
        matrix.rows, matrix.columns = cut.matrix
        matrix.across, matrix.first = cut.grid[1], first
        first += cut.chunks
    return matrices


def read_from(matrices: Any, tensors: Tensors, minus: Tensors | None) -> list[Tensor]:
    """Makes matrices read tensors - `minus`; returns the tensors to keep alive, some of which are contiguous copies."""
    alive = []
    subtracted = [None] * len(matrices) if minus is None else minus
    for number, (matrix, tensor, less) in enumerate(zip(matrices, tensors, subtracted, strict=True)):
        matrix.data = matrix.minus = None
        for name, given in (("data", tensor), ("minus", less)) if tensor is not None else ():
            if given is not None:
                what, narrow = f"{name} of parameter {number}", given.dtype == torch.bfloat16
                read, at = _held(what, given, torch.bfloat16 if narrow else torch.float32)
                _check_matrix(what, given, matrix)
                setattr(matrix, name, at)
                setattr(matrix, f"{name}_is_bfloat16", narrow)
                alive.append(read)
    return alive


def _check_matrix(what: str, given: Tensor, matrix: Any) -> None:
    expected = matrix.rows, matrix.columns
    if matrix_of(tuple(given.shape)) != expected:
        raise ValueError(f"{what} has shape {list(given.shape)}; the kernel expects a matrix of {list(expected)}")


@contextmanager
def room_for_kernels() -> Iterator[None]:
    """A context for starting threads that may run kernels: `threading.stack_size` may be too small for these."""
    with _STARTS:
        before = threading.stack_size()
        try:
            threading.stack_size(max(before, _STACK) if before else 0)  # 0: the system's
            yield
        finally:
            threading.stack_size(before)


def run(name: str, job: Any, elements: int) -> None:
    """Calls the kernel in as many threads as torch uses; waits for all, even on a signal: its memory is freed then."""
    loaded = library()
    function = partial(getattr(loaded, f"demopt_{name}_v{loaded.demopt_level()}"), ctypes.byref(job))
    others = torch.get_num_threads() - 1 if elements > _ALONE else 0
    threads = [threading.Thread(target=function) for _ in range(others)]
    with uninterrupted() if threads else nullcontext():
        # the machine may refuse to start more threads: those that run do the work
        with suppress(RuntimeError), room_for_kernels():
            for thread in threads:
                thread.start()
        function()
        for thread in threads:
            if thread.is_alive():
                thread.join()


class Received(ctypes.Structure):
    """Checked integer coefficients of all ranks, given in any dtypes: the signs of all, or the strongest."""

    _fields_ = fields(
        "whole chunks world_size guard; pointer codes signs; whole sign_stride; pointer weights; whole total keep; "
        "pointer positions levels; whole reduction"
    )
    alive: tuple[Tensor, ...]  # the tensors that it points to
    width: int  # bytes of a chunk's signs; or the fewest elements of a chunk that has all positions

    def check(self, chunks: int, length: int) -> None:
        """Raises ValueError unless it fits chunks of `length` elements; the buffers hold at most SIDE^2 of these."""
        fits = self.width == (length + 7) // 8 if self.signs else self.width <= length
        if self.chunks != chunks or not fits or length > SIDE**2:
            came = f"coefficients of {self.chunks} chunks from {self.world_size} ranks"
            raise ValueError(f"{came} do not fit {chunks} chunks of {length} elements")


def _held(what: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> tuple[Tensor, int]:
    """Returns the tensor for C, which the caller keeps alive, and its address."""
    held = as_contiguous(what, tensor, dtype)
    return held, address(what, held, dtype, shape)


def received_signs(signs_WCS: Tensor, codes_WC: Tensor, weights: tuple[int, ...]) -> Received:
    (world_size, chunks, width), total = signs_WCS.shape, sum(weights)
    _check_ranks(world_size)
    whole = signs_WCS.stride(2) == 1 and signs_WCS.stride(1) == width  # of each rank
    signs = signs_WCS if whole else as_contiguous("signs", signs_WCS, torch.uint8)
    codes, at_codes = _held("codes", codes_WC, torch.int16, (world_size, chunks))
    listed, at_weights = _held("weights", torch.tensor(weights, device="cpu"), torch.int64, (world_size,))
    at_signs, guard = address("signs", signs, torch.uint8, by_row=True), exact.guard_bits(total, 1)
    found = Received(chunks, world_size, guard, at_codes, at_signs, signs.stride(0), at_weights, total)
    found.alive, found.width = (signs, codes, listed), width
    return found


def received_strongest(
    positions_WCK: Tensor, levels_WCK: Tensor, codes_WC: Tensor, largest_level: int, reduction: str
) -> Received:
    world_size, chunks, keep = positions_WCK.shape
    _check_ranks(world_size)
    positions, at_positions = _held("positions", positions_WCK, torch.int16)
    levels, at_levels = _held("levels", levels_WCK, torch.int8, (world_size, chunks, keep))
    codes, at_codes = _held("codes", codes_WC, torch.int16, (world_size, chunks))
    ends = torch.stack(positions.aminmax()).tolist() if positions.numel() else [0, 0]
    if ends[0] < 0:
        raise ValueError(f"a position is {ends[0]}; it must be at least 0")
    guard, strongest = exact.guard_bits(world_size, largest_level), (keep, at_positions, at_levels)
    found = Received(chunks, world_size, guard, at_codes, None, 0, None, 0, *strongest, _REDUCTIONS.index(reduction))
    found.alive, found.width = (positions, levels, codes), ends[1] + 1
    return found


def _check_ranks(world_size: int) -> None:
    if not 0 < world_size < 1 << 16:
        raise ValueError(f"coefficients of {world_size} ranks; the kernel adds those of 1 to 65535")


class _Extract(ctypes.Structure):
    _fields_ = fields(
        "pointer matrices; whole count chunks; pointer momentum; Basis rows columns; real decay scale; "
        "pointer signs codes; whole keep; pointer positions values; whole next"
    )


class _SubtractSent(ctypes.Structure):
    _fields_ = fields("whole chunks length; pointer momentum signs codes; real alpha decay; whole next")


class _Apply(ctypes.Structure):
    _fields_ = fields(
        "Received received; pointer matrices; whole count; Basis rows columns; pointer padded_rows; "
        "whole row_bits column_bits; real basis_unit decay factor; whole store by_sign next"
    )


class _Answer(ctypes.Structure):
    _fields_ = fields("Received received; whole length; pointer error sum signs codes; whole next")


class Kernel:
    """The kernels for chunks with this transform, laid out once for their shapes. `keep` is K; None: signs of all."""

    def __init__(self, chunkings: Sequence[Chunking], name: str, keep: int | None) -> None:
        r, c = sides = chunkings[0].chunk_shape
        self._length, self._keep, is_dct = r * c, keep, name == "dct"
        rows, columns = (transform.basis(name, side, torch.float32) for side in sides)
        self._bases = Basis(rows, is_dct), Basis(columns, is_dct, of_columns=True, transposed=True)
        rows, columns = (exact.integer_basis(name, side) for side in sides)
        inverse, self._padded_rows = (Basis(rows, is_dct), Basis(columns, is_dct, of_columns=True)), padded(rows)
        bits, unit = [exact.operand_bits(side) for side in sides], exact.basis_unit(name, r) * exact.basis_unit(name, c)
        self._inverse = (*inverse, address("basis", self._padded_rows, torch.float32), *bits, unit)
        self._matrices = matrices_of(chunkings)
        self._at_matrices = ctypes.addressof(self._matrices), len(chunkings)
        self._chunks = sum(cut.chunks for cut in chunkings)

    def extract(
        self, gradients: Tensors, minus: Tensors | None, momentum_Crc: Tensor, factors: Factors
    ) -> tuple[Tensor, Tensor]:  # signs [C, S], codes [C]; or positions, values [C, K]
        """Does `transform.accumulate`, and finds the coefficients, in one pass over gradients and momentum.

        `factors` are the momentum's decay b and the scale s of gradients - minus, which are shaped like the parameters.
        """
        alive, (rows, columns) = read_from(self._matrices, gradients, minus), self._bases
        momentum = address("momentum", momentum_Crc, torch.float32, (self._chunks, rows.size, columns.size))
        check_apart([momentum_Crc], alive)
        job = _Extract(*self._at_matrices, self._chunks, momentum, rows, columns, *factors)
        if self._keep is None:
            found = _empty(self._chunks, self._length)
            job.signs, job.codes = (address("coefficients", each, each.dtype) for each in found)
        else:
            positions = torch.empty(self._chunks, self._keep, dtype=torch.int64, device="cpu")
            found = positions, torch.empty(self._chunks, self._keep, dtype=torch.float32, device="cpu")
            job.positions, job.values = (address("coefficients", each, each.dtype) for each in found)
            job.keep = self._keep
        torch.autograd.graph.increment_version([momentum_Crc])  # an error up to here leaves the momentum unchanged
        run("extract", job, momentum_Crc.numel())
        return found

    def apply(self, parameters: list[Tensor], received: Received, by_sign: bool, factors: Factors) -> None:
        """X <- decay X + factor U, or + factor sign(U), for contiguous float32 X; same bits as `exact` and `rules`."""
        received.check(self._chunks, self._length)
        for number, (matrix, parameter) in enumerate(zip(self._matrices, parameters, strict=True)):
            what = f"parameter {number}"
            _check_matrix(what, parameter, matrix)
            matrix.data, matrix.data_is_bfloat16, matrix.minus = address(what, parameter, torch.float32), False, None
        check_apart(parameters, received.alive)
        job = _Apply(received, *self._at_matrices, *self._inverse, *factors, False, by_sign)
        run("apply", job, self._chunks * self._length)
        torch.autograd.graph.increment_version(parameters)  # so that backward through an older graph is refused

    def invert(self, received: Received, by_sign: bool, out_Crc: Tensor) -> None:
        """Writes U, or its signs, of the received chunks to `out_Crc` (float32)."""
        r, c = (basis.size for basis in self._bases)
        received.check(received.chunks, self._length)
        # the chunks, one below the other, are one matrix
        matrices = matrices_of([Chunking((received.chunks * r, c), (r, c), (received.chunks, 1))])
        matrices[0].data = address("chunks", out_Crc, torch.float32, (received.chunks, r, c))
        check_apart([out_Crc], received.alive)
        job = _Apply(received, ctypes.addressof(matrices), 1, *self._inverse, 1.0, 0.0, True, by_sign)
        run("apply", job, out_Crc.numel())


def answer(received: Received, error_CN: Tensor, sum_CN: Tensor) -> tuple[Tensor, Tensor]:
    """Writes error + Q to `sum_CN`, both float32; returns the sum as an owner's answer: signs [C, S] and codes [C]."""
    found = _empty(*error_CN.shape)
    received.check(*error_CN.shape)
    at_error, at_sum = address("error", error_CN, torch.float32), address("sum", sum_CN, torch.float32, error_CN.shape)
    at_found = [address("coefficients", each, each.dtype) for each in found]
    check_apart([sum_CN], [error_CN, *received.alive])
    run("answer", _Answer(received, error_CN.shape[1], at_error, at_sum, *at_found), error_CN.numel())
    return found


def subtract_sent(momentum_CN: Tensor, signs_1CS: Tensor, codes_1C: Tensor, alpha: float, decay: float) -> None:
    """momentum <- decay (momentum - alpha q), for signs that one rank sent."""
    chunks, length = momentum_CN.shape
    signs, at_signs = _held("signs", signs_1CS, torch.uint8, (1, chunks, (length + 7) // 8))
    codes, at_codes = _held("codes", codes_1C, torch.int16, (1, chunks))
    momentum = address("momentum", momentum_CN, torch.float32)
    check_apart([momentum_CN], [signs, codes])
    job = _SubtractSent(chunks, length, momentum, at_signs, at_codes, alpha, decay)
    run("subtract_sent", job, momentum_CN.numel())


def _empty(chunks: int, length: int) -> tuple[Tensor, Tensor]:
    signs = torch.empty(chunks, (length + 7) // 8, dtype=torch.uint8, device="cpu")
    return signs, torch.empty(chunks, dtype=torch.int16, device="cpu")
