"""Chunk groups: parameters with equal chunks and settings share one momentum buffer, processed block by block.

Shapes: C chunks, r rows and c columns of a chunk, N = r c, K kept.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from demopt.codec.blocks import Member, blocks_of
from demopt.codec.hyperparameters import Hyperparameters
from demopt.core.chunking import Chunking, chunking
from demopt.core.exact import basis_unit, integer_basis
from demopt.core.transform import basis
from demopt.exchange.dtensor import to_local
from demopt.kernels.step import Kernel, covers
from demopt.wire.layout import GRANULE, Section
from demopt.wire.quantizers import QUANTIZERS

_BLOCK_ELEMENTS = 1 << 20  # a block's gradients, momentum and spare fit in a CPU's last-level cache
_DEVICE_BLOCK_ELEMENTS = 1 << 27  # an accelerator pays for each operation: a chunk group is one block, if memory allows


@dataclass(frozen=True)
class GroupKey:
    """The traits that parameters of one chunk group share; `param_group` is the number of theirs."""

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

    `before`, a chunk group of the same parameters and chunks, hands over its buffers. `kernels` is "auto" (compiled
    kernels on CPUs) or "torch" (torch operations alone).
    """

    def __init__(
        self,
        key: GroupKey,
        settings: Hyperparameters,
        members: list[Member],
        kernels: str = "auto",
        before: "ChunkGroup | None" = None,
    ) -> None:
        self.key = key
        self.settings = settings  # the wiring replaces it when a hyper-parameter changes
        self.members = members
        self.rule = settings.update
        self.chunks = sum(member.chunking.chunks for member in members)
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
        self.blocks = list(blocks_of(members, self.block_chunks, undivided=self.rule.whole_matrix))
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
            chunkings = [member.chunking for member in members]
            keep = None if self.section.all_signs else key.keep
            self.kernel = Kernel(chunkings, self.bases, self.inverse_bases, self.basis_unit, keep)
        # the same kernel where it can do more, otherwise None
        self.inverter = self.kernel if key.exact else None  # steps 6 and 7
        signs = self.rule.signs_only and key.ties
        self.updater = self.inverter if signs or self.rule.name == "sgd" else None  # step 8 too

    def rows(self, tensor_Cnn: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each parameter with its rows [chunks, n] of a tensor over the group's chunks, as a view."""
        flat, start = tensor_Cnn.flatten(1), 0
        for member in self.members:
            yield member.parameter, flat[start : start + member.chunking.chunks]
            start += member.chunking.chunks


def group_key(parameter: Tensor, number: int, settings: Hyperparameters) -> tuple[GroupKey, Chunking]:
    """Returns the key of the chunk group for a parameter of parameter group `number`, and the parameter's chunking."""
    local = to_local(parameter)
    cut = chunking(tuple(local.shape), settings.chunk, settings.chunking)
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    keep = settings.keep_count(cut.chunk_shape[0] * cut.chunk_shape[1])
    traits = (keep, settings.values, settings.transform, dtype, local.device, settings.is_exact(dtype))
    return GroupKey(number, cut.chunk_shape, *traits), cut


def build(
    parameters: Iterable[tuple[int, Tensor]],
    settings: list[Hyperparameters],
    kernels: str = "auto",
    before: Iterable[ChunkGroup] = (),
) -> list[ChunkGroup]:
    """Builds the chunk groups of all parameters that train, given with the number of their parameter group.

    Shapes and settings alone determine their order. Those of `before` with the same parameters and chunks hand over
    their buffers, so that a round that began with them can subtract from the same momentum.
    """
    members: dict[GroupKey, list[Member]] = {}
    for number, (group, parameter) in enumerate(parameters):
        if parameter.requires_grad:
            key, cut = group_key(parameter, group, settings[group])
            members.setdefault(key, []).append(Member(number, parameter, cut))  # also without chunks: it has a state
    old = {_buffers_of(chunk_group.key, chunk_group.members): chunk_group for chunk_group in before}
    return [
        ChunkGroup(key, settings[key.param_group], mine, kernels, old.get(_buffers_of(key, mine)))
        for key, mine in members.items()
    ]


def _buffers_of(key: GroupKey, members: list[Member]) -> tuple[object, ...]:
    """Returns the traits that must be equal for one chunk group to take over another's buffers."""
    return (key.chunk_shape, key.dtype, key.device, *((id(member.parameter), member.chunking) for member in members))
