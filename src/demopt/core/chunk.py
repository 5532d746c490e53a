"""Cuts parameters into tiles, the chunks that are transformed (arXiv 2411.19870, section 3).

A parameter is viewed as a matrix: 2-D unchanged, more dimensions as (d0, rest), a vector as one row, 0-D as one
element. A grid of equal tiles covers the matrix; where the side of a tile does not divide a dimension, the last tile
is padded with zeros.

Shapes: R, S rows and columns of the matrix; r, c of a tile; C tiles; N = r c elements in a tile.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

TILINGS = ("padded", "divisor")


@dataclass(frozen=True)
class Tiling:
    """How one parameter is cut into tiles: its matrix (rows, columns), the sides of a tile and the grid of tiles.

    Example:
        >>> tiling((50257, 768), chunk=64)
        Tiling(matrix=(50257, 768), tile=(64, 64), grid=(786, 12))
    """

    matrix: tuple[int, int]
    tile: tuple[int, int]
    grid: tuple[int, int]

    @property
    def tiles(self) -> int:
        """Number of tiles, row by row over the grid."""
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True)
class Patch:
    """A rectangle of a tiling's grid whose tiles are consecutive: grid rows and grid columns [start, stop).

    Example:
        >>> next(patches(tiling((128, 128), chunk=64), most=2))
        Patch(rows=(0, 1), columns=(0, 2))
    """

    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles down and across."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.grid[0] * self.grid[1]


def tile_side(size: int, chunk: int, rule: str) -> int:
    """Returns the side of the tiles along a dimension of `size` elements.

    "divisor" is the published code's rule: the largest divisor of size that is at most chunk. It collapses on awkward
    sizes (50257 -> 29), so "padded" takes that divisor only where it is at least half of chunk, and otherwise the
    smallest side that needs no more tiles than chunk would; the last tile is then padded by less than the tile count.

    Example:
        >>> tile_side(768, 64, "padded"), tile_side(50257, 64, "padded"), tile_side(50257, 64, "divisor")
        (64, 64, 29)
    """
    if size <= chunk:
        return max(size, 1)
    divisor = next(side for side in range(chunk, 0, -1) if size % side == 0)
    if rule == "divisor" or 2 * divisor >= chunk:
        return divisor
    return math.ceil(size / math.ceil(size / chunk))


def tiling(shape: tuple[int, ...], chunk: int, rule: str = "padded") -> Tiling:
    """Returns the tiling of a parameter of `shape`; an empty parameter has no tiles.

    Example:
        >>> tiling((96,), chunk=64).grid, tiling((), chunk=64).tile, tiling((0, 5), chunk=64).tiles
        ((1, 2), (1, 1), 0)
    """
    matrix = (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
    tile = (tile_side(matrix[0], chunk, rule), tile_side(matrix[1], chunk, rule))
    if math.prod(matrix) == 0:
        return Tiling(matrix, tile, (0, 0))
    return Tiling(matrix, tile, (math.ceil(matrix[0] / tile[0]), math.ceil(matrix[1] / tile[1])))


def patches(whole: Tiling, most: int, first: int | None = None) -> Iterator[Patch]:
    """Cuts a tiling into patches, in tile order, that fill blocks of exactly `most` tiles (the first block: `first`).

    Example:
        >>> [patch.tiles for patch in patches(tiling((128, 256), chunk=64), most=6)]
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
        room = room - patch.tiles or most
        row, column = (row, patch.columns[1]) if patch.columns[1] < across else (patch.rows[1], 0)


def matrix_view(tensor: Tensor, whole: Tiling) -> Tensor:
    """Returns the tensor as its matrix [R, S]: a view where strides allow it, a copy otherwise."""
    return tensor.reshape(whole.matrix)


def _rectangles(matrix_RS: Tensor, tiles_Crc: Tensor, whole: Tiling, patch: Patch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields pairs of equally shaped views of the matrix and the tiles, which cover the patch's unpadded elements.

    One pair without padding, up to four where the patch has padded tiles at its lower or right edge.
    """
    r, c = whole.tile
    gridded = tiles_Crc.view(*patch.grid, r, c)
    for row, down, height in _spans(patch.rows, r, whole.matrix[0]):
        for column, across, width in _spans(patch.columns, c, whole.matrix[1]):
            part = matrix_RS[row * r : row * r + down * height, column * c : column * c + across * width]
            part = part.unflatten(0, (down, height)).unflatten(2, (across, width)).transpose(1, 2)
            y, x = row - patch.rows[0], column - patch.columns[0]
            yield part, gridded[y : y + down, x : x + across, :height, :width]


def _spans(grid_range: tuple[int, int], side: int, size: int) -> list[tuple[int, int, int]]:
    """(first tile, number of tiles, unpadded elements in each) for the whole tiles, then for a padded last one."""
    start, stop = grid_range
    whole = min(stop, size // side)
    spans = [(start, whole - start, side)] if whole > start else []
    return spans if whole == stop else [*spans, (whole, 1, size - whole * side)]


def read_patch(matrix_RS: Tensor, tiles_Crc: Tensor, whole: Tiling, patch: Patch) -> None:
    """Copies a patch of the matrix into its tiles; padding becomes zero. Dtypes may differ."""
    bottom, right = patch.rows[1] * whole.tile[0], patch.columns[1] * whole.tile[1]
    if bottom > whole.matrix[0] or right > whole.matrix[1]:
        tiles_Crc.zero_()
    for part, tiles in _rectangles(matrix_RS, tiles_Crc, whole, patch):
        tiles.copy_(part)


def add_patch(matrix_RS: Tensor, tiles_Crc: Tensor, whole: Tiling, patch: Patch, decay: float = 1.0) -> None:
    """Patch of the matrix <- decay patch + tiles, in place; padding is dropped.

    If the matrix has a narrower dtype than the tiles, both steps are computed in the tiles' dtype and rounded once;
    otherwise a small decay would be lost.
    """
    for part, tiles in _rectangles(matrix_RS, tiles_Crc, whole, patch):
        decay_and_add(part, tiles, decay)


def decay_and_add(target: Tensor, direction: Tensor, decay: float) -> None:
    """target <- decay target + direction, in place; a narrower target is rounded once, as in `add_patch`.

    Example:
        >>> import torch
        >>> x = torch.ones(2)
        >>> decay_and_add(x, torch.full((2,), -0.25), decay=0.5), x
        (None, tensor([0.2500, 0.2500]))
    """
    wide = target if target.dtype.itemsize >= direction.dtype.itemsize else target.to(direction.dtype)
    if decay != 1:
        wide.mul_(decay)
    wide.add_(direction)
    if wide is not target:
        target.copy_(wide)


def write_patch(matrix_RS: Tensor, tiles_Crc: Tensor, whole: Tiling, patch: Patch) -> None:
    """Copies tiles into their patch of the matrix and drops padding: the inverse of `read_patch`."""
    for part, tiles in _rectangles(matrix_RS, tiles_Crc, whole, patch):
        part.copy_(tiles)
