"""Steps 1 to 4 of the algorithm (docs/algorithm.md) for one chunk group: gradients become a part of a message.

`compress` does steps 1 to 4 but for the subtraction, which `settle` does once the round is applied. Until then nothing
has left the momentum, so a round that fails loses nothing. Step 5 sends the bytes; steps 6 to 8 are in decompress.py.

Shapes: C chunks, N elements in a chunk (r rows, c columns), K kept.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from demopt.codec.chunk_group import Block, ChunkGroup
from demopt.core import transform
from demopt.core.chunking import matrix_view, read_patch
from demopt.core.top_k import strongest
from demopt.wire.coefficients import Coefficients


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


def compress(
    chunk_group: ChunkGroup, gradients: Sequence[Tensor | None], unscale: float, workspace: Workspace
) -> Tensor:
    """Steps 1 to 4: updates the momentum, selects its strongest coefficients and encodes them, as uint8 [n].

    `gradients` are those of all parameters, by number; None counts as zero, so the momentum decays and is sent as usual
    and every rank's message keeps its length. `unscale` is a factor on them, as from GradScaler.
    """
    factors = _factors(chunk_group, unscale)  # b and s
    # Steps 1 and 2: Z <- b Z + s T(G). T is linear, so this is T(b M + s G): the buffer holds Z and M is never formed.
    # Step 3: J, V, in the same pass over the blocks, because a block is then still in the cache.
    if chunk_group.kernels is None:
        positions, values = _by_blocks(chunk_group, gradients, factors, workspace)
    else:
        mine = [gradients[member.number] for member in chunk_group.members]
        positions, values = chunk_group.kernels.extract(_readable(mine), chunk_group.momentum, *factors)
    # Step 4: q <- V as the bytes carry it
    return chunk_group.section.encode(positions, values)


def settle(chunk_group: ChunkGroup, sent: Coefficients) -> None:
    """The rest of step 4, once the round is applied: Z[J] <- Z[J] - a q, for the coefficients that this rank sent.

    They are decoded from the message's bytes, as receivers decode them. The quantization error V - q stays in the
    momentum, as do all coefficients that were not selected, and is sent later: that is the error feedback. LocalDeMo's
    error then decays, Z <- b Z; a momentum has decayed in step 1.
    """
    settings, momentum = chunk_group.settings, chunk_group.flat_momentum
    for run in chunk_group.section.runs:
        part = sent.chunks(run.start, run.stop)
        q = part.values[0].to(momentum.dtype)
        momentum[run].scatter_add_(1, part.positions[0], q.mul_(-settings.alpha))
    if settings.gradient_scale == "sum":
        momentum.mul_(settings.momentum_decay)


def read_gradients(block: Block, gradients: Sequence[Tensor | None], chunks_Crc: Tensor) -> None:
    """chunks(G): fills the block's chunks with gradients, those of all parameters by number; None counts as zero."""
    for piece in block.pieces:
        part = chunks_Crc[piece.start : piece.start + piece.patch.chunks]
        gradient, whole = gradients[piece.member.number], piece.member.whole
        if gradient is None:
            part.zero_()
        else:
            read_patch(matrix_view(gradient, whole), part, whole, piece.patch)


def _by_blocks(
    chunk_group: ChunkGroup, gradients: Sequence[Tensor | None], factors: tuple[float, float], workspace: Workspace
) -> tuple[Tensor, Tensor]:
    """Steps 1 to 3 with torch operations; returns J and V, positions and values [C, K] of the strongest coefficients.

    Goes block by block, so that gradients, momentum and intermediate results stay in the cache.
    """
    shape = (chunk_group.chunks, chunk_group.key.keep)
    positions = torch.empty(shape, dtype=torch.int64, device=chunk_group.key.device)
    values = torch.empty(shape, dtype=chunk_group.key.dtype, device=chunk_group.key.device)
    for block in chunk_group.blocks:
        here = slice(block.start, block.stop)
        chunks, spare = workspace.pair(chunk_group, block.stop - block.start)
        read_gradients(block, gradients, chunks)
        # steps 1 and 2, in one matrix product with an addition
        transform.accumulate(chunk_group.momentum[here], chunks, chunk_group.bases, spare, *factors)
        # step 3; positions ascend, as index codes need them
        positions[here], values[here] = strongest(
            chunk_group.flat_momentum[here], chunk_group.key.keep, spare.view(len(spare), -1)
        )
    return positions, values


def _readable(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns gradients that kernels can read in place: contiguous, float32 or bfloat16; copies of all others."""
    found: list[Tensor | None] = []
    for gradient in gradients:
        if gradient is not None:
            if gradient.dtype not in (torch.float32, torch.bfloat16):
                gradient = gradient.to(torch.float32)
            gradient = gradient.contiguous()
        found.append(gradient)
    return found


def _factors(chunk_group: ChunkGroup, unscale: float) -> tuple[float, float]:
    """Returns b and s of step 1; s is 1 - b (a moving average: v2) or lr (v1). An error decays when it is settled."""
    settings = chunk_group.settings
    decay = settings.momentum_decay
    factors = {"ema": (decay, 1 - decay), "lr": (decay, settings.lr), "sum": (1.0, 1.0)}
    decay, scale = factors[settings.gradient_scale]
    return decay, unscale * (-scale if settings.maximize else scale)
