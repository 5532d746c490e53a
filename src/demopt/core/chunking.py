"""Cuts parameters into chunks, which are transformed one by one (arXiv 2411.19870, section 3).

A parameter is viewed as a matrix: 2-D unchanged, more dimensions as (d0, rest), a vector as one row, 0-D as one
element. A grid of equal chunks covers the matrix; where the side of a chunk does not divide a dimension, the last chunk
is padded with zeros.

Shapes: R, S rows and columns of the matrix; r, c of a chunk; C chunks; N = r c elements in a chunk.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from demopt.core.stochastic_rounding import to_bfloat16

CHUNKINGS = ("padded", "divisor")


@dataclass(frozen=True)
class Chunking:
    """How one parameter is cut into chunks: its matrix (rows, columns), the sides of a chunk and the grid of chunks.

    Examples:
        >>> chunking((50257, 768), chunk=64)
        Chunking(matrix=(50257, 768), chunk_shape=(64, 64), grid=(786, 12))
    """

    matrix: tuple[int, int]
    chunk_shape: tuple[int, int]
    grid: tuple[int, int]

    @functools.cached_property
    def chunks(self) -> int:
        """Number of chunks, row by row over the grid."""
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True)
class Patch:
    """A rectangle of a chunking's grid whose chunks are consecutive: grid rows and grid columns [start, stop).

    Examples:
        >>> next(patches(chunking((128, 128), chunk=64), most=2))
        Patch(rows=(0, 1), columns=(0, 2))
    """

    rows: tuple[int, int]
    columns: tuple[int, int]

    @functools.cached_property
    def grid(self) -> tuple[int, int]:
        """Chunks down and across."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @functools.cached_property
    def chunks(self) -> int:
        """Number of chunks."""
        return self.grid[0] * self.grid[1]


def chunk_side(size: int, chunk: int, rule: str) -> int:
    """Returns the side of the chunks along a dimension of `size` elements.

    "divisor" is the published code's rule: the largest divisor of `size` that is at most `chunk`. It collapses on
    awkward sizes (50257 -> 29), so "padded" takes that divisor only where it is at least half of `chunk`, and otherwise
    the smallest side that needs no more chunks than sides of `chunk` would; the last chunk is then padded by less than
    their number.

    Examples:
        >>> chunk_side(768, 64, "padded"), chunk_side(50257, 64, "padded"), chunk_side(50257, 64, "divisor")
        (64, 64, 29)
    """
    if size <= chunk:
        return max(size, 1)
    divisor = next(side for side in range(chunk, 0, -1) if size % side == 0)
    if rule == "divisor" or 2 * divisor >= chunk:
        return divisor
    return math.ceil(size / math.ceil(size / chunk))


