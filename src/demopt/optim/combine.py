"""From the coefficients of all ranks to the update of a run of chunks: steps 6 and 7 of the algorithm, and phi.

Shapes: W ranks, C chunks, N elements in a chunk (r rows, c columns).
"""

import torch
from torch import Tensor

from demopt.core import exact, transform
from demopt.core.aggregate import aggregate
from demopt.core.update import sign
from demopt.optim.bucket import Bucket
from demopt.wire.coefficients import Coefficients
from demopt.wire.values import CODECS, Stepped


def combine(bucket: Bucket, coefficients: Coefficients, pair: tuple[Tensor, Tensor]) -> Tensor:
    """The direction phi(U) [C, r, c] of the coefficients' chunks, in the first tensor of `pair` (both [C, r, c])."""
    if bucket.group["clip_to_median"]:
        coefficients = coefficients.clipped_to_median()
    units = _decode(bucket, coefficients, pair)
    if bucket.group["update"] == "signum":
        return sign(pair[0], _sent(coefficients) if bucket.kind.ties else None)
    return pair[0] if units is None else pair[0].mul_(units.view(-1, 1, 1))


def reduced(bucket: Bucket, coefficients: Coefficients, pair: tuple[Tensor, Tensor]) -> Tensor:
    """The aggregate Q [C, N] of the coefficients' chunks, in the first tensor of `pair`."""
    if bucket.group["clip_to_median"]:
        coefficients = coefficients.clipped_to_median()
    units = _aggregate(bucket, coefficients, pair)
    out = pair[0].view(-1, bucket.kind.length)
    return out if units is None else out.mul_(units.unsqueeze(1))


def _aggregate(bucket: Bucket, coefficients: Coefficients, pair: tuple[Tensor, Tensor]) -> Tensor | None:
    """Leaves Q in the first tensor; where it is exact, counts of the units [C] that are returned."""
    out, spare = (tensor.view(-1, bucket.kind.length) for tensor in pair)
    reduction = bucket.group["reduction"]
    if not bucket.kind.exact:
        aggregate(coefficients.positions, coefficients.values, reduction, out, spare)
        return None
    codec = CODECS[bucket.kind.values]
    assert isinstance(codec, Stepped)
    return exact.aggregate_steps(
        coefficients.positions, coefficients.stepped, codec.largest_level, reduction, (out, spare)
    )


def _decode(bucket: Bucket, coefficients: Coefficients, pair: tuple[Tensor, Tensor]) -> Tensor | None:
    """Leaves U in the first tensor; where it is exact, counts of the units [C] that are returned."""
    units = _aggregate(bucket, coefficients, pair)
    rows, columns = bucket.inverse_bases
    if units is None:
        transform.inverse(pair[0], rows, columns, out=pair[0], spare=pair[1])
        return None
    return units * exact.inverse(pair[0], rows, columns, pair[1]) * bucket.basis_unit


def _sent(coefficients: Coefficients) -> Tensor:
    """bool [C]: chunks to which some rank sent something that is not zero."""
    if coefficients.codes is not None:
        return (coefficients.codes != 0).any(0)
    return torch.ne(coefficients.values, 0).flatten(2).any(2).any(0)
