"""Chunk groups: parameters with equal chunks and settings share one momentum buffer, processed block by block.

A block has whole grid rows of its parameters' chunks. A few operations copy all its parameters, because an accelerator
pays for each operation: they are joined end to end; then a table of places moves each line (one row of one chunk) to
its place in the chunks.

Shapes: R, S rows and columns of a parameter's matrix; h of its rows in a block; F lines of c elements of all
parameters in a block; C chunks of r lines, N = r c; K kept.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from demopt.codec.hyperparameters import Hyperparameters
from demopt.core.chunking import Chunking, chunking
from demopt.core.constants import constant
from demopt.core.exact import basis_unit, integer_basis
from demopt.core.transform import basis
from demopt.exchange.dtensor import to_local
from demopt.kernels.step import Kernel, Tensors, covers
from demopt.wire.layout import GRANULE, Section
from demopt.wire.quantizers import QUANTIZERS

_BLOCK_ELEMENTS = 1 << 20  # a block's gradients, momentum and spare fit in a CPU's last-level cache
_DEVICE_BLOCK_ELEMENTS = 1 << 27  # an accelerator pays for each operation: a chunk group is one block, if memory allows


@dataclass(frozen=True)
class ChunkedParameter:
    """A parameter in a chunk group; `number` is its place among all parameters, the same on all ranks."""

    number: int
    parameter: Tensor
    chunking: Chunking


@dataclass(frozen=True)
class Piece:
    """Grid rows [first, last) of one parameter's chunks inside a block, from the block's chunk `start` on."""

    of: ChunkedParameter
    first: int
    last: int
    start: int

    @property
    def chunks(self) -> int:
        return (self.last - self.first) * self.of.chunking.grid[1]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows h of the parameter's matrix, and columns, including those that pad the last chunks."""
        cut = self.of.chunking
        r, c = cut.chunk_shape
        return min(self.last * r, cut.matrix[0]) - self.first * r, cut.grid[1] * c

    def rows(self, tensor: Tensor) -> Tensor:
        """Returns the rows of a tensor shaped like the parameter, as a view."""
        r = self.of.chunking.chunk_shape[0]
        return tensor[self.first * r : self.last * r] if tensor.dim() > 1 else tensor


class Block:
    """The chunks of `pieces`, from chunk `start` of a chunk group on.

    Examples:
        >>> whole = ChunkedParameter(0, torch.zeros(5, 2), chunking((5, 2), chunk=4))
        >>> block = Block([Piece(whole, first=0, last=2, start=0)], start=0)
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
        """For each line of the chunks, its line of the parameters (F: zeros), and the reverse; None if in order."""
        r, c = self.pieces[0].of.chunking.chunk_shape
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
        device = self.pieces[0].of.parameter.device
        return flat.to(device, torch.int32), targets[:-1].to(device, torch.int32)

    def read(self, tensors: Tensors, chunks_Crc: Tensor, spare_Crc: Tensor, minus: Tensors | None = None) -> None:
        """Fills chunks with the pieces' tensors - minus, in the chunks' dtype; None: zeros. Overwrites the spare."""
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
        return [part.view(piece.shape)[:, : piece.of.chunking.matrix[1]] for piece, part in parts]

    def _join(self, tensors: Tensors, out_Crc: Tensor, zeros: int = 0) -> None:
        """Writes the pieces' rows of the tensors end to end, followed by the given number of zeros."""
        dtype = next((tensor.dtype for tensor in tensors if tensor is not None), out_Crc.dtype)
        zero = constant((0,), dtype, out_Crc.device)
        parts = []
        for piece, size, tensor in zip(self.pieces, self._sizes, tensors, strict=True):
            if tensor is None:
                parts.append(zero.expand(size))
                continue
            rows, padding = piece.rows(tensor), piece.shape[1] - piece.of.chunking.matrix[1]
            if padding:
                rows = torch.nn.functional.pad(rows.reshape(piece.shape[0], -1), (0, padding))
            parts.append(rows.reshape(-1))
        parts.append(zero.expand(zeros))
        flat = out_Crc.view(-1)[: sum(self._sizes) + zeros]
        if flat.is_cpu or all(part.dtype == flat.dtype for part in parts):
            torch.cat(parts, out=flat)
        else:  # an accelerator would convert them one by one
            flat.copy_(torch.cat(parts))


def blocks_of(parameters: Sequence[ChunkedParameter], most: int, undivided: bool) -> Iterator[Block]:
    """Yields blocks of at most `most` chunks, or of one grid row if that has more; `undivided`: of whole parameters."""
    pieces: list[Piece] = []
    start = count = 0
    for chunked in parameters:
        down, across = chunked.chunking.grid
        unit, first = down if undivided else 1, 0  # grid rows
        while first < down:
            rows = max(most - count, 0) // (unit * across) * unit
            if not rows and pieces:
                yield Block(pieces, start)
                pieces, start, count = [], start + count, 0
                continue
            last = min(first + max(rows, unit), down)
            pieces.append(Piece(chunked, first, last, count))
            count += pieces[-1].chunks
            first = last
    if pieces:
        yield Block(pieces, start)


