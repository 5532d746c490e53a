"""Chunk groups: parameters with equal chunks and settings share one momentum buffer, which is processed block by block.

Shapes: C chunks, r rows and c columns of a chunk, N = r c, K kept.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from demopt.core.chunk import Chunking, Patch, chunking, patches, to_local
from demopt.core.exact import basis_unit, integer_basis
from demopt.core.transform import basis
from demopt.core.update import rule_of
from demopt.kernels.choice import Kernels, kernels_for
from demopt.optim.settings import is_exact, keep_count
from demopt.wire.layout import GRANULE, Section
from demopt.wire.values import CODECS, Stepped

if TYPE_CHECKING:
    from demopt.optim.matrices import Matrices

_BLOCK_ELEMENTS = 1 << 20  # a block's gradients, momentum and spare fit in a CPU's last-level cache
_SPAN_COEFFICIENTS = 1 << 17  # of all ranks, applied at once; each takes tens of bytes


@dataclass(frozen=True)
class GroupKey:
    """What parameters must have in common to be in one chunk group; `group` is the number of their parameter group.

    Examples:
        >>> key = GroupKey(0, (64, 64), 32, "sign", "dct", torch.float32, torch.device("cpu"), frozen=False, exact=True)
        >>> key.length, key.ties
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

    @cached_property
    def ties(self) -> bool:
        """Whether a zero of the update is a tie and gets a sign; with the identity transform, zero means "not sent"."""
        return isinstance(CODECS[self.values], Stepped) and self.transform != "identity"

    @cached_property
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


Members = list[tuple[Tensor, Chunking]]


