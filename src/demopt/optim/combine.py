"""Steps 6 to 8 of the algorithm: turns the coefficients of all ranks into the update of a run of chunks.

Shapes: W ranks, C chunks, N elements in a chunk (r rows, c columns).
"""

import torch
from torch import Tensor

from demopt.core import exact, transform
from demopt.core.aggregate import aggregate
from demopt.core.update import RULES, sign
from demopt.kernels.steps import Steps
from demopt.optim.bucket import Block, Bucket, Piece, local, update_matrices, update_parameters
from demopt.optim.stages import Workspace
from demopt.wire.coefficients import Coefficients
from demopt.wire.values import CODECS, Stepped


def update(bucket: Bucket, blocks: list[Block], coefficients: Coefficients, workspace: Workspace) -> None:
    """X <- X - lr wd X - lr phi(U), for consecutive blocks and their coefficients."""
    kernels, parameters = bucket.decoding(), [local(parameter.detach()) for parameter, _ in bucket.members]
    if kernels is not None and all(kernels.writable(parameter) for parameter in parameters):
        lr, weight_decay = float(bucket.group["lr"]), float(bucket.group["weight_decay"])
        steps = _steps(bucket, _clipped(bucket, coefficients))
        kernels.apply(parameters, bucket.tilings, steps, lr, weight_decay, first=blocks[0].start)
        return

    def matrix(piece: Piece) -> Tensor:
        return workspace.matrix(bucket, piece.whole.matrix)

    for block in blocks:
        inside = coefficients.chunks(block.start - blocks[0].start, block.stop - blocks[0].start)
        pair = workspace.pair(bucket, block.stop - block.start)
        if bucket.rule.whole:
            update_matrices(block, decoded(bucket, inside, pair), matrix, bucket)
        else:
            update_parameters(block, combine(bucket, inside, pair, block.start), bucket.group)


def combine(bucket: Bucket, coefficients: Coefficients, pair: tuple[Tensor, Tensor], first: int = 0) -> Tensor:
    """Returns the direction phi(U) of the coefficients' chunks, in the first tensor of `pair` (both [C, r, c]).

    Updates the rule's state of tiles [first, first + C).
    """
    if bucket.rule is RULES["signum"]:
        return _signs(bucket, coefficients, pair)
    update = decoded(bucket, coefficients, pair)
    state = {name: tensor[first : first + len(update)] for name, tensor in bucket.rule_state.items()}
    return bucket.rule.phi(update, pair[1], state, bucket.group)


def decoded(bucket: Bucket, coefficients: Coefficients, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Returns U [C, r, c] of the coefficients' chunks, in the first tensor of `pair`."""
    units = _decode(bucket, _clipped(bucket, coefficients), pair)
    return pair[0] if units is None else pair[0].mul_(units.view(-1, 1, 1))


def _signs(bucket: Bucket, coefficients: Coefficients, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the sign of U, which does not depend on the units."""
    coefficients = _clipped(bucket, coefficients)
    if kernels := bucket.decoding():
        kernels.directions(_steps(bucket, coefficients), pair[0])
        return pair[0]
    _decode(bucket, coefficients, pair)
    return sign(pair[0], _sent(coefficients) if bucket.kind.ties else None)


def reduced(bucket: Bucket, coefficients: Coefficients, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the aggregate Q [C, N] of the coefficients' chunks, in the first tensor of `pair`."""
    units = _aggregate(bucket, _clipped(bucket, coefficients), pair)
    out = pair[0].view(-1, bucket.kind.length)
    return out if units is None else out.mul_(units.unsqueeze(1))


def _clipped(bucket: Bucket, coefficients: Coefficients) -> Coefficients:
    return coefficients.clipped_to_median() if bucket.group["clip_to_median"] else coefficients


def _steps(bucket: Bucket, coefficients: Coefficients) -> Steps:
    """Returns the coefficients and settings as the kernels take them."""
    level, reduction = largest_level(bucket), bucket.group["reduction"]
    return Steps(coefficients.positions, *coefficients.stepped, bucket.inverse_bases, level, reduction)


def _aggregate(bucket: Bucket, coefficients: Coefficients, pair: tuple[Tensor, Tensor]) -> Tensor | None:
    """Writes Q to the first tensor; if decoding is exact, as integer multiples of the returned units [C]."""
    out, spare = (tensor.view(-1, bucket.kind.length) for tensor in pair)
    reduction = bucket.group["reduction"]
    if not bucket.kind.exact:
        aggregate(coefficients.positions, coefficients.values, reduction, out, spare)
        return None
    return exact.aggregate_steps(
        coefficients.positions, coefficients.stepped, largest_level(bucket), reduction, (out, spare)
    )


def largest_level(bucket: Bucket) -> int:
    """Returns the largest level of the bucket's codec, which must be a stepped one."""
    codec = CODECS[bucket.kind.values]
    assert isinstance(codec, Stepped)
    return codec.largest_level


def _decode(bucket: Bucket, coefficients: Coefficients, pair: tuple[Tensor, Tensor]) -> Tensor | None:
    """Writes U to the first tensor; if decoding is exact, as integer multiples of the returned units [C]."""
    units = _aggregate(bucket, coefficients, pair)
    rows, columns = bucket.inverse_bases
    if units is None:
        transform.inverse(pair[0], rows, columns, out=pair[0], spare=pair[1])
        return None
    return units * exact.inverse(pair[0], rows, columns, pair[1]) * bucket.basis_unit


def _sent(coefficients: Coefficients) -> Tensor:
    """Returns bool [C]: whether some rank sent a nonzero value for the chunk."""
    if coefficients.codes is not None:
        return (coefficients.codes != 0).any(0)
    return torch.ne(coefficients.values, 0).flatten(2).any(2).any(0)
