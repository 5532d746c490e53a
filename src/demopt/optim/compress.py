"""Steps 1 to 4 of the algorithm (docs/algorithm.md) for one chunk group: turns gradients into coefficients.

`compress` does all four. Step 5 sends the bytes (round.py); steps 6 to 8 are in decompress.py.

Shapes: C chunks, N elements in a chunk (r rows, c columns), K kept.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demopt.core import transform
from demopt.core.chunk import matrix_view, read_patch, to_local
from demopt.core.select import strongest
from demopt.optim.chunk_group import Block, ChunkGroup


@dataclass(frozen=True)
class Selected:
    """What a chunk group sends: positions [C, K], the momentum's values there, and their bytes in the message."""

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
        key = chunk_group.key
        elements = chunks * key.length
        buffer = self._buffers.get((key.dtype, key.device))
        if buffer is None or buffer.shape[1] < elements:
            most = max(chunk_group.block_chunks * key.length, elements)
            buffer = torch.empty(2, most, dtype=key.dtype, device=key.device)
            self._buffers[key.dtype, key.device] = buffer
        first, second = buffer[:, :elements].view(2, chunks, *key.chunk_shape)
        return first, second

    def matrix(self, chunk_group: ChunkGroup, shape: tuple[int, int]) -> Tensor:
        """Returns a tensor [R, S]; consecutive calls with the same shape return the same contents."""
        key, elements = (chunk_group.key.dtype, chunk_group.key.device), math.prod(shape)
        buffer = self._matrices.get(key)
        if buffer is None or len(buffer) < elements:
            buffer = self._matrices[key] = torch.empty(elements, dtype=key[0], device=key[1])
        return buffer[:elements].view(shape)


def compress(chunk_group: ChunkGroup, unscale: float, workspace: Workspace) -> Selected:
    """Steps 1 to 4: updates the momentum, selects its strongest coefficients, encodes them, subtracts what is sent.

    `unscale` is a factor on gradients, as from GradScaler.
    """
    group = chunk_group.group
    factors = _factors(group, unscale)  # b and s
    # Steps 1 and 2: Z <- b Z + s T(G). T is linear, so this is T(b M + s G): the buffer holds Z and M is never formed.
    # Step 3: J, V. In the same pass over the blocks, because a block is then still in the cache.
    if chunk_group.kernels is None:
        positions, values = _by_blocks(chunk_group, factors, workspace)
    else:
        positions, values = _by_kernels(chunk_group, factors)
    # Step 4: q <- V as the bytes carry it, Z[J] <- Z[J] - a q. q is decoded from the message's own bytes, as the
    # receivers decode it. What quantising took away, V - q, stays in the momentum, as does all that was not selected,
    # and is sent later: that is the error feedback.
    data = chunk_group.section.encode(positions, values)
    sent = chunk_group.section.sent(data).to(values.dtype)
    chunk_group.flat_momentum.scatter_add_(1, positions, sent.mul_(-float(group["alpha"])))
    return Selected(positions, values, data)


def restore(chunk_group: ChunkGroup, selected: Selected) -> None:
    """Undoes step 4: puts back into the momentum, exactly, what `compress` took out.

    It writes the values of before, because adding a q again would round. Steps 1 and 2 stay: the gradient is kept.
    """
    chunk_group.flat_momentum.scatter_(1, selected.positions, selected.values)


def restore_decayed(chunk_group: ChunkGroup, selected: Selected, newer: Selected | None) -> None:
    """Does `restore` when the momentum has decayed once since, in a newer step: adds decayed values.

    Also adds them to those that a `restore` of the newer step would put back, unless that was done.
    """
    share = float(chunk_group.group["alpha"]) * float(chunk_group.group["momentum"])
    sent = chunk_group.section.sent(selected.data).to(chunk_group.key.dtype)
    momentum = chunk_group.flat_momentum
    before = None if newer is None else momentum.gather(1, newer.positions)
    momentum.scatter_add_(1, selected.positions, sent.mul_(share))
    if newer is not None and before is not None:
        newer.values.add_(momentum.gather(1, newer.positions).sub_(before))


