"""Copies between parameters and the chunks of a block, for many parameters at once.

On an accelerator the number of operations counts, not their size. So parameters with equal chunkings, whose chunks come
at even distances, as those of a model's layers do, are copied together: stacked, then cut into chunks in one operation.
Vectors whose chunks have no padding lie in the block as they are.

Shapes: L parameters that are copied together; R, S rows and columns of their matrices; C chunks of r rows, c columns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from demopt.core.chunking import Chunking, Patch, matrix_view, rectangles


@dataclass(frozen=True)
class Placed:
    """A parameter whose chunks are all in one block, from chunk `start` on; `number` is its place among them."""

    number: int
    whole: Chunking
    start: int


@dataclass(frozen=True)
class Together:
    """Parameters that are copied together: `flat` vectors without a gap, or equal ones, `every` so many chunks."""

    members: tuple[Placed, ...]
    every: int
    flat: bool

    def chunks(self, chunks_Crc: Tensor) -> Tensor:
        """Returns their chunks as a view [L, C, r, c]."""
        first, each, count = self.members[0].start, self.members[0].whole.chunks, len(self.members)
        part = chunks_Crc[first : first + (count - 1) * self.every + each]
        return part.unfold(0, each, self.every).movedim(-1, 1)

    def pairs(self, stacked_LRS: Tensor, chunks_Crc: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns pairs of equally shaped views of the matrices and the chunks."""
        whole = self.members[0].whole
        everything = Patch((0, whole.grid[0]), (0, whole.grid[1]))
        return rectangles(stacked_LRS, self.chunks(chunks_Crc), whole, everything)

    @property
    def padded(self) -> bool:
        """Whether some chunks are padded."""
        (R, S), (r, c) = self.members[0].whole.matrix, self.members[0].whole.chunk_shape
        return bool(R % r or S % c)


def together(members: Iterable[Placed]) -> list[Together]:
    """Groups the parameters of a block.

    Examples:
        >>> from demopt.core.chunking import chunking
        >>> layers = [chunking(shape, 8) for shape in ((8, 8), (16, 8), (8, 8), (16, 8), (8, 8))]
        >>> [len(each.members) for each in together(map(Placed, range(5), layers, (0, 1, 3, 4, 6)))]
        [3, 2]
    """
    found: list[Together] = []
    vectors: list[Placed] = []
    alike: dict[Chunking, list[Placed]] = {}
    for member in members:
        if not member.whole.chunks:
            continue
        if member.whole.matrix[0] == 1 and member.whole.matrix[1] % member.whole.chunk_shape[1] == 0:
            if vectors and vectors[-1].start + vectors[-1].whole.chunks != member.start:
                found.append(Together(tuple(vectors), 0, flat=True))
                vectors = []
            vectors.append(member)
        else:
            alike.setdefault(member.whole, []).append(member)
    if vectors:
        found.append(Together(tuple(vectors), 0, flat=True))
    for same in alike.values():
        left = same
        while left:
            evenly = max((_evenly(left, step) for step in range(1, min(len(left), 9))), key=len, default=left[:1])
            every = evenly[1].start - evenly[0].start if len(evenly) > 1 else evenly[0].whole.chunks
            found.append(Together(tuple(evenly), every, flat=False))
            left = [member for member in left if member not in evenly]
    return found


def _evenly(members: list[Placed], step: int) -> list[Placed]:
    """Returns the members at even distances from the first one; `members[step]` is the second."""
    by_start = {member.start: member for member in members}
    distance, found = members[step].start - members[0].start, [members[0]]
    while (after := by_start.get(found[-1].start + distance)) is not None:
        found.append(after)
    return found


def read_together(groups: Sequence[Together], tensors: Sequence[Tensor | None], chunks_Crc: Tensor) -> None:
    """Fills a block's chunks with tensors, by the members' numbers; None counts as zeros, and so does padding."""
    if any(group.padded or any(tensors[member.number] is None for member in group.members) for group in groups):
        chunks_Crc.zero_()
    for group in groups:
        given = [tensors[member.number] for member in group.members]
        present = [tensor for tensor in given if tensor is not None]
        if len(present) < len(given):  # seldom: one at a time
            alone = [
                together([member])[0] for member, tensor in zip(group.members, given, strict=True) if tensor is not None
            ]
            for single in alone:
                _read(single, [t for t in (tensors[single.members[0].number],) if t is not None], chunks_Crc)
        else:
            _read(group, present, chunks_Crc)


def _read(group: Together, tensors: list[Tensor], chunks_Crc: Tensor) -> None:
    if group.flat:
        start, last = group.members[0].start, group.members[-1]
        flat = chunks_Crc[start : last.start + last.whole.chunks].view(-1)
        vectors = [tensor.reshape(-1) for tensor in tensors]
        if flat.dtype == vectors[0].dtype:
            torch.cat(vectors, out=flat)
        else:
            flat.copy_(torch.cat(vectors))
        return
    whole = group.members[0].whole
    matrices = [matrix_view(tensor, whole) for tensor in tensors]
    stacked = torch.stack(matrices) if len(matrices) > 1 else matrices[0].unsqueeze(0)
    for part, chunks in group.pairs(stacked, chunks_Crc):
        chunks.copy_(part)


def parts_of(groups: Sequence[Together], chunks_Crc: Tensor) -> list[tuple[int, Tensor]]:
    """Returns the inverse of `read_together`: each member's number, with its part of the chunks, without padding.

    The parts are contiguous, and have the shapes of the members' matrices [R, S].
    """
    found: list[tuple[int, Tensor]] = []
    for group in groups:
        if group.flat:
            for member in group.members:
                part = chunks_Crc[member.start : member.start + member.whole.chunks]
                found.append((member.number, part.reshape(member.whole.matrix)))
            continue
        stacked = chunks_Crc.new_empty(len(group.members), *group.members[0].whole.matrix)
        for part, chunks in group.pairs(stacked, chunks_Crc):
            part.copy_(chunks)
        found += [(member.number, part) for member, part in zip(group.members, stacked, strict=True)]
    return found
