"""World size 1 without a process group runs the same algorithm."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import problems
import ranks
from demopt import DeMo
from demopt.exchange import SingleRank

SETTINGS: list[dict[str, Any]] = [
    {},
    {"update": "sgd", "alpha": 0.2, "transform": "random"},
    {"values": "bfloat16", "reduction": "mean", "update": "sgd"},
    {"gradient_scale": "lr", "chunking": "divisor", "weight_decay": 0.1},
]


def _train(rank: int, world_size: int, settings: dict[str, Any], exchange: Any = None) -> problems.History:
    parameters = problems.parameters(problems.FEW, torch.float64)
    return problems.train(DeMo(parameters, **problems.SMALL, **settings, process_group=exchange), range(4))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_demo_without_group_equals_group_of_one(settings: dict[str, Any]) -> None:
    assert not dist.is_initialized()
    without = _train(0, 1, settings)
    with_group = ranks.run(_train, 1, settings)[0]
    assert problems.same_history(without, with_group)
    assert problems.same_history(without, _train(0, 1, settings, SingleRank()))
    assert problems.same_history(without, _train(0, 1, settings, problems.Recorder()))


def test_demo_on_one_rank_compresses() -> None:
    """All but the strongest coefficients stay in the momentum."""
    parameter = problems.parameters([(16, 16)])[0]
    optimizer = DeMo([parameter], lr=0.1, chunk=16, top_k=5, momentum_decay=0.5, update="sgd", values="float32")
    problems.train(optimizer, range(1))
    momentum = optimizer.state[parameter]["momentum"]
    assert optimizer.stats.kept == 5
    assert int((momentum == 0).sum()) == 5


def test_demo_warns_a_launched_rank_without_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    problems.train(DeMo(problems.parameters(problems.FEW), **problems.SMALL), range(1))  # rank 0 warns
    monkeypatch.setenv("RANK", "0")
    optimizer = DeMo(problems.parameters(problems.FEW), **problems.SMALL)
    problems.set_gradients(problems.all_parameters(optimizer), 0)
    with pytest.warns(UserWarning, match="init_process_group") as seen:
        optimizer.step()
    assert seen[0].filename == __file__  # the caller's line, not one of demopt's or torch's
    optimizer.step()  # once
    monkeypatch.setenv("WORLD_SIZE", "1")
    problems.train(DeMo(problems.parameters(problems.FEW), **problems.SMALL), range(1))


def _stepped_before_the_group_was_made(rank: int, world_size: int) -> list[int]:
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    optimizer = DeMo(problems.parameters(problems.FEW), **problems.SMALL)
    problems.train(optimizer, range(1), rank)  # alone: the ranks diverge
    dist.init_process_group("gloo", store=dist.PrefixStore("late", store), rank=rank, world_size=world_size)
    told = pytest.warns(UserWarning, match="parameters .* of rank 1 differ") if rank == 0 else nullcontext()
    with told:
        return problems.train(optimizer, range(1, 3), rank).fingerprints


def test_group_made_after_steps_takes_weights_of_rank_0() -> None:
    first, second = ranks.run(_stepped_before_the_group_was_made, 2)
    assert first == second


def _initialised_late(rank: int, world_size: int) -> problems.History:
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    optimizer = DeMo(problems.parameters(problems.FEW), **problems.SMALL)
    dist.init_process_group("gloo", store=dist.PrefixStore("late", store), rank=rank, world_size=world_size)
    return problems.train(optimizer, range(3), rank)


def test_group_made_after_optimizer_is_used() -> None:
    histories = ranks.run(_initialised_late, 2)
    problems.assert_replicas(histories)
    assert not problems.same(histories[0].momenta, histories[1].momenta)
