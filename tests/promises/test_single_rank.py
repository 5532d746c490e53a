"""World size 1 without a process group runs the same algorithm."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import problems
import ranks
from demopt.exchange import SingleRank


def _train(rank: int, world_size: int, settings: dict[str, Any], exchange: Any = None) -> problems.History:
    return problems.train(problems.demo(exchange, dtype=torch.float64, **settings), range(4))


@pytest.mark.parametrize("settings", [{}, {"values": "float32", "reduction": "mean", "update": "sgd"}], ids=str)
def test_demo_without_group_equals_group_of_one(settings):
    assert not dist.is_initialized()
    without = _train(0, 1, settings)
    assert problems.same_history(without, ranks.run(_train, 1, settings)[0])
    assert problems.same_history(without, _train(0, 1, settings, SingleRank()))


def test_demo_warns_a_launched_rank_without_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    problems.train(problems.demo(), range(1))  # rank 0 warns
    monkeypatch.setenv("RANK", "0")
    optimizer = problems.demo()
    problems.set_gradients(problems.all_parameters(optimizer), 0)
    with pytest.warns(UserWarning, match="init_process_group") as seen:
        optimizer.step()
    assert seen[0].filename == __file__  # the caller's line, not one of demopt's or torch's
    optimizer.step()  # once
    monkeypatch.setenv("WORLD_SIZE", "1")
    problems.train(problems.demo(), range(1))


@pytest.mark.parametrize("steps_before", [0, 1])
def test_group_made_after_the_optimizer_is_used_and_after_steps_takes_weights_of_rank_0(steps_before):
    histories = ranks.run(_group_made_late, 2, steps_before)
    problems.assert_replicas(histories)
    assert not problems.same(histories[0].momenta, histories[1].momenta)


def _group_made_late(rank: int, world_size: int, steps_before: int) -> problems.History:
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    optimizer = problems.demo()
    problems.train(optimizer, range(steps_before), rank)  # alone: the ranks diverge
    dist.init_process_group("gloo", store=dist.PrefixStore("late", store), rank=rank, world_size=world_size)
    differ = steps_before > 0 and rank == 0
    told = pytest.warns(UserWarning, match="parameters .* of rank 1 differ") if differ else nullcontext()
    with told:
        return problems.train(optimizer, range(1, 4), rank)
