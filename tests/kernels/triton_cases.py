"""What the tests of the Triton kernels share: the device, chunks read and written by core functions alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from demopt.core.chunk import Chunking, add_patch, chunking, matrix_view, patches, read_patch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

#: Shapes with chunks of one shape, and the `chunk` that they are cut with.
ALIKE: dict[str, tuple[list[tuple[int, ...]], int]] = {
    "whole chunks": ([(32, 48), (16, 16)], 16),
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


def chunkings_of(shapes: Sequence[tuple[int, ...]], chunk: int) -> list[Chunking]:
    chunkings = [chunking(shape, chunk) for shape in shapes]
    assert len({whole.chunk_shape for whole in chunkings}) == 1
    return chunkings


def chunks_of(tensors: Sequence[Tensor | None], chunkings: Sequence[Chunking]) -> Tensor:
    """float32 [C, r, c], missing tensors as zeros."""
    chunks = torch.zeros(sum(whole.chunks for whole in chunkings), *chunkings[0].chunk_shape, device=DEVICE)
    start = 0
    for tensor, whole in zip(tensors, chunkings, strict=True):
        for patch in patches(whole, max(whole.chunks, 1)):
            if tensor is not None:
                read_patch(matrix_view(tensor, whole), chunks[start : start + patch.chunks], whole, patch)
            start += patch.chunks
    return chunks


def add_chunks(tensors: Sequence[Tensor], chunkings: Sequence[Chunking], chunks_Crc: Tensor, scale: float) -> None:
    """Adds scale times the chunks to the tensors, which have a matrix view."""
    start = 0
    for tensor, whole in zip(tensors, chunkings, strict=True):
        for patch in patches(whole, max(whole.chunks, 1)):
            add_patch(matrix_view(tensor, whole), scale * chunks_Crc[start : start + patch.chunks], whole, patch)
            start += patch.chunks
