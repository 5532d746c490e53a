"""Different initial weights are broadcast from rank 0, with a warning."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import problems
import ranks
from demopt import DeMo
from demopt.exchange import Exchange

#: Whose weights differ from rank 0's, and the ranks that the warning names.
CASES = {
    "a frozen parameter": "rank 1",
    "one bit": "rank 1",
    "minus zero": "rank 2",
    "rank 0 alone": "rank 1, 2",
}


def _perturb(case: str, rank: int, parameters: list[Parameter]) -> None:
    with torch.no_grad():
        if (case, rank) == ("a frozen parameter", 1):
            parameters[2].add_(1.0)
        elif (case, rank) == ("one bit", 1):
            parameters[0].data.view(torch.int16)[3, 3] ^= 1
        elif (case, rank) == ("minus zero", 2):
            parameters[0].view(-1)[0] = -0.0
        elif (case, rank) == ("rank 0 alone", 0):
            parameters[0].mul_(2.0)


def _train(rank: int, world_size: int, case: str) -> dict[str, Any]:
    shapes = [*problems.FEW, (0,)]
    parameters = problems.parameters(shapes, torch.bfloat16)
    parameters[2].requires_grad_(False)
    with torch.no_grad():
        parameters[0].view(-1)[0] = 0.0
    parameters[1] = Parameter(parameters[1].detach().t().contiguous().t())  # not contiguous
    _perturb(case, rank, parameters)
    start = [p.detach().clone() for p in parameters]
    optimizer = DeMo(parameters, **{**problems.SMALL, "lr": 0.0})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after_first = problems.train(optimizer, range(1), rank)
    optimizer.param_groups[0]["lr"] = 0.1
    history = problems.train(optimizer, range(1, 3), rank)
    history = problems.History(after_first.fingerprints + history.fingerprints, history.parameters, history.momenta)
    return {
        "start": start,
        "after first": after_first.parameters,
        "warned": [str(warning.message) for warning in caught if warning.category is UserWarning],
        "at": {Path(warning.filename).name for warning in caught if warning.category is UserWarning},
        "history": history,
    }


@pytest.mark.parametrize("case", CASES)
def test_initial_weights_come_from_rank_0_with_a_warning(case: str) -> None:
    results = ranks.run(_train, 3, case)
    problems.assert_replicas([seen["history"] for seen in results])
    for rank, seen in enumerate(results):
        assert problems.same(seen["after first"], results[0]["start"]), "those of rank 0, as lr was 0"
        assert len(seen["warned"]) == (rank == 0), "once, not once per rank"
    assert results[0]["at"] == {"problems.py"}  # which calls step
    assert CASES[case] in results[0]["warned"][0]
    assert "rank 0" in results[0]["warned"][0]


@pytest.mark.filterwarnings("ignore:initial parameters")
def test_added_parameters_with_other_values_become_those_of_rank_0() -> None:
    def added(exchange: Exchange) -> list[int]:
        optimizer = problems.demo(exchange)
        problems.train(optimizer, range(1), exchange.rank)
        optimizer.add_param_group({"params": [Parameter(torch.full((3,), float(exchange.rank)))]})
        return problems.train(optimizer, range(1, 3), exchange.rank).fingerprints

    first, second = ranks.threads(added, 2)
    assert first == second
