"""Steps 1 to 4 of the algorithm (docs/algorithm.md) for one chunk group: gradients become a part of a message.

`compress` does steps 1 to 4 but for the subtraction, which `subtract_sent` does once the round is applied. Until then
nothing has left the momentum, so a round that fails loses nothing. Step 5 sends the bytes; steps 6 to 8 are in
decompress.py.

Shapes: C chunks, N elements in a chunk (r rows, c columns), K kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from demopt.codec.chunk_group import ChunkGroup
from demopt.core import transform
from demopt.core.top_k import strongest
from demopt.kernels import step as kernels
from demopt.wire.coefficients import Coefficients
from demopt.wire.layout import sign_planes


class Workspace:
    """Two buffers of one block, kept from step to step, because allocating them costs more than filling them."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    def pair(self, chunk_group: ChunkGroup, chunks: int) -> Tensor:
        """Returns two tensors in one, [2, chunks, r, c], with undefined contents."""
        key, elements = chunk_group.key, chunks * chunk_group.key.length
        if key.device.type != "cpu":  # its allocator keeps memory itself, and lends it to backward between steps
            return torch.empty(2, chunks, *key.chunk_shape, dtype=key.dtype, device=key.device)
        buffer = self._buffers.get(key.dtype)
        if buffer is None or buffer.shape[1] < elements:
            most = max(chunk_group.block_chunks * key.length, elements)
            buffer = self._buffers[key.dtype] = torch.empty(2, most, dtype=key.dtype, device="cpu")
        return buffer[:, :elements].view(2, chunks, *key.chunk_shape)


def compress(
    chunk_group: ChunkGroup,
    gradients: Sequence[Tensor | None],  # shaped like the parameters
    unscale: float,
    workspace: Workspace,
    minus: Sequence[Tensor | None] | None = None,  # shaped like the gradients
) -> list[Tensor]:  # uint8 [bytes], or bool [bits] on an accelerator
    """Steps 1 to 4: updates the momentum, selects its strongest coefficients and encodes them as planes.

    `gradients` are those of all parameters, by number; None counts as zero, so the momentum decays and is sent as usual
    and every rank's message keeps its length. `minus` is subtracted from them. `unscale` is a factor on them, as from
    GradScaler.
    """
    settings = chunk_group.settings
    decay, scale = settings.momentum_decay, 1 - settings.momentum_decay  # b and s: a moving average (v2)
    if settings.gradient_scale == "lr":  # v1
        scale = settings.lr
    elif settings.momentum_is_error:  # which decays in `subtract_sent`, not here
        decay, scale = 1.0, 1.0
    factors = (decay, unscale * (-scale if settings.maximize else scale))
    section = chunk_group.section
    # Steps 1 and 2: Z <- b Z + s T(G). T is linear, so this is T(b M + s G): the buffer holds Z and M is never formed.
    # Step 3: J, V, in the same pass over the blocks, because a block is then still in the cache.
    # Step 4: q <- V as the bytes carry it
    if chunk_group.kernel is None:
        return section.encode(*_by_blocks(chunk_group, gradients, minus, factors, workspace))
    mine = [gradients[member.number] for member in chunk_group.members]
    less = None if minus is None else [minus[member.number] for member in chunk_group.members]
    found = chunk_group.kernel.extract(mine, less, chunk_group.momentum, factors)
    return sign_planes(*found) if section.all_signs else section.encode(*found)


def subtract_sent(chunk_group: ChunkGroup, sent: Coefficients) -> None:
    """The rest of step 4, once the round is applied: Z[J] <- Z[J] - a q, for the coefficients that this rank sent.

    They are decoded from the message's bytes, as receivers decode them. The quantization error V - q stays in the
    momentum, as do all coefficients that were not selected, and is sent later: that is the error feedback. LocalDeMo's
    error then decays, Z <- b Z; a momentum has decayed in step 1.
    """
    settings = chunk_group.settings
    decay = settings.momentum_decay if settings.momentum_is_error else 1.0
    subtract(chunk_group, chunk_group.flat_momentum, sent, settings.alpha, decay)


def subtract(chunk_group: ChunkGroup, Z_CN: Tensor, sent: Coefficients, alpha: float = 1.0, decay: float = 1.0) -> None:
    """Z <- decay (Z - alpha q) for the coefficients of one rank, W = 1; of an owner, Z are the sums of its chunks."""
    if chunk_group.kernel is not None and chunk_group.section.all_signs:
        kernels.subtract_sent(Z_CN, sent.tensors["signs"], sent.tensors["codes"], alpha, decay)
        return
    section = chunk_group.section
    for span in section.spans if Z_CN.is_cpu else section.device_spans:
        sent.chunks(span.start, span.stop).subtract_from(Z_CN[span], alpha)
    if decay != 1:
        Z_CN.mul_(decay)


def _by_blocks(
    chunk_group: ChunkGroup,
    gradients: Sequence[Tensor | None],
    minus: Sequence[Tensor | None] | None,
    factors: tuple[float, float],  # b and s
    workspace: Workspace,
) -> tuple[Tensor, Tensor]:  # [C, K] each
    """Steps 1 to 3 with torch operations; returns J and V, positions and values [C, K] of the strongest coefficients.

    Goes block by block, so that gradients, momentum and intermediate results stay in the cache. For signs of all
    coefficients it returns no positions, and a view of the momentum.
    """
    everything = chunk_group.section.all_signs
    shape = (0, 0) if everything else (chunk_group.chunks, chunk_group.key.keep)
    positions = torch.empty(shape, dtype=torch.int64, device=chunk_group.key.device)
    values = torch.empty(shape, dtype=chunk_group.key.dtype, device=chunk_group.key.device)
    for block in chunk_group.blocks:
        here = slice(block.start, block.stop)
        chunks, spare = workspace.pair(chunk_group, block.stop - block.start)
        mine = [gradients[piece.member.number] for piece in block.pieces]
        less = None if minus is None else [minus[piece.member.number] for piece in block.pieces]
        block.read(mine, chunks, spare, less)
        # steps 1 and 2, in one matrix product with an addition
        transform.accumulate(chunk_group.momentum[here], chunks, chunk_group.bases, spare, factors)
        if not everything:  # step 3; positions ascend, as index codes need them
            found = strongest(chunk_group.flat_momentum[here], chunk_group.key.keep, spare.view(len(spare), -1))
            if len(chunk_group.blocks) == 1:
                return found
            positions[here], values[here] = found
    return positions, chunk_group.flat_momentum if everything else values
