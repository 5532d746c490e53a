"""bfloat16 parameters: changes below their resolution are kept on average, and all ranks keep the same bits."""

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import problems
from demopt import DeMo
from demopt.core.rounding import to_bfloat16
from demopt.exchange import SingleRank


@pytest.mark.parametrize(
    "settings",
    [{}, {"kernels": "torch"}, {"update": "sgd", "values": "float32"}, {"update": "muon"}],
    ids=str,
)
def test_weight_decay_below_the_resolution_of_bfloat16_is_kept_on_average(settings: dict[str, Any]) -> None:
    """Of 400 steps of weight decay alone, 1e-4 each: a tenth of the smallest change that rounding keeps."""
    parameter = Parameter(torch.ones(64, 80, dtype=torch.bfloat16))
    optimizer = DeMo([parameter], lr=1e-3, weight_decay=0.1, process_group=SingleRank(), chunk=16, **settings)
    for _ in range(400):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    weights = parameter.detach().float()  # to the nearest, they would stay 1
    assert abs(float(weights.mean()) - math.exp(-0.04)) < 1e-3
    assert float(weights.std()) < 0.02


def test_to_bfloat16_takes_a_neighbour_and_keeps_what_bfloat16_holds() -> None:
    values = torch.cat([problems.draw((70_000,), 3), torch.tensor([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan])])
    rounded = values.clone()
    to_bfloat16(rounded.view(1, -1), 1, [(0, 1, 2, 0)])
    assert torch.equal(rounded[:-1], rounded[:-1].bfloat16().float())
    assert bool(rounded[-1].isnan())
    assert torch.equal(rounded[-6:-1], values[-6:-1])
    assert bool(((rounded - values)[:-3].abs() < 2.0**-7 * values[:-3].abs() + 1e-30).all())
    again = rounded.clone()
    to_bfloat16(again.view(1, -1), 3, [(0, 1, 4, 0)])
    assert torch.equal(again[:-1], rounded[:-1])
