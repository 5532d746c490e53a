"""Steps 6 to 8 of the algorithm (docs/algorithm.md): turns the coefficients of all ranks into an update.

`decompress` does all three. Route "owner" does 6, 7 and phi on the chunks' owner (`direction`) and the rest of 8
everywhere (`update_parameters`); route "relay" does 6 on the owner (`reduce`), and all three on its answer.

Every rank must compute the same bits here, so sums over ranks have a fixed order, or are exact (docs/exact.md).

Shapes: W ranks, C chunks, N elements in a chunk (r rows, c columns), K kept.
"""

import torch
from torch import Tensor

from demopt.core import exact, transform
from demopt.core.aggregate import aggregate
from demopt.core.chunk import add_patch, matrix_view, to_local, write_patch
from demopt.core.update import sign
from demopt.kernels.steps import Steps
from demopt.optim.chunk_group import Block, ChunkGroup
from demopt.optim.compress import Workspace
from demopt.optim.matrices import step, update_of
from demopt.wire.coefficients import Coefficients


def decompress(chunk_group: ChunkGroup, blocks: list[Block], coefficients: Coefficients, workspace: Workspace) -> None:
    """Steps 6 to 8, for consecutive blocks and their coefficients, which have been checked.

    Goes block by block: Q and U of one block exist at a time, never of the whole model.
    """
    coefficients = clipped(chunk_group, coefficients)
    if _by_kernels(chunk_group, blocks, coefficients):
        return
    for block in blocks:
        chunks = coefficients.chunks(block.start - blocks[0].start, block.stop - blocks[0].start)
        pair = workspace.pair(chunk_group, block.stop - block.start)
        if chunk_group.rule.whole:  # phi needs a whole matrix, which may span blocks: it comes after them
            update_matrices(chunk_group, block, decode(chunk_group, chunks, pair), workspace)
        else:
            update_parameters(chunk_group, block, direction(chunk_group, chunks, pair, block.start))


def clipped(chunk_group: ChunkGroup, coefficients: Coefficients) -> Coefficients:
    """Before step 6: returns the coefficients, no rank's chunk larger than the median rank's if clip_to_median is set.

    The momenta lost what was sent, not what is left after clipping: what is clipped is gone.
    """
    return coefficients.clipped_to_median() if chunk_group.group["clip_to_median"] else coefficients


def direction(
    chunk_group: ChunkGroup, coefficients: Coefficients, pair: tuple[Tensor, Tensor], first: int = 0
) -> Tensor:
    """Steps 6, 7 and phi of step 8: returns phi(U) of the chunks, in the first tensor of `pair` (both [C, r, c]).

    Updates the rule's state of chunks [first, first + C).
    """
    rule, out = chunk_group.rule, pair[0]
    if rule.signs_only:  # the units of exact decoding are positive, so U's sign is that of its integers
        if chunk_group.decoders:
            chunk_group.decoders.directions(_steps(chunk_group, coefficients), out)
            return out
        _inverse(chunk_group, _aggregate(chunk_group, coefficients, pair), pair)
        return sign(out, _sent(coefficients) if chunk_group.key.ties else None)
    decode(chunk_group, coefficients, pair)
    state = {name: tensor[first : first + len(out)] for name, tensor in chunk_group.rule_state.items()}
    return rule(out, pair[1], state)