class ChunkGroup:
    """The parameters of one key, their momentum [C, r, c], and the blocks that divide it.

    `before`, a chunk group of the same parameters and chunks, hands over its buffers. `kernels` is "auto", "triton" or
    "torch" (see `kernels_for`).
    """

    def __init__(
        self,
        key: GroupKey,
        group: dict[str, Any],
        members: Members,
        kernels: str = "auto",
        before: "ChunkGroup | None" = None,
    ) -> None:
        self.key = key
        self.group = group
        self.members = members
        self.chunks = sum(whole.chunks for _, whole in members)
        self.rule = rule_of(group["update"])
        self.matrices: Matrices | None = None  # where updates wait, if the rule needs whole matrices
        self.step = 0  # of the round that is applied; with a parameter's number it seeds the rounding of bfloat16
        self.numbers: dict[int, int] = {}  # of all parameters, by id: the same on all ranks
        shape = (self.chunks, *key.chunk_shape)
        self.momentum: Tensor = before.momentum if before else torch.zeros(shape, dtype=key.dtype, device=key.device)
        self.flat_momentum = self.momentum.view(self.chunks, key.length)  # [C, N]
        self.rule_state: dict[str, Tensor]
        if before and before.rule == self.rule:
            self.rule_state = before.rule_state
        else:
            self.rule_state = {name: torch.zeros_like(self.momentum) for name in self.rule.moments}
            self.rule_state |= {name: self.momentum.new_zeros(self.chunks, 1, 1) for name in self.rule.weights}
        self.block_chunks = max(_BLOCK_ELEMENTS // key.length // GRANULE, 1) * GRANULE
        self.blocks = list(_blocks(members, self.block_chunks))
        self.section = Section(self.chunks, key.length, key.keep, key.values)  # its part of a message
        self.kernels = kernels_for(kernels, key.chunk_shape, key.dtype, key.device)
        device = str(key.device)
        rows, columns = (basis(key.transform, side, key.dtype, device) for side in key.chunk_shape)
        self.bases = self.inverse_bases = (rows, columns)
        self.basis_unit = 1.0
        if key.exact:
            rows, columns = (integer_basis(key.transform, side, device) for side in key.chunk_shape)
            self.inverse_bases = (rows, columns)
            self.basis_unit = math.prod(basis_unit(key.transform, side) for side in key.chunk_shape)

    @property
    def decoders(self) -> Kernels | None:
        """The kernels, if they can do all of steps 6 to 8 with the settings as they are now."""
        decodes = self.key.exact and self.key.ties and self.rule.signs_only
        return self.kernels if decodes and self.group["reduction"] in ("senders", "mean") else None

    @property
    def largest_level(self) -> int:
        """The largest level of the codec, which must be a stepped one."""
        codec = CODECS[self.key.values]
        assert isinstance(codec, Stepped)
        return codec.largest_level

    def seed(self, parameter: Tensor) -> tuple[int, int]:
        """Returns what seeds the rounding of a bfloat16 parameter, the same on all ranks (decision 27)."""
        return self.step, self.numbers[id(parameter)]

    def spans(self, world_size: int) -> list[list[Block]]:
        """Returns runs of blocks to apply together for `world_size` ranks: few calls, bounded memory."""
        blocks = max(1, _SPAN_COEFFICIENTS // (world_size * self.key.keep * self.block_chunks))
        return [self.blocks[first : first + blocks] for first in range(0, len(self.blocks), blocks)]

    @property
    def chunkings(self) -> list[Chunking]:
        """Each parameter's chunking."""
        return [whole for _, whole in self.members]

    def rows(self, tensor_Cnn: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each parameter with its rows [chunks, n] of a tensor over the group's chunks, a view."""
        flat, start = tensor_Cnn.flatten(1), 0
        for parameter, whole in self.members:
            yield parameter, flat[start : start + whole.chunks]
            start += whole.chunks


def _blocks(members: Members, most: int) -> Iterator[Block]:
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


def group_key(parameter: Tensor, number: int, group: dict[str, Any]) -> tuple[GroupKey, Chunking]:
    """Returns the key of the chunk group that a parameter of group `number` belongs in, and its chunking.

    Examples:
        >>> group = {"chunk": 64, "top_k": 32, "chunking": "padded", "values": "float32", "transform": "dct"}
        >>> key, whole = group_key(torch.zeros(128, 64), 0, {**group, "exact": None})
        >>> key.chunk_shape, key.keep, whole.grid
        ((64, 64), 32, (2, 1))
    """
    local = to_local(parameter)
    whole = chunking(tuple(local.shape), group["chunk"], group["chunking"])
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return (
        GroupKey(
            number,
            whole.chunk_shape,
            keep_count(group["top_k"], group, whole.chunk_shape[0] * whole.chunk_shape[1]),
            group["values"],
            group["transform"],
            dtype,
            local.device,
            not parameter.requires_grad,
            is_exact(group, dtype),
        ),
        whole,
    )


def build(
    groups: list[dict[str, Any]],
    only: Iterable[Tensor] | None = None,
    kernels: str = "auto",
    before: Iterable[ChunkGroup] = (),
) -> list[ChunkGroup]:
    """Builds the chunk groups of all parameters, or of `only` some; groups and shapes alone determine their order.

    Those of `before` with the same parameters and chunks hand over their buffers.
    """
    members: dict[GroupKey, Members] = {}
    wanted = None if only is None else {id(parameter) for parameter in only}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if wanted is None or id(parameter) in wanted:
                key, whole = group_key(parameter, number, group)
                members.setdefault(key, []).append((parameter, whole))
    old = {_buffers_of(group.key, group.members): group for group in before}
    found = [
        ChunkGroup(key, groups[key.group], mine, kernels, old.get(_buffers_of(key, mine)))
        for key, mine in members.items()
    ]
    numbers = {id(parameter): number for number, parameter in enumerate(p for group in groups for p in group["params"])}
    for chunk_group in found:
        chunk_group.numbers = numbers
    return found


def _buffers_of(key: GroupKey, members: Members) -> tuple[Any, ...]:
    """Returns what chunk groups must have in common for one to take over the other's buffers."""
    return (key.chunk_shape, key.dtype, key.device, *((id(parameter), whole) for parameter, whole in members))
