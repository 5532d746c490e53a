"""Steps 6 to 8 of the algorithm: turns the coefficients of all ranks into the update of a run of chunks.

Shapes: W ranks, C chunks, N elements in a chunk (r rows, c columns).
"""

import torch
from torch import Tensor

from demopt.core import exact, transform
from demopt.core.aggregate import aggregate
from demopt.core.update import sign
from demopt.kernels.steps import Steps
from demopt.optim.chunk_group import Block, ChunkGroup, Piece, local, update_matrices, update_parameters
from demopt.optim.compress import Workspace
from demopt.wire.coefficients import Coefficients
from demopt.wire.values import CODECS, Stepped


def update(chunk_group: ChunkGroup, blocks: list[Block], coefficients: Coefficients, workspace: Workspace) -> None:
    """X <- X - lr wd X - lr phi(U), for consecutive blocks and their coefficients."""
    kernels, parameters = chunk_group.decoding(), [local(parameter.detach()) for parameter, _ in chunk_group.members]
    if kernels is not None and all(kernels.writable(parameter) for parameter in parameters):
        lr, weight_decay = float(chunk_group.group["lr"]), float(chunk_group.group["weight_decay"])
        steps = _steps(chunk_group, _clipped(chunk_group, coefficients))
        kernels.apply(parameters, chunk_group.chunkings, steps, lr, weight_decay, first=blocks[0].start)
        return

    def matrix(piece: Piece) -> Tensor:
        return workspace.matrix(chunk_group, piece.whole.matrix)

    for block in blocks:
        inside = coefficients.chunks(block.start - blocks[0].start, block.stop - blocks[0].start)
        pair = workspace.pair(chunk_group, block.stop - block.start)
        if chunk_group.rule.whole:
            update_matrices(block, decoded(chunk_group, inside, pair), matrix, chunk_group)
        else:
            update_parameters(block, combine(chunk_group, inside, pair, block.start), chunk_group.group)


def combine(chunk_group: ChunkGroup, coefficients: Coefficients, pair: tuple[Tensor, Tensor], first: int = 0) -> Tensor:
    """Returns the direction phi(U) of the coefficients' chunks, in the first tensor of `pair` (both [C, r, c]).

    Updates the rule's state of chunks [first, first + C).
    """
    if chunk_group.rule.signs_only:
        return _signs(chunk_group, coefficients, pair)
    update = decoded(chunk_group, coefficients, pair)
    state = {name: tensor[first : first + len(update)] for name, tensor in chunk_group.rule_state.items()}
    return chunk_group.rule(update, pair[1], state)


def decoded(chunk_group: ChunkGroup, coefficients: Coefficients, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Returns U [C, r, c] of the coefficients' chunks, in the first tensor of `pair`."""
    units = _decode(chunk_group, _clipped(chunk_group, coefficients), pair)
    return pair[0] if units is None else pair[0].mul_(units.view(-1, 1, 1))


def _signs(chunk_group: ChunkGroup, coefficients: Coefficients, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the sign of U, which does not depend on the units."""
    coefficients = _clipped(chunk_group, coefficients)
    if kernels := chunk_group.decoding():
        kernels.directions(_steps(chunk_group, coefficients), pair[0])
        return pair[0]
    _decode(chunk_group, coefficients, pair)
    return sign(pair[0], _sent(coefficients) if chunk_group.key.ties else None)


def reduced(chunk_group: ChunkGroup, coefficients: Coefficients, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the aggregate Q [C, N] of the coefficients' chunks, in the first tensor of `pair`."""
    units = _aggregate(chunk_group, _clipped(chunk_group, coefficients), pair)
    out = pair[0].view(-1, chunk_group.key.length)
    return out if units is None else out.mul_(units.unsqueeze(1))


def _clipped(chunk_group: ChunkGroup, coefficients: Coefficients) -> Coefficients:
    return coefficients.clipped_to_median() if chunk_group.group["clip_to_median"] else coefficients


def _steps(chunk_group: ChunkGroup, coefficients: Coefficients) -> Steps:
    """Returns the coefficients and settings as the kernels take them."""
    level, reduction = largest_level(chunk_group), chunk_group.group["reduction"]
    return Steps(coefficients.positions, *coefficients.stepped, chunk_group.inverse_bases, level, reduction)


def _aggregate(chunk_group: ChunkGroup, coefficients: Coefficients, pair: tuple[Tensor, Tensor]) -> Tensor | None:
    """Writes Q to the first tensor; if decoding is exact, as integer multiples of the returned units [C]."""
    out, spare = (tensor.view(-1, chunk_group.key.length) for tensor in pair)
    reduction = chunk_group.group["reduction"]
    if not chunk_group.key.exact:
        aggregate(coefficients.positions, coefficients.values, reduction, out, spare)
        return None
    return exact.aggregate_steps(
        coefficients.positions, coefficients.stepped, largest_level(chunk_group), reduction, (out, spare)
    )


def largest_level(chunk_group: ChunkGroup) -> int:
    """Returns the largest level of the chunk group's codec, which must be a stepped one."""
    codec = CODECS[chunk_group.key.values]
    assert isinstance(codec, Stepped)
    return codec.largest_level


def _decode(chunk_group: ChunkGroup, coefficients: Coefficients, pair: tuple[Tensor, Tensor]) -> Tensor | None:
    """Writes U to the first tensor; if decoding is exact, as integer multiples of the returned units [C]."""
    units = _aggregate(chunk_group, coefficients, pair)
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
