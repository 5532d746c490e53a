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
from demopt.wire.coefficients import Coefficients, SignBits
from demopt.wire.quantizers import VALUES, scale_code

WORLD, HOSTILE, SCALE = 8, 7, 1e6
SHAPES = [(48, 32), (40,)]
ROUNDING = 1.05  # a code of a scale has 4 bits of mantissa: half a unit is 1/32


def _moved(values: str, clip: bool, scales: Sequence[float]) -> Tensor:
    """How far each chunk of 16 x 16 (8 columns of vectors) is moved by one step of ranks with gradients so scaled."""
    settings = {"lr": 1.0, "momentum_decay": 0.0, "update": "sgd", "reduction": "mean", "clip_to_median": clip}
    optimizers, messages = [], []
    for rank, scale in enumerate(scales):
        exchange = problems.OneOf(rank, len(scales))
        optimizers.append(problems.demo(exchange, SHAPES, **settings, values=values, route="gather"))
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


HONEST, ATTACKED = [1.0] * WORLD, [SCALE if rank == HOSTILE else 1.0 for rank in range(WORLD)]


@pytest.mark.parametrize("values", VALUES)
def test_clip_to_median_bounds_a_hostile_rank_by_honest_norms_and_keeps_most_of_honest_updates(values: str) -> None:
    alone = [_moved(values, False, [WORLD * (each == rank) for each in range(WORLD)]) for rank in range(WORLD - 1)]
    strongest = torch.stack(alone).amax(0)  # as far as an honest rank would move each chunk, were all to send the same
    assert bool((_moved(values, True, ATTACKED) <= ROUNDING * strongest).all())
    assert bool((_moved(values, False, ATTACKED) > 1000 * strongest).all()), "or the line before could not fail"
    plain, clipped = (_moved(values, clip, HONEST) for clip in (False, True))
    assert bool((clipped > 0.7 * plain).all())
    assert bool((clipped <= 1.1 * plain).all())


@pytest.mark.parametrize(("world", "hostile"), [(8, 1), (8, 2), (8, 3), (7, 3), (1, 0)])
@pytest.mark.parametrize("kind", ["floats", "levels", "signs of all"])
def test_clipped_to_median_bounds_any_minority(world: int, hostile: int, kind: str) -> None:
    """Chunk by chunk, whatever the minority sends: 3 of 8 too, as the lower of two medians counts."""
    generator = torch.Generator().manual_seed(hostile)
    positions = torch.arange(5).expand(world, 20, 5)
    scales = torch.ones(world, 1)
    scales[:hostile] = SCALE
    scales = scales.repeat(1, 20)
    scales[:, 0] = 0  # a chunk of which no rank has anything
    codes = scale_code((torch.rand(world, 20, generator=generator) + 0.5) * scales)
    if kind == "floats":
        sent: Any = Coefficients(positions, torch.randn(world, 20, 5, generator=generator) * scales.unsqueeze(2))
    elif kind == "levels":
        levels = torch.randint(0, 2, (world, 20, 5), generator=generator) * 2 - 1
        sent = Coefficients(positions, levels, codes)
    else:
        sent = SignBits(torch.randint(0, 32, (world, 20, 1), generator=generator).to(torch.uint8), codes, length=5)
    before, after = sent.values.double().norm(dim=2), sent.clipped_to_median().values.double().norm(dim=2)
    median = before.sort(dim=0).values[(world - 1) // 2]
    assert bool((after <= ROUNDING * median).all())
    assert bool((after >= before.minimum(median) / ROUNDING).all())
    below = before <= median
    assert torch.equal(after[below], before[below])
