"""Blocks: chunks that are processed together, and the copies between them and the parameters.

A block has whole grid rows of its parameters' chunks. All its parameters are copied in a few operations, because an
accelerator pays for each: they are joined end to end; a table of places then puts each line, one row of one chunk,
where the chunks have it.

Shapes: R, S rows and columns of a parameter's matrix; h of its rows in a block; F lines of c elements of all
parameters in a block; C chunks of r lines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from demopt.core.chunking import Chunking
from demopt.core.constants import constant


@dataclass(frozen=True)
class Member:
    """A parameter in a chunk group; `number` is its place among all parameters, the same on all ranks."""

    number: int
    parameter: Tensor
    chunking: Chunking


@dataclass(frozen=True)
class Piece:
    """Grid rows [first, last) of one parameter's chunks inside a block, from the block's chunk `start` on."""

    member: Member
    first: int
    last: int
    start: int

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return (self.last - self.first) * self.member.chunking.grid[1]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows h of the parameter's matrix, and columns; those that pad the last chunks are among the columns."""
        chunking = self.member.chunking
        r, c = chunking.chunk_shape
        return min(self.last * r, chunking.matrix[0]) - self.first * r, chunking.grid[1] * c

    def rows(self, tensor: Tensor) -> Tensor:
        """Returns the rows of a tensor shaped like the parameter, as a view."""
        r = self.member.chunking.chunk_shape[0]
        return tensor[self.first * r : self.last * r] if tensor.dim() > 1 else tensor


class Block:
    """The chunks of `pieces`, from chunk `start` of a chunk group on.

    Examples:
        >>> from demopt.core.chunking import chunking
        >>> parameter = torch.zeros(5, 2)
        >>> block = Block([Piece(Member(0, parameter, chunking((5, 2), chunk=4)), first=0, last=2, start=0)], start=0)
        >>> chunks, spare = torch.zeros(2, 2, 3, 2)
        >>> block.read([torch.arange(10.0).view(5, 2)], chunks, spare)
        >>> chunks[1]
        tensor([[6., 7.],
                [8., 9.],
                [0., 0.]])
        >>> block.write(chunks, spare)[0].T
        tensor([[0., 2., 4., 6., 8.],
                [1., 3., 5., 7., 9.]])
    """

    def __init__(self, pieces: Sequence[Piece], start: int) -> None:
        self.pieces = pieces
        self.start = start
        self.stop = start + sum(piece.chunks for piece in pieces)
        self._sizes = [piece.shape[0] * piece.shape[1] for piece in pieces]

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor] | None:
        """The line of the parameters for each line of the chunks, F for zeros, and the reverse; None if in order."""
        r, c = self.pieces[0].member.chunking.chunk_shape
        lines = sum(self._sizes) // c
        sources, begin = torch.full((self.stop - self.start, r), lines, device="cpu"), 0
        for piece in self.pieces:
            down, across = piece.last - piece.first, piece.shape[1] // c
            inside = torch.arange(down * r * across, device="cpu").view(down, r, across).transpose(1, 2).reshape(-1, r)
            count = piece.shape[0] * across
            sources[piece.start : piece.start + piece.chunks] = (begin + inside).masked_fill_(inside >= count, lines)
            begin += count
        flat = sources.flatten()
        if torch.equal(flat, torch.arange(lines, device="cpu")):  # as those of vectors are
            return None
        targets = torch.empty(lines + 1, dtype=torch.int64, device="cpu")
        targets.scatter_(0, flat, torch.arange(len(flat), device="cpu"))
        device = self.pieces[0].member.parameter.device
        return flat.to(device, torch.int32), targets[:-1].to(device, torch.int32)

    def read(
        self,
        tensors: Sequence[Tensor | None],
        chunks_Crc: Tensor,
        spare_Crc: Tensor,
        minus: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Fills the chunks with tensors - minus, one for each piece; None counts as zeros, and so does padding.

        Overwrites the spare. Differences are taken in the chunks' dtype.
        """
        joined, other = (chunks_Crc, spare_Crc) if self._places is None else (spare_Crc, chunks_Crc)
        c = chunks_Crc.shape[-1]
        self._join(tensors, joined, zeros=c if chunks_Crc.numel() > sum(self._sizes) else 0)
        if minus is not None:
            elements = sum(self._sizes)
            self._join(minus, other)
            joined.view(-1)[:elements].sub_(other.view(-1)[:elements])
        if self._places is not None:
            torch.index_select(joined.view(-1, c), 0, self._places[0], out=chunks_Crc.view(-1, c))

    def write(self, chunks_Crc: Tensor, spare_Crc: Tensor) -> list[Tensor]:
        """Returns the rows [h, S] of each piece, without padding: views of the chunks or the spare."""
        flat, c = chunks_Crc.view(-1)[: sum(self._sizes)], chunks_Crc.shape[-1]
        if self._places is not None:
            flat = spare_Crc.view(-1)[: sum(self._sizes)]
            torch.index_select(chunks_Crc.view(-1, c), 0, self._places[1], out=flat.view(-1, c))
        parts = zip(self.pieces, flat.split(self._sizes), strict=True)
        return [part.view(piece.shape)[:, : piece.member.chunking.matrix[1]] for piece, part in parts]

    def _join(self, tensors: Sequence[Tensor | None], out_Crc: Tensor, zeros: int = 0) -> None:
        """Writes the pieces' rows of the tensors end to end, and so many zeros."""
        dtype = next((tensor.dtype for tensor in tensors if tensor is not None), out_Crc.dtype)
        zero = constant((0,), dtype, out_Crc.device)
        parts = []
        for piece, size, tensor in zip(self.pieces, self._sizes, tensors, strict=True):
            if tensor is None:
                parts.append(zero.expand(size))
                continue
            rows, padding = piece.rows(tensor), piece.shape[1] - piece.member.chunking.matrix[1]
            if padding:
                rows = torch.nn.functional.pad(rows.reshape(piece.shape[0], -1), (0, padding))
            parts.append(rows.reshape(-1))
        parts.append(zero.expand(zeros))
        flat = out_Crc.view(-1)[: sum(self._sizes) + zeros]
        if flat.is_cpu or all(part.dtype == flat.dtype for part in parts):
            torch.cat(parts, out=flat)
        else:  # an accelerator would convert them one by one
            flat.copy_(torch.cat(parts))


def blocks_of(members: Sequence[Member], most: int, undivided: bool) -> Iterator[Block]:
    """Yields blocks of at most `most` chunks, or of one grid row where that has more; `undivided`: of whole parameters.

    Examples:
        >>> from demopt.core.chunking import chunking
        >>> members = [Member(0, torch.zeros(4, 6), chunking((4, 6), chunk=2))]
        >>> [(block.start, block.stop) for block in blocks_of(members, most=4, undivided=False)]
        [(0, 3), (3, 6)]
    """
    pieces: list[Piece] = []
    start = count = 0
    for member in members:
        down, across = member.chunking.grid
        unit, first = down if undivided else 1, 0  # grid rows
        while first < down:
            rows = max(most - count, 0) // (unit * across) * unit
            if not rows and pieces:
                yield Block(pieces, start)
                pieces, start, count = [], start + count, 0
                continue
            last = min(first + max(rows, unit), down)
            pieces.append(Piece(member, first, last, count))
            count += pieces[-1].chunks
            first = last
    if pieces:
        yield Block(pieces, start)
