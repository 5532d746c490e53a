"""Replicas are equal bit for bit however parameters are grouped."""

import pytest
from torch import Tensor

import problems
import ranks
from demopt import DeMo
from demopt.exchange import Exchange


def _grouped(exchange: Exchange, cut: list[list[int]]) -> list[Tensor]:
    """Parameters and momenta, in the order of `problems.FEW`; `cut` lists the parameters of each group."""
    parameters = problems.parameters(problems.FEW)
    groups = [{"params": [parameters[number] for number in numbers]} for numbers in cut]
    optimizer = DeMo(groups, **problems.SMALL, weight_decay=0.1, process_group=exchange)
    for step in range(3):
        problems.set_gradients(parameters, step, exchange.rank)
        optimizer.step()
    return [p.detach() for p in parameters] + [optimizer.state[p]["momentum"] for p in parameters]


@pytest.mark.parametrize("cut", [[[0], [1], [2], [3]], [[3, 2, 1, 0]], [[1], [3, 0], [2]]], ids=str)
def test_cut_and_order_of_parameter_groups_do_not_matter(cut: list[list[int]]) -> None:
    whole, parts = ranks.threads(_grouped, 2, [[0, 1, 2, 3]]), ranks.threads(_grouped, 2, cut)
    assert all(problems.same(one, other) for one, other in zip(whole, parts, strict=True))
