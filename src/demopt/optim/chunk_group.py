"""Chunk groups: parameters with equal chunks and settings share one momentum buffer, which is processed block by block.

Shapes: C chunks, r rows and c columns of a chunk, N = r c, K kept.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from demopt.core.chunk import (
    Chunking,
    Patch,
    add_patch,
    chunking,
    decay_and_add,
    matrix_view,
    patches,
    read_patch,
    write_patch,
)
from demopt.core.exact import basis_unit, integer_basis
from demopt.core.transform import basis
from demopt.core.update import rule_of
from demopt.kernels.choice import Kernels, kernels_for
from demopt.optim.settings import is_exact, keep_count
from demopt.wire.layout import GRANULE, Section
from demopt.wire.values import CODECS, Stepped

_BLOCK_ELEMENTS = 1 << 20  # a block's gradients, momentum and spare fit in a CPU's last-level cache
_SPAN_COEFFICIENTS = 1 << 17  # decoded at once; each takes tens of bytes


@dataclass(frozen=True)
class Kind:
    """What parameters must have in common to be in one chunk group.

    Example:
        >>> kind = Kind(0, (64, 64), 32, "sign", "dct", torch.float32, torch.device("cpu"), frozen=False, exact=True)
        >>> kind.length, kind.ties
        (4096, True)
    """

    group: int
    chunk_shape: tuple[int, int]
    keep: int
    values: str
    transform: str
    dtype: torch.dtype
    device: torch.device
    frozen: bool
    exact: bool
    relay_keep: int = 1

    @property
    def ties(self) -> bool:
        """Whether a zero of the update is a tie and gets a sign; with the identity transform, zero means "not sent"."""
        return isinstance(CODECS[self.values], Stepped) and self.transform != "identity"

    @property
    def length(self) -> int:
        """N, the number of elements in a chunk."""
        return self.chunk_shape[0] * self.chunk_shape[1]


@dataclass(frozen=True)
class Piece:
    """A patch of one parameter inside a block: chunks [start, start + patch.chunks) of the block."""

    parameter: Tensor
    whole: Chunking
    patch: Patch
    start: int


@dataclass
class Block:
    """Chunks [start, stop) of a chunk group, which are processed together."""

    start: int
    stop: int
    pieces: list[Piece] = field(default_factory=list)


class ChunkGroup:
    """The parameters of one kind, their momentum [C, r, c], and the blocks that divide it."""

    def __init__(self, kind: Kind, group: dict[str, Any], members: list[tuple[Tensor, Chunking]]) -> None:
        self.key = kind
        self.group = group
        self.members = members
        self.chunks = sum(whole.chunks for _, whole in members)
        self.momentum = torch.zeros(self.chunks, *kind.chunk_shape, dtype=kind.dtype, device=kind.device)
        self.rule = rule_of(group["update"])
        self.rule_state = {name: torch.zeros_like(self.momentum) for name in self.rule.moments}  # of the update rule
        self.rule_state |= {name: self.momentum.new_zeros(self.chunks, 1, 1) for name in self.rule.weights}
        self.relay: Tensor | None = None  # what route "relay" keeps back for the chunks that this rank owns, [C, N]
        self.relay_start = 0
        self.block_chunks = max(_BLOCK_ELEMENTS // kind.length // GRANULE, 1) * GRANULE
        self.blocks = list(_blocks(members, self.block_chunks))
        self.kernels = kernels_for(kind.chunk_shape, kind.dtype, kind.device)
        device = str(kind.device)
        rows, columns = (basis(kind.transform, side, kind.dtype, device) for side in kind.chunk_shape)
        self.bases = self.inverse_bases = (rows, columns)
        self.basis_unit = 1.0
        if kind.exact:
            rows, columns = (integer_basis(kind.transform, side, device) for side in kind.chunk_shape)
            self.inverse_bases = (rows, columns)
            self.basis_unit = math.prod(basis_unit(kind.transform, side) for side in kind.chunk_shape)

    @cached_property
    def section(self) -> Section:
        """The chunk group's part of a message."""
        return Section(self.chunks, self.key.length, self.key.keep, self.key.values)

    def spans(self, world_size: int) -> Iterator[list[Block]]:
        """Yields runs of blocks to decode together for `world_size` ranks: few calls, bounded memory."""
        blocks = max(1, _SPAN_COEFFICIENTS // (world_size * self.key.keep * self.block_chunks))
        for first in range(0, len(self.blocks), blocks):
            yield self.blocks[first : first + blocks]

    def gradients(self) -> list[Tensor | None]:
        """Returns each parameter's gradient; None counts as zero."""
        return [None if p.grad is None else local(p.grad) for p, _ in self.members]

    @property
    def chunkings(self) -> list[Chunking]:
        """Each parameter's chunking."""
        return [whole for _, whole in self.members]

    def decoding(self) -> Kernels | None:
        """Returns the kernels that can decode for this chunk group, or None."""
        return self.kernels if self.key.exact and self.key.ties and self.rule.signs_only else None

    @property
    def flat_momentum(self) -> Tensor:
        """The momentum as [C, N], a view."""
        return self.momentum.view(self.chunks, self.key.length)

    def own(self, start: int, stop: int) -> None:
        """Allocates `relay` for chunks [start, stop), which this rank owns."""
        self.relay, self.relay_start = self.momentum.new_zeros(stop - start, self.key.length), start

    def relays(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yields each parameter, its rows [chunks, N] of `relay` (a view) and the chunk of its first row."""
        if self.relay is None:
            return
        start = 0
        for parameter, whole in self.members:
            first, last = (min(max(at - self.relay_start, 0), len(self.relay)) for at in (start, start + whole.chunks))
            yield parameter, self.relay[first:last], first + self.relay_start - start
            start += whole.chunks

    def momenta(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each parameter with its rows [chunks, N] of the momentum, a view."""
        return self.rows(self.momentum)

    def rows(self, tensor_Cnn: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each parameter with its rows [chunks, n] of a tensor over the chunk group's chunks, a view."""
        flat, start = tensor_Cnn.flatten(1), 0
        for parameter, whole in self.members:
            yield parameter, flat[start : start + whole.chunks]
            start += whole.chunks


def _blocks(members: list[tuple[Tensor, Chunking]], most: int) -> Iterator[Block]:
    """Yields blocks of exactly `most` chunks; the last one may be smaller."""
    block, chunk = Block(0, 0), 0
    for parameter, whole in members:
        for patch in patches(whole, most, first=most - (chunk - block.start)):
            if chunk - block.start == most:
                yield block
                block = Block(chunk, chunk)
            block.pieces.append(Piece(parameter, whole, patch, chunk - block.start))
            chunk += patch.chunks
            block.stop = chunk
    if block.stop > block.start:
        yield block


def read_gradients(block: Block, chunks_Crc: Tensor) -> None:
    """Fills the block's chunks with gradients; a parameter without one counts as zero."""
    for piece in block.pieces:
        part = chunks_Crc[piece.start : piece.start + piece.patch.chunks]
        if piece.parameter.grad is None:
            part.zero_()
        else:
            gradient = local(piece.parameter.grad)
            read_patch(matrix_view(gradient, piece.whole), part, piece.whole, piece.patch)


def update_parameters(block: Block, direction_Crc: Tensor, group: dict[str, Any]) -> None:
    """X <- X - lr wd X - lr direction, for the block's part of its parameters. Overwrites the direction."""
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    direction_Crc.mul_(-lr)  # separately: fused with the addition, some hardware would round once, other twice
    for piece in block.pieces:
        parameter = local(piece.parameter.detach())
        matrix = matrix_view(parameter, piece.whole)
        part = direction_Crc[piece.start : piece.start + piece.patch.chunks]
        add_patch(matrix, part, piece.whole, piece.patch, 1 - lr * weight_decay)
        if matrix.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            parameter.copy_(matrix.view(parameter.shape))  # strides without a matrix view, such as channels_last


def update_matrices(
    block: Block, update_Crc: Tensor, matrix: Callable[[Piece], Tensor], chunk_group: "ChunkGroup"
) -> None:
    """Does `update_parameters` for a rule that needs whole matrices: assembles each, and applies it at its last chunks.

    Call it with the blocks in order. `matrix` returns a buffer [R, S] for U of a piece's parameter, the same one for
    all pieces of a parameter.
    """
    lr, weight_decay = float(chunk_group.group["lr"]), float(chunk_group.group["weight_decay"])
    for piece in block.pieces:
        whole, patch, U_RS = piece.whole, piece.patch, matrix(piece)
        write_patch(U_RS, update_Crc[piece.start : piece.start + patch.chunks], whole, patch)
        if (patch.rows[1], patch.columns[1]) == whole.grid:
            direction = chunk_group.rule(U_RS, U_RS.new_empty(0), {}).mul_(-lr)
            decay_and_add(local(piece.parameter.detach()), direction, 1 - lr * weight_decay)


def local(tensor: Tensor) -> Tensor:
    """Returns the part of a DTensor that this process holds; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def group_key(parameter: Tensor, number: int, group: dict[str, Any]) -> tuple[Kind, Chunking]:
    """Returns the kind of chunk group that a parameter of group `number` belongs in, and its chunking.

    Example:
        >>> group = {"chunk": 64, "top_k": 32, "chunking": "padded", "values": "float32", "transform": "dct"}
        >>> group |= {"exact": None, "relay_top_k": 64}
        >>> kind, whole = group_key(torch.zeros(128, 64), 0, group)
        >>> kind.chunk_shape, kind.keep, whole.grid
        ((64, 64), 32, (2, 1))
    """
    whole = chunking(tuple(local(parameter).shape), group["chunk"], group["chunking"])
    length = whole.chunk_shape[0] * whole.chunk_shape[1]
    keep = keep_count(group["top_k"], group["chunk"], group["chunking"], length, CODECS[group["values"]].bits)
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    frozen = not parameter.requires_grad
    where, exact = local(parameter).device, is_exact(group, dtype)
    relay_keep = keep_count(
        group["relay_top_k"], group["chunk"], group["chunking"], length, CODECS[group["values"]].bits
    )
    kind = Kind(
        number, whole.chunk_shape, keep, group["values"], group["transform"], dtype, where, frozen, exact, relay_keep
    )
    return kind, whole


def build(groups: list[dict[str, Any]], only: list[Tensor] | None = None) -> list[ChunkGroup]:
    """Builds the chunk groups of all parameters, or of `only` some; groups and shapes alone determine their order."""
    members: dict[Kind, list[tuple[Tensor, Chunking]]] = {}
    wanted = None if only is None else {id(parameter) for parameter in only}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if wanted is not None and id(parameter) not in wanted:
                continue
            kind, whole = group_key(parameter, number, group)
            members.setdefault(kind, []).append((parameter, whole))
    return [ChunkGroup(kind, groups[kind.group], parameters) for kind, parameters in members.items()]
