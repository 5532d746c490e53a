"""The half of a step that comes before the exchange, on one bucket: gradients to coefficients.

Shapes: C chunks, N elements in a chunk (r rows, c columns), K kept.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from demopt.core import transform
from demopt.optim.bucket import Block, Bucket, read_gradients

#: How a block's coefficients are chosen: (bucket, block, coefficients [C, N], spare [C, N]) -> positions, values.
Choose = Callable[[Bucket, Block, Tensor, Tensor], tuple[Tensor, Tensor]]


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

    def pair(self, bucket: Bucket, tiles: int) -> tuple[Tensor, Tensor]:
        """Two tensors [tiles, r, c], contents undefined."""
        key = (bucket.kind.dtype, bucket.kind.device)
        elements = tiles * bucket.kind.length
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[1] < elements:
            most = max(bucket.block_tiles * bucket.kind.length, elements)
            buffer = self._buffers[key] = torch.empty(2, most, dtype=key[0], device=key[1])
        first, second = (row[:elements].view(tiles, *bucket.kind.tile) for row in buffer)
        return first, second


def extract(bucket: Bucket, unscale: float, workspace: Workspace, choose: Choose) -> Extracted:
    """Steps 1 to 4 of the algorithm: momentum, its strongest coefficients, their bytes, feedback of what was sent."""
    group, length, keep = bucket.group, bucket.kind.length, bucket.kind.keep
    decay = float(group["momentum"])
    scale = unscale * (1 - decay if group["gradient_scale"] == "ema" else float(group["lr"]))
    positions = torch.empty(bucket.tiles, keep, dtype=torch.int64, device=bucket.kind.device)
    values = torch.empty(bucket.tiles, keep, dtype=bucket.kind.dtype, device=bucket.kind.device)
    for block in bucket.blocks:
        tiles, spare = workspace.pair(bucket, block.stop - block.start)
        read_gradients(block, tiles)
        momentum = bucket.momentum[block.start : block.stop]
        signed = -scale if group["maximize"] else scale
        transform.accumulate(momentum, tiles, bucket.bases, spare, decay, signed)
        chosen = choose(bucket, block, momentum.view(-1, length), spare.view(-1, length))
        positions[block.start : block.stop], values[block.start : block.stop] = chosen
    data = bucket.section.encode(positions, values)
    sent = bucket.section.sent(data).to(values.dtype)
    bucket.flat_momentum.scatter_add_(1, positions, sent.mul_(-float(group["alpha"])))
    return Extracted(positions, values, data)


def restore(bucket: Bucket, extracted: Extracted) -> None:
    """Puts back into the momentum, exactly, what `extract` took out."""
    bucket.flat_momentum.scatter_(1, extracted.positions, extracted.values)
