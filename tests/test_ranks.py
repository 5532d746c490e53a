"""The harness itself: it must report what fails, and outlive it."""

import os
import threading

import pytest
import torch
import torch.distributed as dist

import ranks


def _sum(rank: int, world_size: int, extra: int) -> int:
    total = torch.tensor([rank + extra])
    dist.all_reduce(total)
    return int(total)


def _fail_on_last(rank: int, world_size: int) -> int:
    if rank == world_size - 1:
        raise ValueError(f"rank {rank} fails")
    return _sum(rank, world_size, 0)


def _die_on_first(rank: int, world_size: int) -> int:
    if rank == 0:
        os._exit(3)
    return _sum(rank, world_size, 0)


def _hang_on_last(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        threading.Event().wait()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_run_returns_every_answer(world_size: int) -> None:
    assert ranks.run(_sum, world_size, 10) == [sum(range(world_size)) + 10 * world_size] * world_size


def test_ranks_run_survives_a_failing_rank() -> None:
    found = ranks.outcomes(_fail_on_last, 3)
    assert isinstance(found[2].error, ValueError)
    assert found[0].error is not None
    assert found[0].at - found[2].at < ranks.GLOO_SECONDS, "told by the connection, not by a timeout"
    with pytest.raises((ValueError, RuntimeError)) as caught:
        ranks.run(_fail_on_last, 3)
    assert "rank 2 fails" in str(caught.value.__cause__)
    assert ranks.run(_sum, 3, 0) == [3, 3, 3]


def test_ranks_pool_names_and_replaces_dead_and_hung_ranks() -> None:
    assert isinstance(ranks.outcomes(_die_on_first, 2)[0].error, ranks.RankDiedError)
    hung = ranks.outcomes(_hang_on_last, 2, seconds=4.0)
    assert "rank 1 did not answer" in str(hung[1].error)
    assert ranks.run(_sum, 2, 0) == [1, 1]


def test_ranks_threads_returns_by_rank_and_raises() -> None:
    assert ranks.threads(lambda exchange: exchange.rank, 3) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        ranks.threads(lambda exchange: 1 // exchange.rank, 2)
