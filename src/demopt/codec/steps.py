"""The eight steps of the algorithm (docs/algorithm.md) for one chunk group, but for step 5, which sends the bytes.

`compress` does steps 1 to 4: gradients become a part of a message. Only the subtraction is left to `subtract_sent`,
once the round is applied. Until then nothing has left the momentum, so a round that fails loses nothing.

`decompress` does steps 6 to 8: the coefficients of all ranks become an update. On route "owner" the chunks' owner does
step 6 (`sum_and_encode`), and every rank decompresses its answer. Every rank must compute the same bits here, so sums
over ranks have a fixed order, or are exact (docs/algorithm.md). A chunk group's `kernel` does steps 1 to 3, its
`inverter` 6 and 7, its `updater` 6 to 8: each is the same C kernel, or None where torch operations do the steps here.
"""

import functools

import torch
from torch import Tensor

from demopt.codec.chunk_group import Block, ChunkGroup
from demopt.core import exact, transform
from demopt.core.rounding import decay_and_add, to_bfloat16
from demopt.core.rules import sign
from demopt.core.top_k import strongest
from demopt.core.transform import Factors
from demopt.exchange.dtensor import to_local
from demopt.kernels import step as kernels
from demopt.kernels.gate import apart
from demopt.kernels.step import Tensors
from demopt.wire.coefficients import Coefficients
from demopt.wire.layout import sign_planes

_BATCH_ELEMENTS = 1 << 23  # of matrices that are orthogonalised together, which takes five times their memory


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
    chunk_group: ChunkGroup, gradients: Tensors, unscale: float, workspace: Workspace, minus: Tensors | None
) -> list[Tensor]:  # uint8 [bytes], or bool [bits] on an accelerator
    """Steps 1 to 4: updates the momentum, selects its strongest coefficients and encodes them as planes.

    `gradients` are those of all parameters, by number and shaped like them; None counts as zero, so the momentum decays
    and is sent as usual and every rank's message keeps its length. `minus`, shaped alike, is subtracted from them.
    `unscale` is a factor on them, as from GradScaler.
    """
    settings = chunk_group.settings
    b, s = settings.momentum_decay, 1 - settings.momentum_decay  # a moving average (v2)
    if settings.gradient_scale == "lr":  # v1
        s = settings.lr
    elif settings.momentum_is_error:  # which decays in `subtract_sent`, not here
        b, s = 1.0, 1.0
    factors = (b, unscale * (-s if settings.maximize else s))
    section = chunk_group.section
    # Steps 1 and 2: Z <- b Z + s T(G). T is linear, so this is T(b M + s G): the buffer holds Z and M is never formed.
    # Step 3: J, V, in the same pass over the blocks, because a block is then still in the cache.
    # Step 4: q <- V as the bytes carry it
    if chunk_group.kernel is None:
        return section.encode(*_by_blocks(chunk_group, gradients, minus, factors, workspace))
    mine = [gradients[chunked.number] for chunked in chunk_group.parameters]
    less = None if minus is None else [minus[chunked.number] for chunked in chunk_group.parameters]
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
    """Z <- decay (Z - alpha q) for the coefficients of one rank, W = 1; an owner's Z is the sums of its chunks."""
    if chunk_group.kernel is not None and chunk_group.section.all_signs:
        kernels.subtract_sent(Z_CN, sent.tensors["signs"], sent.tensors["codes"], alpha, decay)
        return
    section = chunk_group.section
    for span in section.spans if Z_CN.is_cpu else section.device_spans:
        sent.chunks(span.start, span.stop).subtract_from(Z_CN[span], alpha)
    if decay != 1:
        Z_CN.mul_(decay)


def _by_blocks(
    chunk_group: ChunkGroup, gradients: Tensors, minus: Tensors | None, factors: Factors, workspace: Workspace
) -> tuple[Tensor, Tensor]:  # [C, K] each
    """Steps 1 to 3 with torch operations; returns J and V, positions and values [C, K] of the strongest coefficients.

    Block by block, so that all stays in the cache. For signs of all, J is empty and V a view of the momentum.
    """
    everything = chunk_group.section.all_signs
    shape = (0, 0) if everything else (chunk_group.chunks, chunk_group.key.keep)
    positions = torch.empty(shape, dtype=torch.int64, device=chunk_group.key.device)
    values = torch.empty(shape, dtype=chunk_group.key.dtype, device=chunk_group.key.device)
    for block in chunk_group.blocks:
        here = slice(block.start, block.stop)
        chunks, spare = workspace.pair(chunk_group, block.stop - block.start)
        mine = [gradients[piece.of.number] for piece in block.pieces]
        less = None if minus is None else [minus[piece.of.number] for piece in block.pieces]
        block.read(mine, chunks, spare, less)
        # steps 1 and 2, in one matrix product with an addition
        transform.accumulate(chunk_group.momentum[here], chunks, chunk_group.bases, spare, factors)
        if not everything:  # step 3; positions ascend, as index codes need them
            found = strongest(chunk_group.flat_momentum[here], chunk_group.key.keep, spare.view(len(spare), -1))
            if len(chunk_group.blocks) == 1:
                return found
            positions[here], values[here] = found
    return positions, chunk_group.flat_momentum if everything else values


