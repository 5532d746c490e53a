"""OptimizerState(in_flight=True): a round that travels when a checkpoint is written."""

import copy
from typing import Any

import carriers
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import demopt
import problems
import ranks
from demopt.checkpoint import LoadPlanner, OptimizerState


def _save(rank: int, world_size: int, folder: str) -> tuple[Any, Any]:
    """Saves with a round in flight; returns the state without it, and how the optimizer goes on."""
    optimizer = carriers.build("LocalDeMo", delay=1)
    carriers.advance(optimizer, range(5), rank)
    assert optimizer.replicator.in_flight
    with optimizer.shared():
        state = copy.deepcopy(carriers.saved(optimizer))  # the steps to come change it
        model = {str(n): p.detach().clone() for n, p in enumerate(problems.all_parameters(optimizer))}
        dcp.save({"model": model, "optimizer": OptimizerState(optimizer, in_flight=True)}, checkpoint_id=folder)
    return state, carriers.end(optimizer, rank)


def _load(rank: int, world_size: int, folder: str) -> tuple[Any, Any, bool]:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in carriers.SHAPES]
    optimizer = carriers.build("LocalDeMo", parameters=parameters, delay=1)
    model = {str(n): p.data for n, p in enumerate(parameters)}
    target = {"model": model, "optimizer": OptimizerState(optimizer, in_flight=True)}
    problems.warned(lambda: dcp.load(target, checkpoint_id=folder, planner=LoadPlanner()))
    in_flight = optimizer.replicator.in_flight
    state = copy.deepcopy(carriers.saved(optimizer))
    return state, carriers.end(optimizer, rank), in_flight


def test_dcp_goes_on_with_a_round_in_flight_bit_for_bit(tmp_path: Any) -> None:
    before, after = (ranks.run(work, 2, str(tmp_path / "checkpoint")) for work in (_save, _load))
    for (_, expected), (_, resumed, in_flight) in zip(before, after, strict=True):
        assert in_flight
        assert problems.same(expected[0], resumed[0])
        assert expected[1] == resumed[1]


@pytest.mark.parametrize("now", [1, 3])
def test_dcp_among_other_ranks_leaves_a_round_in_flight_in_the_errors(now: int, tmp_path: Any) -> None:
    states = [state for state, _ in ranks.run(_save, 2, str(tmp_path / "checkpoint"))]
    expected = demopt.reshard(states, now)
    for rank, (state, _, in_flight) in enumerate(ranks.run(_load, now, str(tmp_path / "checkpoint"))):
        assert not in_flight
        carriers.assert_resharded(state, expected[rank])


def test_optimizer_state_in_flight_is_for_local_demo() -> None:
    with pytest.raises(TypeError, match="in_flight=True is for LocalDeMo"):
        OptimizerState(carriers.build("DeMo"), in_flight=True)