def decode(chunk_group: ChunkGroup, coefficients: Coefficients, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Steps 6 and 7: returns U [C, r, c] of the coefficients' chunks, in the first tensor of `pair`."""
    units = _inverse(chunk_group, _aggregate(chunk_group, coefficients, pair), pair)
    return pair[0] if units is None else pair[0].mul_(units.view(-1, 1, 1))


def reduce(chunk_group: ChunkGroup, coefficients: Coefficients, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Step 6 alone: returns the aggregate Q [C, N] of the coefficients' chunks, in the first tensor of `pair`."""
    units = _aggregate(chunk_group, coefficients, pair)
    out = pair[0].view(-1, chunk_group.key.length)
    return out if units is None else out.mul_(units.unsqueeze(1))


def update_parameters(chunk_group: ChunkGroup, block: Block, direction_Crc: Tensor) -> None:
    """Step 8 after phi: X <- X - lr wd X - lr direction, for the block's part of X. Overwrites the direction.

    Weight decay is decoupled: it never enters a momentum, and so costs no communication.
    """
    lr, weight_decay = float(chunk_group.group["lr"]), float(chunk_group.group["weight_decay"])
    direction_Crc.mul_(-lr)  # separately: fused with the addition, some hardware would round once, other twice
    for piece in block.pieces:
        parameter = to_local(piece.parameter.detach())
        matrix = matrix_view(parameter, piece.whole)
        part = direction_Crc[piece.start : piece.start + piece.patch.chunks]
        seed = chunk_group.seed(piece.parameter)
        add_patch(matrix, part, piece.whole, piece.patch, 1 - lr * weight_decay, seed)
        if matrix.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            parameter.copy_(matrix.view(parameter.shape))  # strides without a matrix view, such as channels_last


def update_matrices(chunk_group: ChunkGroup, block: Block, update_Crc: Tensor, workspace: Workspace) -> None:
    """Step 8 for a phi that needs whole matrices: assembles U of each, and applies it at its last chunks.

    Where ranks of a node share the work, U is applied when they do. Call it with the blocks in order.
    """
    matrices = chunk_group.matrices
    for piece in block.pieces:
        whole, patch, parameter = piece.whole, piece.patch, to_local(piece.parameter.detach())
        waiting = matrices.buffer(piece.parameter, chunk_group) if matrices is not None else None
        U = workspace.matrix(chunk_group, whole.matrix).view(parameter.shape) if waiting is None else waiting
        write_patch(U.view(whole.matrix), update_Crc[piece.start : piece.start + patch.chunks], whole, patch)
        if (patch.rows[1], patch.columns[1]) == whole.grid:
            if matrices is not None and waiting is not None:
                matrices.decoded(piece.parameter)
            else:
                step(chunk_group, piece.parameter, update_of(chunk_group.rule, U))


def _by_kernels(chunk_group: ChunkGroup, blocks: list[Block], coefficients: Coefficients) -> bool:
    """Does steps 6 to 8 in one pass over the parameters, if kernels can: the same bits. Returns whether they did."""
    kernels = chunk_group.decoders
    if kernels is None:
        return False
    parameters = [to_local(parameter.detach()) for parameter, _ in chunk_group.members]
    if not all(kernels.writable(p) and p.dtype != torch.bfloat16 for p in parameters):  # which they do not round so
        return False
    lr, weight_decay = float(chunk_group.group["lr"]), float(chunk_group.group["weight_decay"])
    steps = _steps(chunk_group, coefficients)
    kernels.apply(parameters, chunk_group.chunkings, steps, lr, weight_decay, first=blocks[0].start)
    return True


def _steps(chunk_group: ChunkGroup, coefficients: Coefficients) -> Steps:
    """Returns the coefficients and settings as the kernels take them."""
    level, reduction = chunk_group.largest_level, chunk_group.group["reduction"]
    return Steps(coefficients.positions, *coefficients.stepped, chunk_group.inverse_bases, level, reduction)


def _aggregate(chunk_group: ChunkGroup, coefficients: Coefficients, pair: tuple[Tensor, Tensor]) -> Tensor | None:
    """Step 6: writes Q to the first tensor; if decoding is exact, as integer multiples of the returned units [C].

    Sums floats in the order of the ranks; sums of integers are exact in any order.
    """
    length, reduction = chunk_group.key.length, chunk_group.group["reduction"]
    out, spare = pair[0].view(-1, length), pair[1].view(-1, length)
    if not chunk_group.key.exact:
        aggregate(coefficients.positions, coefficients.values, reduction, out, spare)
        return None
    return exact.aggregate_steps(
        coefficients.positions, coefficients.stepped, chunk_group.largest_level, reduction, (out, spare)
    )


def _inverse(chunk_group: ChunkGroup, units: Tensor | None, pair: tuple[Tensor, Tensor]) -> Tensor | None:
    """Step 7: turns Q in the first tensor into U; if decoding is exact, into multiples of the returned units [C]."""
    rows, columns = chunk_group.inverse_bases
    if units is None:
        transform.inverse(pair[0], rows, columns, out=pair[0], spare=pair[1])
        return None
    return units * exact.inverse(pair[0], rows, columns, pair[1]) * chunk_group.basis_unit


def _sent(coefficients: Coefficients) -> Tensor:
    """Returns bool [C]: whether some rank sent a nonzero value for the chunk."""
    if coefficients.codes is not None:
        return (coefficients.codes != 0).any(0)
    return torch.ne(coefficients.values, 0).flatten(2).any(2).any(0)