def decompress(chunk_group: ChunkGroup, coefficients: Coefficients, round_number: int, workspace: Workspace) -> None:
    """Steps 6 to 8 for all chunks, whose coefficients have been checked.

    Block by block: Q and U never cover the whole model. `round_number` seeds the rounding of bfloat16 parameters.
    """
    settings, rule = chunk_group.settings, chunk_group.rule
    if settings.clip_to_median:  # by default in a folder; momenta lose all that was sent, even the clipped parts
        coefficients = coefficients.with_float64().clipped_to_median().to(chunk_group.key.device)
    if chunk_group.updater is not None:
        parameters = [to_local(chunked.parameter.detach()) for chunked in chunk_group.parameters]
        fit = all(parameter.dtype == torch.float32 and parameter.is_contiguous() for parameter in parameters)
        if fit and apart(parameters):  # threads write them at the same time; one pass, the same bits
            factors = (1 - settings.lr * settings.weight_decay, -settings.lr)
            chunk_group.updater.apply(parameters, _received(chunk_group, coefficients), rule.signs_only, factors)
            return
    for block in chunk_group.blocks:
        pair_2Crc = workspace.pair(chunk_group, block.stop - block.start)  # U, then phi(U), and a spare
        part = coefficients.chunks(block.start, block.stop)
        invert(chunk_group, part, pair_2Crc, rule.signs_only)
        if rule.whole_matrix:
            _update_matrices(chunk_group, block, pair_2Crc, round_number)
            continue
        if not rule.signs_only:
            state = {name: tensor[block.start : block.stop] for name, tensor in chunk_group.rule_state.items()}
            rule(pair_2Crc[0], pair_2Crc[1], state)
        update_parameters(chunk_group, block, pair_2Crc, round_number)


def invert(chunk_group: ChunkGroup, coefficients: Coefficients, pair_2Crc: Tensor, by_sign: bool) -> None:
    """Steps 6 and 7: writes U [C, r, c] to the pair's first tensor; `by_sign`: only signs, as units are positive."""
    (out, spare), bases, settings = pair_2Crc, chunk_group.inverse_bases, chunk_group.settings
    ties = by_sign and chunk_group.key.ties
    if chunk_group.inverter is not None and ties == by_sign:  # it gives a sign to every zero of signs, and to no other
        chunk_group.inverter.invert(_received(chunk_group, coefficients), by_sign, out)
        return
    # step 6: Q, if decoding is exact in units [C]
    units_C = coefficients.aggregate(settings.reduction, chunk_group.largest_level, pair_2Crc.flatten(2), by_sign)
    if chunk_group.key.exact:
        more_units = exact.inverse(out, bases, spare, positive_zeros=ties)
        if units_C is not None:
            units_C = functools.reduce(torch.mul, more_units, units_C) * chunk_group.basis_unit
            out.mul_(units_C.view(-1, 1, 1))
    else:
        transform.inverse(out, bases, spare)
        if ties:
            out.add_(0.0)  # no zero may be negative
    if by_sign:
        sign(out, coefficients.codes.any(0) if ties and coefficients.codes is not None else None)


