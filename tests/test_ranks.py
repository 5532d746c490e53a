"""The harness itself: it must report what fails, and outlive it."""

import os
import threading

import pytest
import torch
import torch.distributed as dist

import ranks


def _sum(rank: int, world_size: int, last: str) -> int:
    """The sum of the ranks; the last one may fail, die or hang before."""
    if rank == world_size - 1:
        if last == "fails":
            raise ValueError(f"rank {rank} fails")
        if last == "dies":
            os._exit(3)
        if last == "hangs":
            threading.Event().wait()
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return int(total)


def test_ranks_run_survives_a_failing_rank_and_raises_its_error() -> None:
    found = ranks.outcomes(_sum, 3, "fails")
    assert isinstance(found[2].error, ValueError)
    assert found[0].error is not None
    assert found[0].at - found[2].at < ranks.GLOO_SECONDS, "told by the connection, not by a timeout"
    with pytest.raises((ValueError, RuntimeError)) as caught:
        ranks.run(_sum, 3, "fails")
    assert "rank 2 fails" in str(caught.value.__cause__)
    assert ranks.run(_sum, 3, "") == [3, 3, 3]


def test_ranks_pool_names_and_replaces_dead_and_hung_ranks() -> None:
    assert isinstance(ranks.outcomes(_sum, 2, "dies")[1].error, ranks.RankDiedError)
    assert "rank 1 did not answer" in str(ranks.outcomes(_sum, 2, "hangs", seconds=4.0)[1].error)
    assert ranks.run(_sum, 2, "") == [1, 1]
