"""Copies between parameters and the chunks of a block, for all parameters in a few operations.

On an accelerator the number of operations counts. Parameters are joined end to end; a table of places then puts each
line, one row of one chunk, where the chunks have it.

Shapes: F lines of c elements in all parameters; C chunks of r lines.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from demopt.core.aggregate import constant
from demopt.core.chunking import Chunking


@dataclass(frozen=True)
class Placed:
    """A parameter whose chunks are all in one block, from chunk `start` on; `number` is its place among all."""

    number: int
    whole: Chunking
    start: int


class BlockCopy:
    """Copies between parameters and a block of `chunks` chunks; no chunk of theirs may have padded columns.

    Examples:
        >>> from demopt.core.chunking import chunking
        >>> copy = BlockCopy([Placed(0, chunking((5, 2), chunk=4), start=0)], 2, torch.device("cpu"))
        >>> chunks, spare = torch.zeros(2, 2, 3, 2)
        >>> copy.read([torch.arange(10.0).view(5, 2)], chunks, spare)
        >>> chunks[1]
        tensor([[6., 7.],
                [8., 9.],
                [0., 0.]])
        >>> copy.write(chunks, spare)[0][1]
        tensor([0., 1., 2., 3., 4., 5., 6., 7., 8., 9.])
    """

    def __init__(self, members: Sequence[Placed], chunks: int, device: torch.device) -> None:
        self.members = members
        self._sizes = [member.whole.matrix[0] * member.whole.matrix[1] for member in members]
        r, self._columns = members[0].whole.chunk_shape
        self._lines = sum(self._sizes) // self._columns  # F; line F holds zeros
        sources = torch.full((chunks, r), self._lines)  # of the lines in chunk order
        first = 0
        for member in members:
            (down, across), rows = member.whole.grid, member.whole.matrix[0]
            lines = torch.arange(down * r * across).view(down, r, across).transpose(1, 2).reshape(-1, r)
            part = sources[member.start : member.start + down * across]
            part.copy_((first + lines).masked_fill_(lines >= rows * across, self._lines))
            first += rows * across
        flat = sources.flatten()
        self._padded = len(flat) > self._lines
        targets = torch.empty(self._lines + 1, dtype=torch.int64).scatter_(0, flat, torch.arange(len(flat)))[:-1]
        in_order = torch.equal(flat, torch.arange(self._lines))  # as those of vectors are
        self._sources = None if in_order else flat.to(device, torch.int32)
        self._targets = None if in_order else targets.to(device, torch.int32)

    def read(
        self,
        tensors: Sequence[Tensor | None],
        chunks_Crc: Tensor,
        spare_Crc: Tensor,
        minus: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Fills the block with tensors - minus, by the members' numbers; None counts as zeros, and so does padding.

        Overwrites the spare, and chunks of other parameters.
        """
        joined, other = (chunks_Crc, spare_Crc) if self._sources is None else (spare_Crc, chunks_Crc)
        self._join(tensors, joined, zeros=self._columns if self._padded else 0)
        if minus is not None:
            present = [None if tensor is None else less for tensor, less in zip(tensors, minus, strict=True)]
            elements = sum(self._sizes)
            self._join(present, other)
            joined.view(-1)[:elements].sub_(other.view(-1)[:elements])
        if self._sources is not None:
            lines = joined.view(-1, self._columns)
            torch.index_select(lines, 0, self._sources, out=chunks_Crc.view(-1, self._columns))

    def write(self, chunks_Crc: Tensor, spare_Crc: Tensor) -> list[tuple[int, Tensor]]:
        """Returns each member's number with its elements, flat, without padding: views of the chunks or the spare."""
        flat = chunks_Crc.view(-1)[: sum(self._sizes)]
        if self._targets is not None:
            flat = spare_Crc.view(-1)[: sum(self._sizes)]
            lines = chunks_Crc.view(-1, self._columns)
            torch.index_select(lines, 0, self._targets, out=flat.view(-1, self._columns))
        numbers = [member.number for member in self.members]
        return list(zip(numbers, flat.split(self._sizes), strict=True))

    def _join(self, tensors: Sequence[Tensor | None], out_Crc: Tensor, zeros: int = 0) -> None:
        """Writes the tensors end to end, and so many zeros."""
        given = [tensors[member.number] for member in self.members]
        dtype = next((tensor.dtype for tensor in given if tensor is not None), out_Crc.dtype)
        zero = constant((0,), dtype, out_Crc.device)
        parts = [
            zero.expand(size) if tensor is None else tensor.reshape(-1)
            for size, tensor in zip([*self._sizes, zeros], [*given, None], strict=True)
        ]
        flat = out_Crc.view(-1)[: sum(self._sizes) + zeros]
        if all(part.dtype == flat.dtype for part in parts):
            torch.cat(parts, out=flat)
        else:
            flat.copy_(torch.cat(parts))