def read_gradients(block: Block, chunks_Crc: Tensor) -> None:
    """chunks(G): fills the block's chunks with gradients; a parameter without one counts as zero.

    So its momentum decays and is sent as usual, and all ranks' messages keep their length.
    """
    for piece in block.pieces:
        part = chunks_Crc[piece.start : piece.start + piece.patch.chunks]
        if piece.parameter.grad is None:
            part.zero_()
        else:
            gradient = to_local(piece.parameter.grad)
            read_patch(matrix_view(gradient, piece.whole), part, piece.whole, piece.patch)


def _by_blocks(chunk_group: ChunkGroup, factors: tuple[float, float], workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Steps 1 to 3 with torch operations; returns J and V, positions and values [C, K] of the strongest coefficients.

    Goes block by block, so that gradients, momentum and intermediate results stay in the cache.
    """
    shape = (chunk_group.chunks, chunk_group.key.keep)
    positions = torch.empty(shape, dtype=torch.int64, device=chunk_group.key.device)
    values = torch.empty(shape, dtype=chunk_group.key.dtype, device=chunk_group.key.device)
    for block in chunk_group.blocks:
        here = slice(block.start, block.stop)
        chunks, spare = workspace.pair(chunk_group, block.stop - block.start)
        read_gradients(block, chunks)
        # steps 1 and 2, in one matrix product with an addition
        transform.accumulate(chunk_group.momentum[here], chunks, chunk_group.bases, spare, *factors)
        # step 3; positions ascend, as index codes need them
        positions[here], values[here] = strongest(
            chunk_group.flat_momentum[here], chunk_group.key.keep, spare.view(len(spare), -1)
        )
    return positions, values


def _by_kernels(chunk_group: ChunkGroup, factors: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Does `_by_blocks` in one pass, or parameter by parameter if a gradient has to be copied first.

    The latter holds one copy at a time.
    """
    kernels, keep = chunk_group.kernels, chunk_group.key.keep
    assert kernels is not None
    gradients = [None if p.grad is None else to_local(p.grad) for p, _ in chunk_group.members]
    if all(kernels.readable(gradient) for gradient in gradients):
        return kernels.extract(
            gradients, chunk_group.chunkings, chunk_group.momentum, chunk_group.bases, *factors, keep
        )
    pairs, first = [], 0
    for gradient, whole in zip(gradients, chunk_group.chunkings, strict=True):
        if gradient is not None and not kernels.readable(gradient):
            gradient = gradient.to(chunk_group.key.dtype).contiguous()
        momentum = chunk_group.momentum[first : first + whole.chunks]
        pairs.append(kernels.extract([gradient], [whole], momentum, chunk_group.bases, *factors, keep))
        first += whole.chunks
    positions, values = zip(*pairs, strict=True)
    return torch.cat(positions), torch.cat(values)


def withdraw(chunk_group: ChunkGroup, workspace: Workspace) -> None:
    """Takes the gradients back out of the momentum, up to rounding: Z <- Z - s T(G)."""
    _, scale = _factors(chunk_group.group, unscale=1.0)
    for block in chunk_group.blocks:
        chunks, spare = workspace.pair(chunk_group, block.stop - block.start)
        read_gradients(block, chunks)
        momentum = chunk_group.momentum[block.start : block.stop]
        transform.accumulate(momentum, chunks, chunk_group.bases, spare, 1.0, -scale)


def _factors(group: dict[str, Any], unscale: float) -> tuple[float, float]:
    """Returns b and s of step 1; s is 1 - b (a moving average: v2), lr (v1), or 1."""
    decay = float(group["momentum"])
    scale = {"ema": 1 - decay, "lr": float(group["lr"]), "sum": 1.0}[group["gradient_scale"]] * unscale
    return decay, -scale if group["maximize"] else scale
