"""The two halves of a step on one bucket: gradients to coefficients, and coefficients to parameters.

Shapes: W ranks, C chunks, N elements in a chunk (r rows, c columns), K kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from demopt.core import transform
from demopt.core.aggregate import aggregate
from demopt.core.select import strongest
from demopt.core.update import UPDATES
from demopt.optim.bucket import Block, Bucket, add_to_parameters, local, read_gradients


@dataclass(frozen=True)
class Extracted:
    """What a bucket sends: positions and momentum values [C, K] that were chosen, and their bytes in the message."""

    positions: Tensor
    values: Tensor
    data: Tensor


class Workspace:
    """Two buffers of one block, kept from step to step: allocating them anew costs more than filling them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def pair(self, bucket: Bucket, block: Block) -> tuple[Tensor, Tensor]:
        """Two tensors [C, r, c] for a block's tiles, contents undefined."""
        key = (bucket.kind.dtype, bucket.kind.device)
        elements = (block.stop - block.start) * bucket.kind.length
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[1] < elements:
            most = max(bucket.block_tiles * bucket.kind.length, elements)
            buffer = self._buffers[key] = torch.empty(2, most, dtype=key[0], device=key[1])
        first, second = (row[:elements].view(-1, *bucket.kind.tile) for row in buffer)
        return first, second


def extract(bucket: Bucket, unscale: float, workspace: Workspace) -> Extracted:
    """Steps 1 to 4 of the algorithm: momentum, its strongest coefficients, their bytes, feedback of what was sent."""
    group, length, keep = bucket.group, bucket.kind.length, bucket.kind.keep
    decay = float(group["momentum"])
    scale = unscale * (1 - decay if group["gradient_scale"] == "ema" else float(group["lr"]))
    positions = torch.empty(bucket.tiles, keep, dtype=torch.int64, device=bucket.kind.device)
    values = torch.empty(bucket.tiles, keep, dtype=bucket.kind.dtype, device=bucket.kind.device)
    for block in bucket.blocks:
        tiles, spare = workspace.pair(bucket, block)
        read_gradients(block, tiles)
        momentum = bucket.momentum[block.start : block.stop]
        signed = -scale if group["maximize"] else scale
        transform.accumulate(momentum, tiles, bucket.bases, spare, decay, signed)
        chosen = strongest(momentum.view(-1, length), keep, spare.view(-1, length))
        positions[block.start : block.stop], values[block.start : block.stop] = chosen
    section = bucket.section
    data = section.encode(positions, values)
    sent = section.sent(data, 0, bucket.tiles).to(values.dtype)
    bucket.flat_momentum.scatter_add_(1, positions, sent.mul_(-float(group["alpha"])))
    return Extracted(positions, values, data)


def restore(bucket: Bucket, extracted: Extracted) -> None:
    """Puts back into the momentum, exactly, what `extract` took out."""
    bucket.flat_momentum.scatter_(1, extracted.positions, extracted.values)


def decay_weights(bucket: Bucket) -> None:
    """X <- X - lr wd X, before the update."""
    factor = float(bucket.group["lr"]) * float(bucket.group["weight_decay"])
    if factor:
        for parameter, _ in bucket.members:
            local(parameter.detach()).mul_(1 - factor)


def apply(bucket: Bucket, block: Block, positions_WCK: Tensor, values_WCK: Tensor, workspace: Workspace) -> None:
    """Steps 6 to 8 of the algorithm on one block: reduce, transform back, update the parameters."""
    group, length = bucket.group, bucket.kind.length
    tiles, spare = workspace.pair(bucket, block)
    out, counts = tiles.view(-1, length), spare.view(-1, length)
    aggregate(positions_WCK, values_WCK, group["reduction"], out, counts)
    transform.inverse(tiles, *bucket.bases, out=tiles, spare=spare)
    direction = UPDATES[group["update"]](tiles)
    add_to_parameters(block, direction, -float(group["lr"]))
