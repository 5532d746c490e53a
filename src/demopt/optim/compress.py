"""The half of a step before the exchange, for one chunk group: turns gradients into coefficients.

Shapes: C chunks, N elements in a chunk (r rows, c columns), K kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from demopt.core import transform
from demopt.core.select import strongest
from demopt.kernels.choice import Kernels
from demopt.optim.chunk_group import ChunkGroup, read_gradients

#: (chunk group, start, stop) -> positions [C, K] that a route sends for chunks [start, stop) instead of the strongest.
Chosen = Callable[[ChunkGroup, int, int], Tensor]


@dataclass(frozen=True)
class Extracted:
    """What a chunk group sends: the chosen positions and momentum values [C, K], and their bytes in the message."""

    positions: Tensor
    values: Tensor
    data: Tensor


class Workspace:
    """Two buffers of one block, kept from step to step, because allocating them costs more than filling them.

    Also one buffer of a whole matrix, if an update rule needs it.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._matrices: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def pair(self, chunk_group: ChunkGroup, chunks: int) -> tuple[Tensor, Tensor]:
        """Returns two tensors [chunks, r, c] with undefined contents."""
        key = (chunk_group.key.dtype, chunk_group.key.device)
        elements = chunks * chunk_group.key.length
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[1] < elements:
            most = max(chunk_group.block_chunks * chunk_group.key.length, elements)
            buffer = self._buffers[key] = torch.empty(2, most, dtype=key[0], device=key[1])
        first, second = (row[:elements].view(chunks, *chunk_group.key.chunk_shape) for row in buffer)
        return first, second

    def matrix(self, chunk_group: ChunkGroup, shape: tuple[int, int]) -> Tensor:
        """Returns a tensor [R, S]; consecutive calls with the same shape return the same contents."""
        key, elements = (chunk_group.key.dtype, chunk_group.key.device), math.prod(shape)
        buffer = self._matrices.get(key)
        if buffer is None or len(buffer) < elements:
            buffer = self._matrices[key] = torch.empty(elements, dtype=key[0], device=key[1])
        return buffer[:elements].view(shape)


def extract(chunk_group: ChunkGroup, unscale: float, workspace: Workspace, chosen: Chosen | None = None) -> Extracted:
    """Does steps 1 to 4 of the algorithm: updates the momentum, selects, encodes, and subtracts what is sent."""
    group = chunk_group.group
    decay = float(group["momentum"])
    scale = unscale * (1 - decay if group["gradient_scale"] == "ema" else float(group["lr"]))
    factors = decay, -scale if group["maximize"] else scale
    keep = chunk_group.key.keep if chosen is None else 0
    if chunk_group.kernels is None:
        positions, values = _by_blocks(chunk_group, factors, keep, workspace)
    else:
        positions, values = _by_kernels(chunk_group, factors, keep, chunk_group.kernels)
    if chosen is not None:
        positions = chosen(chunk_group, 0, chunk_group.chunks)
        values = chunk_group.flat_momentum.gather(1, positions)
    data = chunk_group.section.encode(positions, values)
    sent = chunk_group.section.sent(data).to(values.dtype)
    chunk_group.flat_momentum.scatter_add_(1, positions, sent.mul_(-float(group["alpha"])))
    return Extracted(positions, values, data)


def _by_kernels(
    chunk_group: ChunkGroup, factors: tuple[float, float], keep: int, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """Does `_by_blocks` in one pass, or parameter by parameter if a gradient has to be copied first."""
    gradients, chunkings = chunk_group.gradients(), chunk_group.chunkings
    if all(kernels.readable(gradient) for gradient in gradients):
        return kernels.extract(gradients, chunkings, chunk_group.momentum, chunk_group.bases, *factors, keep)
    pairs, first = [], 0
    for gradient, whole in zip(gradients, chunkings, strict=True):
        if gradient is not None and not kernels.readable(gradient):
            gradient = gradient.to(chunk_group.key.dtype).contiguous()
        momentum = chunk_group.momentum[first : first + whole.chunks]
        pairs.append(kernels.extract([gradient], [whole], momentum, chunk_group.bases, *factors, keep))
        first += whole.chunks
    positions, values = zip(*pairs, strict=True)
    return torch.cat(positions), torch.cat(values)


def _by_blocks(
    chunk_group: ChunkGroup, factors: tuple[float, float], keep: int, workspace: Workspace
) -> tuple[Tensor, Tensor]:
    """Adds the gradients to the momentum; returns positions and values [C, K] of the strongest coefficients."""
    positions = torch.empty(chunk_group.chunks, keep, dtype=torch.int64, device=chunk_group.key.device)
    values = torch.empty(chunk_group.chunks, keep, dtype=chunk_group.key.dtype, device=chunk_group.key.device)
    for block in chunk_group.blocks:
        chunks, spare = workspace.pair(chunk_group, block.stop - block.start)
        read_gradients(block, chunks)
        momentum = chunk_group.momentum[block.start : block.stop]
        transform.accumulate(momentum, chunks, chunk_group.bases, spare, *factors)
        if keep:
            found = strongest(chunk_group.flat_momentum[block.start : block.stop], keep, spare.view(len(spare), -1))
            positions[block.start : block.stop], values[block.start : block.stop] = found
    return positions, values


def restore(chunk_group: ChunkGroup, extracted: Extracted) -> None:
    """Puts back into the momentum, exactly, what `extract` took out."""
    chunk_group.flat_momentum.scatter_(1, extracted.positions, extracted.values)
