"""Tables on the device of where a chunk group's parameters are in memory, so that one launch works on all of them.

Shapes: X members (parameters, or their gradients), C chunks.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from demopt.core.chunk import Chunking, matrix_view

#: The code of each dtype; code 0 marks a missing member, which counts as zeros.
CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
MIXED = 0  # the code of a table whose members have different dtypes

_ALIGNED_BYTES, _ALIGNED_ELEMENTS = 16, 8  # one 16-byte access; 8 elements of the narrowest dtype


class Member(NamedTuple):
    """One row of the table: strides and sizes in elements, `across` in chunks, `first` the member's first chunk."""

    address: int
    row_stride: int
    column_stride: int
    rows: int
    columns: int
    across: int
    first: int
    code: int


FIELDS = len(Member._fields)


class Table(NamedTuple):
    """The members (int64 [X, 8]) and each chunk's member (int32 [C]) on the device, and what all members share."""

    members: Tensor
    member_of_chunk: Tensor
    code: int
    aligned: bool


def table(matrices: Sequence[Tensor | None], chunkings: Sequence[Chunking], device: torch.device) -> Table:
    """Returns the table of matrices [R, S] in the dtypes of CODES, one per chunking; None counts as zeros.

    A table for the same addresses and sizes is reused; a new one is copied to the device from pinned memory, so the
    host never waits.

    Examples:
        >>> from demopt.core.chunk import chunking
        >>> chunkings = [chunking((4, 6), chunk=3), chunking((2, 3), chunk=3)]
        >>> found = table([None, torch.zeros(2, 3)], chunkings, torch.device("cpu"))
        >>> found.member_of_chunk.tolist(), found.members[:, 1:].tolist(), found.code
        ([0, 0, 0, 0, 1], [[0, 0, 4, 6, 2, 0, 0], [3, 1, 2, 3, 1, 4, 1]], 1)
    """
    members = _members(matrices, chunkings)
    present = [member for member in members if member.code]
    codes = {member.code for member in present}
    return Table(
        _on_device(members, device, _stream(device)),
        _member_of_chunk(tuple(whole.chunks for whole in chunkings), device, _stream(device)),
        codes.pop() if len(codes) == 1 else MIXED,
        bool(present) and all(_aligned(member) for member in members),
    )


def matrix(tensor: Tensor | None, whole: Chunking) -> Tensor | None:
    """Returns the tensor as its matrix [R, S], a copy if its strides allow no view; None for None."""
    return None if tensor is None else matrix_view(tensor.detach(), whole)


def _members(matrices: Sequence[Tensor | None], chunkings: Sequence[Chunking]) -> tuple[Member, ...]:
    members, first = [], 0
    for tensor, whole in zip(matrices, chunkings, strict=True):
        place = (0, 0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0), tensor.stride(1))
        code = 0 if tensor is None else CODES[tensor.dtype]
        members.append(Member(*place, *whole.matrix, whole.grid[1], first, code))
        first += whole.chunks
    return tuple(members)


def _aligned(member: Member) -> bool:
    """Whether every run of 8 elements in a row is complete and aligned to 16 bytes, so that accesses can be wide."""
    wide = (member.row_stride, member.columns)
    near = member.column_stride == 1 and all(size % _ALIGNED_ELEMENTS == 0 for size in wide)
    return not member.code or (near and member.address % _ALIGNED_BYTES == 0)


@functools.lru_cache(maxsize=64)
def _on_device(members: tuple[Member, ...], device: torch.device, stream: int) -> Tensor:
    """Returns the members as int64 [X, 8]. They depend on numbers alone, so a cached table cannot be stale.

    `stream` is only part of the cache key: a copy made on one stream may not have finished for another.
    """
    del stream
    return _copied(torch.tensor(members, dtype=torch.int64).view(-1, FIELDS), device)


@functools.lru_cache(maxsize=64)
def _member_of_chunk(chunks: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Returns int32 [C], separate from the members because it is longer and does not depend on addresses."""
    del stream
    numbers = torch.arange(len(chunks), dtype=torch.int32)
    return _copied(numbers.repeat_interleave(torch.tensor(chunks, dtype=torch.int64)), device)


def _copied(numbers: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