@dataclass(frozen=True)
class GroupKey:
    """The traits that parameters of one chunk group share; `param_group` is their parameter group's number."""

    param_group: int
    chunk_shape: tuple[int, int]
    keep: int
    values: str
    transform: str
    dtype: torch.dtype
    device: torch.device
    exact: bool

    @cached_property
    def ties(self) -> bool:
        """Whether a zero of the update is a tie and gets a sign; with the identity transform, zero means "not sent"."""
        return QUANTIZERS[self.values].largest_level > 0 and self.transform != "identity"

    @cached_property
    def length(self) -> int:
        """N, the number of elements in a chunk."""
        return self.chunk_shape[0] * self.chunk_shape[1]


class ChunkGroup:
    """The parameters of one key, their momentum [C, r, c], and the blocks that divide it.

    `before`, a chunk group of the same parameters and chunks, hands over its buffers. `kernels`: as in `Codec`.
    """

    def __init__(
        self,
        key: GroupKey,
        settings: Hyperparameters,
        parameters: list[ChunkedParameter],
        kernels: str,
        before: "ChunkGroup | None",
    ) -> None:
        self.key = key
        self.settings = settings  # the wiring replaces it when a hyper-parameter changes
        self.parameters = parameters
        self.rule = settings.update
        self.chunks = sum(chunked.chunking.chunks for chunked in parameters)
        shape = (self.chunks, *key.chunk_shape)
        self.momentum: Tensor = before.momentum if before else torch.zeros(shape, dtype=key.dtype, device=key.device)
        self.flat_momentum = self.momentum.view(self.chunks, key.length)  # [C, N]
        self.rule_state: dict[str, Tensor]
        if before and before.rule == self.rule:
            self.rule_state = before.rule_state
        else:
            self.rule_state = {name: torch.zeros_like(self.momentum) for name in self.rule.moments}
            self.rule_state |= {name: self.momentum.new_zeros(self.chunks, 1, 1) for name in self.rule.weights}
        elements = _BLOCK_ELEMENTS if key.device.type == "cpu" else _DEVICE_BLOCK_ELEMENTS
        self.block_chunks = max(elements // key.length // GRANULE, 1) * GRANULE
        self.blocks = list(blocks_of(parameters, self.block_chunks, undivided=self.rule.whole_matrix))
        self.section = Section(self.chunks, key.length, key.keep, key.values)  # its part of a message
        device = str(key.device)
        rows, columns = (basis(key.transform, side, key.dtype, device) for side in key.chunk_shape)
        self.bases = self.inverse_bases = (rows, columns)
        self.basis_unit = 1.0
        self.largest_level: int | None = None  # None: decoding runs in floats
        if key.exact:
            rows, columns = (integer_basis(key.transform, side, device) for side in key.chunk_shape)
            self.inverse_bases = (rows, columns)
            self.basis_unit = math.prod(basis_unit(key.transform, side) for side in key.chunk_shape)
            self.largest_level = QUANTIZERS[key.values].largest_level
        self.kernel: Kernel | None = None  # None: torch operations
        if kernels == "auto" and covers(key.chunk_shape, key.dtype, key.device):
            keep = None if self.section.all_signs else key.keep
            self.kernel = Kernel([chunked.chunking for chunked in parameters], key.transform, keep)
        self.inverter = self.kernel if key.exact else None  # steps 6 and 7
        signs = self.rule.signs_only and key.ties
        self.updater = self.inverter if signs or self.rule.name == "sgd" else None  # step 8 too

    def rows(self, tensor_Cnn: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each parameter with its rows [chunks, n] of a tensor over the group's chunks, as a view."""
        flat, start = tensor_Cnn.flatten(1), 0
        for chunked in self.parameters:
            yield chunked.parameter, flat[start : start + chunked.chunking.chunks]
            start += chunked.chunking.chunks


def build(
    grouped: Iterable[tuple[int, Tensor]], settings: list[Hyperparameters], kernels: str, before: Iterable[ChunkGroup]
) -> list[ChunkGroup]:
    """Builds the chunk groups of all parameters that train; `grouped`: each after its parameter group's number.

    The groups `before` hand over their buffers, so that a round begun with them subtracts from the same momentum.
    """
    by_key: dict[GroupKey, list[ChunkedParameter]] = {}
    for number, (group, parameter) in enumerate(grouped):
        if parameter.requires_grad:
            local, own = to_local(parameter), settings[group]
            cut = chunking(tuple(local.shape), own.chunk, own.chunking)
            dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            keep, exact = own.keep_count(math.prod(cut.chunk_shape)), own.is_exact(dtype)
            key = GroupKey(group, cut.chunk_shape, keep, own.values, own.transform, dtype, local.device, exact)
            by_key.setdefault(key, []).append(ChunkedParameter(number, parameter, cut))  # even if it has no chunks
    old = {_buffers_of(chunk_group.key, chunk_group.parameters): chunk_group for chunk_group in before}
    return [
        ChunkGroup(key, settings[key.param_group], mine, kernels, old.get(_buffers_of(key, mine)))
        for key, mine in by_key.items()
    ]


def _buffers_of(key: GroupKey, parameters: list[ChunkedParameter]) -> tuple[object, ...]:
    """Returns the traits that must be equal for one chunk group to take over another's buffers."""
    return (key.chunk_shape, key.dtype, key.device, *((id(each.parameter), each.chunking) for each in parameters))
