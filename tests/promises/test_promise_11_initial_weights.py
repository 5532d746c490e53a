"""Promise 11: different initial weights are broadcast from rank 0, or refused.

Forbidden: replicas that start apart and stay apart, because only updates are exchanged.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import problems
import ranks
from demopt import DeMo

CASES = ["all of rank 1", "one element of rank 2", "a frozen parameter", "one bit", "minus zero", "rank 0 alone"]
DTYPES = [torch.float32, torch.bfloat16]


def _perturb(case: str, rank: int, parameters: list[Parameter]) -> None:
    with torch.no_grad():
        if (case, rank) == ("all of rank 1", 1):
            for parameter in parameters:
                parameter.add_(1.0)
        elif (case, rank) == ("one element of rank 2", 2):
            parameters[1][0, 0] += 1.0
        elif (case, rank) == ("a frozen parameter", 1):
            parameters[2].add_(1.0)
        elif (case, rank) == ("one bit", 1):
            parameters[0].data.view(torch.int16)[3, 3] ^= 1
        elif (case, rank) == ("minus zero", 2):
            parameters[0].view(-1)[0] = -0.0
        elif (case, rank) == ("rank 0 alone", 0):
            parameters[0].mul_(2.0)


def _train(rank: int, world_size: int, case: str, dtype: torch.dtype) -> dict[str, Any]:
    parameters = problems.parameters([*problems.FEW, (0,)], dtype)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_initial_weights_come_from_rank_0_with_a_warning(case: str, dtype: torch.dtype) -> None:
    results = ranks.run(_train, 3, case, dtype)
    problems.assert_replicas([seen["history"] for seen in results])
    guilty = {"one element of rank 2": "rank 2", "minus zero": "rank 2", "rank 0 alone": "rank 1, 2"}.get(
        case, "rank 1"
    )
    for rank, seen in enumerate(results):
        assert problems.same(seen["after first"], results[0]["start"]), "lr was 0: these are rank 0's own"
        assert len(seen["warned"]) == (rank == 0), "said once, not once a rank"
    assert results[0]["at"] == {"problems.py"}  # which calls step
    assert guilty in results[0]["warned"][0]
    assert "rank 0" in results[0]["warned"][0]


def _train_equal(rank: int, world_size: int) -> problems.History:
    return problems.train(DeMo(problems.parameters(problems.FEW), **problems.SMALL), range(2), rank)


def test_equal_initial_weights_cause_no_warning() -> None:
    """No warning (they are errors here) and no broadcast."""
    problems.assert_replicas(ranks.run(_train_equal, 3))


def _later_drift(rank: int, world_size: int) -> list[int]:
    """Somebody changes a weight on one rank in mid-run: `fingerprint` shows it."""
    parameters = problems.parameters(problems.FEW)
    optimizer = DeMo(parameters, **problems.SMALL)
    problems.train(optimizer, range(2), rank)
    if rank == 1:
        with torch.no_grad():
            parameters[1][2, 2] += 1e-6
    return [optimizer.fingerprint()]


def test_fingerprint_shows_one_changed_weight() -> None:
    first, second = ranks.run(_later_drift, 2)
    assert first != second
