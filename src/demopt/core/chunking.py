"""Cuts parameters into chunks, which are transformed one by one (arXiv 2411.19870, section 3).

A parameter is viewed as a matrix: 2-D unchanged, more dimensions as (d0, rest), a vector as one row, 0-D as one
element. A grid of equal chunks covers the matrix; where the side of a chunk does not divide a dimension, the last chunk
is padded with zeros.

Shapes: R, S rows and columns of the matrix; r, c of a chunk; C chunks; N = r c elements in a chunk.
"""

import functools
import math
from dataclasses import dataclass

CHUNKINGS = ("padded", "divisor")


@dataclass(frozen=True)
class Chunking:
    """How one parameter is cut into chunks: its matrix (rows, columns), the sides of a chunk and the grid of chunks."""

    matrix: tuple[int, int]
    chunk_shape: tuple[int, int]
    grid: tuple[int, int]

    @functools.cached_property
    def chunks(self) -> int:
        """Number of chunks, row by row over the grid."""
        return self.grid[0] * self.grid[1]


def chunk_side(size: int, chunk: int, rule: str) -> int:
    """Returns the side of the chunks along a dimension of `size` elements (docs/algorithm.md#chunks-and-k).

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


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns rows and columns of the matrix that a parameter of `shape` is viewed as."""
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def chunking(shape: tuple[int, ...], chunk: int, rule: str = "padded") -> Chunking:
    """Returns the chunking of a parameter of `shape`; an empty parameter has no chunks."""
    matrix = matrix_of(shape)
    chunk_shape = (chunk_side(matrix[0], chunk, rule), chunk_side(matrix[1], chunk, rule))
    grid = (math.ceil(matrix[0] / chunk_shape[0]), math.ceil(matrix[1] / chunk_shape[1]))
    return Chunking(matrix, chunk_shape, grid if all(matrix) else (0, 0))
