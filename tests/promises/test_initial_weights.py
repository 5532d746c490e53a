"""Different initial weights are broadcast from rank 0, with a warning."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import problems
import ranks
from demopt.exchange import Exchange

Differ = Callable[[list[Tensor]], object]
#: By the ranks that the warning names: the rank whose weights differ, and how.
CASES: dict[str, tuple[str, int, Differ]] = {
    "a frozen parameter": ("rank 1", 1, lambda p: p[2].add_(1.0)),
    "one bit": ("rank 1", 1, lambda p: p[0].view(torch.int16)[3, 3].bitwise_xor_(1)),
    "minus zero": ("rank 2", 2, lambda p: p[0].view(-1)[:1].copysign_(-torch.ones(1))),
    "rank 0 alone": ("rank 1, 2", 0, lambda p: p[0].mul_(2.0)),
}


def _train(rank: int, world_size: int, kind: str, case: str) -> tuple[Any, ...]:
    """The weights at the start, the warnings of a first step at lr 0, and what that and two more steps left."""
    parameters = problems.parameters([*problems.FEW, (0,)], torch.bfloat16)
    parameters[2].requires_grad_(False)
    parameters[0].data.view(-1)[0] = 0.0
    parameters[1] = Parameter(parameters[1].detach().t().contiguous().t())  # not contiguous
    _, odd, differ = CASES[case]
    if rank == odd:
        differ([parameter.data for parameter in parameters])
    optimizer = problems.optimizer_of(kind, parameters, **({} if kind == "DeMo" else {"sync_every": 1}))
    optimizer.param_groups[0]["lr"] = 0.0
    start, found = problems.values(optimizer), []
    warned = problems.warned(lambda: found.append(problems.train(optimizer, range(1), rank)))
    optimizer.param_groups[0]["lr"] = 0.1
    return start, warned, found[0], problems.train(optimizer, range(1, 3), rank)


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
@pytest.mark.parametrize("case", CASES)
def test_initial_weights_come_from_rank_0_with_a_warning(case, kind):
    (start, told, *histories), *others = ranks.run(_train, 3, kind, case)
    assert f"of {CASES[case][0]} differ from rank 0's" in told[0]
    assert len(told) == 1
    assert all(warned == [] for _, warned, *_ in others), "once, not once per rank"
    for number, history in enumerate(histories):
        problems.assert_replicas([history, *(of_rank[number] for _, _, *of_rank in others)])
    assert problems.same(histories[0].parameters, start)


@pytest.mark.filterwarnings("ignore:initial parameters")
def test_added_parameters_with_other_values_become_those_of_rank_0():
    def added(exchange: Exchange) -> list[int]:
        optimizer = problems.demo(exchange)
        problems.train(optimizer, range(1), exchange.rank)
        optimizer.add_param_group({"params": [Parameter(torch.full((3,), float(exchange.rank)))]})
        return problems.train(optimizer, range(1, 3), exchange.rank).fingerprints

    first, second = ranks.threads(added, 2)
    assert first == second