def chunking(shape: tuple[int, ...], chunk: int, rule: str = "padded") -> Chunking:
    """Returns the chunking of a parameter of `shape`; an empty parameter has no chunks.

    Examples:
        >>> chunking((96,), chunk=64).grid, chunking((), chunk=64).chunk_shape, chunking((0, 5), chunk=64).chunks
        ((1, 2), (1, 1), 0)
    """
    matrix = (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
    chunk_shape = (chunk_side(matrix[0], chunk, rule), chunk_side(matrix[1], chunk, rule))
    if math.prod(matrix) == 0:
        return Chunking(matrix, chunk_shape, (0, 0))
    return Chunking(matrix, chunk_shape, (math.ceil(matrix[0] / chunk_shape[0]), math.ceil(matrix[1] / chunk_shape[1])))


def patches(whole: Chunking, most: int, first: int | None = None) -> Iterator[Patch]:
    """Cuts a chunking into patches, in chunk order, that fill blocks of exactly `most` chunks (the first: `first`).

    Examples:
        >>> [patch.chunks for patch in patches(chunking((128, 256), chunk=64), most=6)]
        [4, 2, 2]
    """
    down, across = whole.grid
    room = most if first is None else first
    row, column = 0, 0
    while row < down:
        if column == 0 and room >= across:
            patch = Patch((row, min(down, row + room // across)), (0, across))
        else:
            patch = Patch((row, row + 1), (column, min(across, column + room)))
        yield patch
        room = room - patch.chunks or most
        row, column = (row, patch.columns[1]) if patch.columns[1] < across else (patch.rows[1], 0)


def matrix_view(tensor: Tensor, whole: Chunking) -> Tensor:
    """Returns the tensor as its matrix [R, S]: a view where strides allow it, a copy otherwise."""
    return tensor.reshape(whole.matrix)


def rectangles(matrix_RS: Tensor, chunks_Crc: Tensor, whole: Chunking, patch: Patch) -> list[tuple[Tensor, Tensor]]:
    """Returns pairs of equally shaped views of the matrix and the chunks, which cover the patch's unpadded elements.

    Several matrices [..., R, S] of one chunking may come at once, with their chunks [..., C, r, c].

    One pair without padding, up to four where the patch has padded chunks at its lower or right edge.
    """
    r, c = whole.chunk_shape
    gridded, pairs = chunks_Crc.unflatten(-3, patch.grid), []
    for row, down, height in _spans(patch.rows, r, whole.matrix[0]):
        for column, across, width in _spans(patch.columns, c, whole.matrix[1]):
            part = matrix_RS[..., row * r : row * r + down * height, column * c : column * c + across * width]
            part = part.unflatten(-2, (down, height)).unflatten(-1, (across, width)).transpose(-3, -2)
            y, x = row - patch.rows[0], column - patch.columns[0]
            pairs.append((part, gridded[..., y : y + down, x : x + across, :height, :width]))
    return pairs


@functools.lru_cache(maxsize=4096)  # they are the same at every step
def _spans(grid_range: tuple[int, int], side: int, size: int) -> tuple[tuple[int, int, int], ...]:
    """(first chunk, number of chunks, unpadded elements in each) for the whole chunks, then for a padded last one."""
    start, stop = grid_range
    whole = min(stop, size // side)
    spans = ((start, whole - start, side),) if whole > start else ()
    return spans if whole == stop else (*spans, (whole, 1, size - whole * side))


def read_patch(matrix_RS: Tensor, chunks_Crc: Tensor, whole: Chunking, patch: Patch) -> None:
    """Copies a patch of the matrix into its chunks; padding becomes zero. Dtypes may differ."""
    bottom, right = patch.rows[1] * whole.chunk_shape[0], patch.columns[1] * whole.chunk_shape[1]
    if bottom > whole.matrix[0] or right > whole.matrix[1]:
        chunks_Crc.zero_()
    for part, chunks in rectangles(matrix_RS, chunks_Crc, whole, patch):
        chunks.copy_(part)


def add_patch(
    matrix_RS: Tensor,
    chunks_Crc: Tensor,
    whole: Chunking,
    patch: Patch,
    decay: float = 1.0,
    seed: tuple[int, int] | None = None,
) -> None:
    """Patch of the matrix <- decay patch + chunks, in place; padding is dropped.

    If the matrix has a narrower dtype than the chunks, both steps are computed in the chunks' dtype and rounded once;
    otherwise a small decay would be lost. With a seed, bfloat16 is rounded stochastically (`to_bfloat16`); the chunks,
    which must be contiguous, are then overwritten.
    """
    pairs = rectangles(matrix_RS, chunks_Crc, whole, patch)
    if seed is None or matrix_RS.dtype != torch.bfloat16:
        for part, chunks in pairs:
            decay_and_add(part, chunks, decay)
        return
    for part, chunks in pairs:
        chunks.add_(part.to(chunks.dtype).mul_(decay))
    place = patch.rows[0] * whole.grid[1] + patch.columns[0]  # of its first chunk
    to_bfloat16(chunks_Crc, seed, place * whole.chunk_shape[0] * whole.chunk_shape[1])
    for part, chunks in pairs:
        part.copy_(chunks)


def decay_and_add(target: Tensor, direction: Tensor, decay: float, seed: tuple[int, int] | None = None) -> None:
    """target <- decay target + direction, in place; a narrower target is rounded once, as in `add_patch`.

    Examples:
        >>> x = torch.ones(2)
        >>> decay_and_add(x, torch.full((2,), -0.25), decay=0.5), x
        (None, tensor([0.2500, 0.2500]))
    """
    wide = target if target.dtype.itemsize >= direction.dtype.itemsize else target.to(direction.dtype)
    if decay != 1:
        wide.mul_(decay)
    wide.add_(direction)
    if wide is target:
        return
    if seed is not None and target.dtype == torch.bfloat16:
        wide = wide.contiguous()
        to_bfloat16(wide, seed)
    target.copy_(wide)


def write_patch(matrix_RS: Tensor, chunks_Crc: Tensor, whole: Chunking, patch: Patch) -> None:
    """Copies chunks into their patch of the matrix and drops padding: the inverse of `read_patch`."""
    for part, chunks in rectangles(matrix_RS, chunks_Crc, whole, patch):
        part.copy_(chunks)
