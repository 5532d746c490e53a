"""What the tests of the Triton kernels share: the device, tiles read and written by core functions alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from demopt.core.chunk import Tiling, add_patch, matrix_view, patches, read_patch, tiling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

#: Shapes whose tiles are alike, and the chunk that they are cut with.
ALIKE: dict[str, tuple[list[tuple[int, ...]], int]] = {
    "whole tiles": ([(32, 48), (16, 16)], 16),
    "64 x 64": ([(64, 128)], 64),
    "padded": ([(13, 11), (7, 22)], 7),
    "one padded": ([(101, 53)], 64),
    "tall": ([(40, 1)], 64),
    "flat": ([(2, 40)], 64),
    "more dimensions": ([(5, 2, 3), (5, 6)], 8),
    "vectors": ([(96,), (48,), (1, 144)], 64),
    "padded vectors": ([(101,), (51,)], 64),
    "many vectors": ([(37,)] * 19, 64),
    "one element": ([(), (1,), (1, 1)], 64),
}


def tilings_of(shapes: Sequence[tuple[int, ...]], chunk: int) -> list[Tiling]:
    tilings = [tiling(shape, chunk) for shape in shapes]
    assert len({whole.tile for whole in tilings}) == 1
    return tilings


def tiles_of(tensors: Sequence[Tensor | None], tilings: Sequence[Tiling]) -> Tensor:
    """float32 [C, r, c], missing tensors as zeros."""
    tiles = torch.zeros(sum(whole.tiles for whole in tilings), *tilings[0].tile, device=DEVICE)
    start = 0
    for tensor, whole in zip(tensors, tilings, strict=True):
        for patch in patches(whole, max(whole.tiles, 1)):
            if tensor is not None:
                read_patch(matrix_view(tensor, whole), tiles[start : start + patch.tiles], whole, patch)
            start += patch.tiles
    return tiles


def add_tiles(tensors: Sequence[Tensor], tilings: Sequence[Tiling], tiles_Crc: Tensor, scale: float) -> None:
    """Adds scale times the tiles to the tensors, which have a matrix view."""
    start = 0
    for tensor, whole in zip(tensors, tilings, strict=True):
        for patch in patches(whole, max(whole.tiles, 1)):
            add_patch(matrix_view(tensor, whole), scale * tiles_Crc[start : start + patch.tiles], whole, patch)
            start += patch.tiles
