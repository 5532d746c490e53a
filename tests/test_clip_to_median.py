"""clip_to_median: a rank that sends a million times too much moves nothing further than an honest one does.

The bound, for update "sgd", reduction "mean" and a chunk c: |U_c| = |Q_c| <= the mean over ranks of their clipped norms
<= the median of the ranks' norms, up to the rounding of a clipped scale to 4 bits of mantissa and that of exact sums.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import problems
from demopt.wire.quantizers import QUANTIZERS

WORLD, SCALE = 8, 1e6
SHAPES = [(48, 32), (40,)]
ROUNDING = 1.05  # a code of a scale has 4 bits of mantissa: half a unit is 1/32


def _moved(codec: dict[str, Any], clip: bool, scales: Sequence[float]) -> Tensor:
    """How far each chunk of 16 x 16 (8 columns of vectors) is moved by one step of ranks with gradients so scaled."""
    settings = {"lr": 1.0, "momentum_decay": 0.0, "update": "sgd", "reduction": "mean", "clip_to_median": clip}
    optimizers, messages = [], []
    for rank, scale in enumerate(scales):
        exchange = problems.OneOf(rank, len(scales))
        optimizers.append(problems.demo(exchange, SHAPES, **settings, **codec))
        problems.set_gradients(problems.all_parameters(optimizers[-1]), 0, rank)
        for parameter in problems.all_parameters(optimizers[-1]):
            parameter.grad *= scale
        messages.append(optimizers[-1].extract())
    optimizers[0].apply(torch.stack(messages))
    matrix, vector = (
        (now.detach() - begun.detach()).double()
        for now, begun in zip(problems.all_parameters(optimizers[0]), problems.parameters(SHAPES), strict=True)
    )
    return torch.cat((matrix.unfold(0, 16, 16).unfold(1, 16, 16).flatten(2).norm(dim=2).flatten(), vector.norm()[None]))


@pytest.mark.parametrize("hostile", [1, 4])
@pytest.mark.parametrize("codec", [*({"values": values} for values in QUANTIZERS), {"top_k": 256}], ids=str)
def test_clip_to_median_bounds_hostile_ranks_by_honest_norms_and_keeps_most_of_honest_updates(
    codec: dict[str, Any], hostile: int
) -> None:
    """Half of the ranks may be hostile, as the lower of two medians counts."""
    honest = WORLD - hostile
    alone = [_moved(codec, False, [WORLD * (each == rank) for each in range(WORLD)]) for rank in range(honest)]
    strongest = torch.stack(alone).amax(0)  # as far as an honest rank would move each chunk, were all to send the same
    attacked = [1.0] * honest + [SCALE] * hostile
    assert bool((_moved(codec, True, attacked) <= ROUNDING * strongest).all())
    assert bool((_moved(codec, False, attacked) > 1000 * strongest).all()), "or the line before could not fail"
    plain, clipped = (_moved(codec, clip, [1.0] * WORLD) for clip in (False, True))
    assert bool((clipped > 0.7 * plain).all())
    assert bool((clipped <= 1.1 * plain).all())
    assert torch.equal(_moved(codec, True, [1.0]), _moved(codec, False, [1.0]))