def sum_and_encode(chunk_group: ChunkGroup, received: Coefficients, errors_CN: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Step 6 of an owner: returns the sums errors + Q, and the planes that encode their signs."""
    sums_CN = torch.empty_like(errors_CN)
    if chunk_group.inverter is not None:
        return sums_CN, sign_planes(*kernels.answer(_received(chunk_group, received), errors_CN, sums_CN))
    for start in range(0, len(errors_CN), chunk_group.block_chunks):
        here = sums_CN[start : start + chunk_group.block_chunks]
        part = received.chunks(start, start + chunk_group.block_chunks)
        # a pair of one tensor: signs need no spare
        units_C = part.aggregate("mean", chunk_group.largest_level, here.unsqueeze(0), by_sign=False)
        if units_C is not None:
            here.mul_(units_C.unsqueeze(1))
    sums_CN.add_(errors_CN)
    return sums_CN, chunk_group.section.encode(sums_CN, sums_CN)


def update_parameters(chunk_group: ChunkGroup, block: Block, pair_2Crc: Tensor, round_number: int) -> None:
    """Step 8 for a block, X <- X - lr wd X - lr phi, where phi is the pair's first tensor. Overwrites both tensors."""
    lr, decay = chunk_group.settings.lr, 1 - chunk_group.settings.lr * chunk_group.settings.weight_decay
    direction_Crc, factor = pair_2Crc[0], -lr
    if not (chunk_group.rule.signs_only or abs(lr) == 1):  # some hardware fuses it with the addition and rounds once
        direction_Crc.mul_(factor)
        factor = 1.0
    targets = [piece.rows(to_local(piece.of.parameter.detach())) for piece in block.pieces]
    dtypes = {target.dtype for target in targets}
    for dtype in sorted(dtypes, key=lambda dtype: dtype == torch.bfloat16):  # last: its rounding changes the directions
        if dtype == torch.bfloat16:
            _add_and_round(block, pair_2Crc, (decay, factor), round_number)
        written = zip(targets, block.write(*pair_2Crc), strict=True)
        mine = [(target, part.reshape(target.shape)) for target, part in written if target.dtype == dtype]
        of_dtype, directions = [target for target, _ in mine], [direction for _, direction in mine]
        if dtype == torch.bfloat16:
            torch._foreach_copy_(of_dtype, directions)
        elif dtype == direction_Crc.dtype:
            if decay != 1:
                torch._foreach_mul_(of_dtype, decay)
            torch._foreach_add_(of_dtype, directions, alpha=factor)
        else:
            for target, direction in mine:
                decay_and_add(target, direction.mul(factor), decay)


def _add_and_round(block: Block, pair_2Crc: Tensor, factors: Factors, round_number: int) -> None:
    """direction <- decay X + factor direction, rounded to bfloat16, for the parameters of that dtype."""
    (decay, factor), direction_Crc = factors, pair_2Crc[0]
    narrow = [piece for piece in block.pieces if piece.of.parameter.dtype == torch.bfloat16]
    tensors = [to_local(piece.of.parameter.detach()) if piece in narrow else None for piece in block.pieces]
    wide_Crc = torch.empty_like(direction_Crc)
    block.read(tensors, wide_Crc, pair_2Crc[1])
    torch.add(wide_Crc if decay == 1 else wide_Crc.mul_(decay), direction_Crc, alpha=factor, out=direction_Crc)
    # each with the place of its first chunk in the parameter
    spans = [(piece.start, piece.chunks, piece.of.number, piece.first * piece.of.chunking.grid[1]) for piece in narrow]
    to_bfloat16(direction_Crc.flatten(1), round_number, spans)


def _update_matrices(chunk_group: ChunkGroup, block: Block, pair_2Crc: Tensor, round_number: int) -> None:
    """Step 8 for rules of whole matrices, on an accelerator in batches of one shape. The pair's first tensor is U."""
    settings = chunk_group.settings
    decay = 1 - settings.lr * settings.weight_decay
    batches: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
    for piece, part in zip(block.pieces, block.write(*pair_2Crc), strict=True):
        number, parameter = piece.of.number, piece.of.parameter
        local = to_local(parameter.detach())
        U = part.reshape(local.shape)
        if U.is_cpu or parameter.dtype != U.dtype:  # a narrower parameter is rounded on its own
            each = [settings.update(matrix, matrix.new_empty(0), {}) for matrix in U.view(-1, *U.shape[-2:])]
            phi = torch.stack(each).view_as(U) if each else U
            decay_and_add(local, phi.mul(-settings.lr), decay, (round_number, number))
        else:
            batches.setdefault(U.shape[-2:], []).append((local, U))
    for (rows, columns), matrices in batches.items():
        most = max(_BATCH_ELEMENTS // matrices[0][1].numel(), 1)
        for first in range(0, len(matrices), most):
            targets, updates = zip(*matrices[first : first + most], strict=True)
            together = torch.cat([U.view(-1, rows, columns) for U in updates])
            phi = settings.update(together, together.new_empty(0), {}).mul_(-settings.lr)
            parts = phi.view(-1).split([target.numel() for target in targets])
            if decay != 1:
                torch._foreach_mul_(targets, decay)
            directions = [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]
            torch._foreach_add_(targets, directions)


def _received(chunk_group: ChunkGroup, sent: Coefficients) -> kernels.Received:
    """Returns decoded integers in the form that kernels take."""
    tensors, level = sent.tensors, chunk_group.largest_level or 0
    if chunk_group.section.all_signs:
        return kernels.received_signs(tensors["signs"], tensors["codes"], exact.weights_of(sent.samples))
    strongest = tensors["positions"], tensors["numbers"], tensors["codes"]
    return kernels.received_strongest(*strongest, level, chunk_group.settings.reduction)
