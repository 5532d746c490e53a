"""The half of a step before the exchange, for one bucket: turns gradients into coefficients.

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
from demopt.optim.bucket import Bucket, read_gradients

#: (bucket, start, stop) -> positions [C, K] that a route sends for chunks [start, stop) instead of the strongest.
Chosen = Callable[[Bucket, int, int], Tensor]


@dataclass(frozen=True)
class Extracted:
    """What a bucket sends: the chosen positions and momentum values [C, K], and their bytes in the message."""

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

    def pair(self, bucket: Bucket, tiles: int) -> tuple[Tensor, Tensor]:
        """Returns two tensors [tiles, r, c] with undefined contents."""
        key = (bucket.kind.dtype, bucket.kind.device)
        elements = tiles * bucket.kind.length
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[1] < elements:
            most = max(bucket.block_tiles * bucket.kind.length, elements)
            buffer = self._buffers[key] = torch.empty(2, most, dtype=key[0], device=key[1])
        first, second = (row[:elements].view(tiles, *bucket.kind.tile) for row in buffer)
        return first, second

    def matrix(self, bucket: Bucket, shape: tuple[int, int]) -> Tensor:
        """Returns a tensor [R, S]; consecutive calls with the same shape return the same contents."""
        key, elements = (bucket.kind.dtype, bucket.kind.device), math.prod(shape)
        buffer = self._matrices.get(key)
        if buffer is None or len(buffer) < elements:
            buffer = self._matrices[key] = torch.empty(elements, dtype=key[0], device=key[1])
        return buffer[:elements].view(shape)


def extract(bucket: Bucket, unscale: float, workspace: Workspace, chosen: Chosen | None = None) -> Extracted:
    """Does steps 1 to 4 of the algorithm: updates the momentum, selects, encodes, and subtracts what is sent."""
    group = bucket.group
    decay = float(group["momentum"])
    scale = unscale * (1 - decay if group["gradient_scale"] == "ema" else float(group["lr"]))
    factors = decay, -scale if group["maximize"] else scale
    keep = bucket.kind.keep if chosen is None else 0
    if bucket.kernels is None:
        positions, values = _by_blocks(bucket, factors, keep, workspace)
    else:
        positions, values = _by_kernels(bucket, factors, keep, bucket.kernels)
    if chosen is not None:
        positions = chosen(bucket, 0, bucket.tiles)
        values = bucket.flat_momentum.gather(1, positions)
    data = bucket.section.encode(positions, values)
    sent = bucket.section.sent(data).to(values.dtype)
    bucket.flat_momentum.scatter_add_(1, positions, sent.mul_(-float(group["alpha"])))
    return Extracted(positions, values, data)


def _by_kernels(bucket: Bucket, factors: tuple[float, float], keep: int, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Does `_by_blocks` in one pass, or parameter by parameter if a gradient has to be copied first."""
    gradients, tilings = bucket.gradients(), bucket.tilings
    if all(kernels.readable(gradient) for gradient in gradients):
        return kernels.extract(gradients, tilings, bucket.momentum, bucket.bases, *factors, keep)
    pairs, first = [], 0
    for gradient, whole in zip(gradients, tilings, strict=True):
        if gradient is not None and not kernels.readable(gradient):
            gradient = gradient.to(bucket.kind.dtype).contiguous()
        momentum = bucket.momentum[first : first + whole.tiles]
        pairs.append(kernels.extract([gradient], [whole], momentum, bucket.bases, *factors, keep))
        first += whole.tiles
    positions, values = zip(*pairs, strict=True)
    return torch.cat(positions), torch.cat(values)


def _by_blocks(bucket: Bucket, factors: tuple[float, float], keep: int, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Adds the gradients to the momentum; returns positions and values [C, K] of the strongest coefficients."""
    positions = torch.empty(bucket.tiles, keep, dtype=torch.int64, device=bucket.kind.device)
    values = torch.empty(bucket.tiles, keep, dtype=bucket.kind.dtype, device=bucket.kind.device)
    for block in bucket.blocks:
        tiles, spare = workspace.pair(bucket, block.stop - block.start)
        read_gradients(block, tiles)
        momentum = bucket.momentum[block.start : block.stop]
        transform.accumulate(momentum, tiles, bucket.bases, spare, *factors)
        if keep:
            found = strongest(bucket.flat_momentum[block.start : block.stop], keep, spare.view(len(spare), -1))
            positions[block.start : block.stop], values[block.start : block.stop] = found
    return positions, values


def restore(bucket: Bucket, extracted: Extracted) -> None:
    """Puts back into the momentum, exactly, what `extract` took out."""
    bucket.flat_momentum.scatter_(1, extracted.positions, extracted.values)
