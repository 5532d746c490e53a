"""A rank whose layout changes says so in a message of the old length, so that all compare settings (decision 9)."""

import pytest

import problems
import ranks
from demopt import DeMo, SettingsError
from demopt.exchange import Exchange


def _rank_1_freezes_a_parameter(exchange: Exchange, route: str) -> str:
    optimizer = DeMo(problems.parameters([(9, 8), (5,)]), **problems.SMALL, route=route, process_group=exchange)
    parameters = problems.all_parameters(optimizer)
    problems.set_gradients(parameters, 0, exchange.rank)
    optimizer.step()
    parameters[0].requires_grad_(exchange.rank != 1)
    problems.set_gradients(parameters, 1, exchange.rank)
    with pytest.raises(SettingsError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("route", ["gather", "owner", "relay"])
def test_a_layout_that_one_rank_alone_changes_is_named_by_all(route: str) -> None:
    for said in ranks.threads(_rank_1_freezes_a_parameter, 3, route):
        assert said.startswith("rank 1 has param_groups[0]['params'][0] = float32 [9, 8], frozen where rank 0 has"), (
            said
        )
