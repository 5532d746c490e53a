"""Ranks as threads: sums like gloo's, errors, and one copy of each result for all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ranks
from demopt.errors import ExchangeError
from demopt.exchange import Exchange
from demopt.exchange.threads import Threads


def _values(rank: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def _over_gloo(rank: int, world_size: int, count: int) -> Tensor:
    values = _values(rank, count)
    dist.all_reduce(values)
    return values


def _in_threads(exchange: Exchange, count: int) -> Tensor:
    values = _values(exchange.rank, count)
    exchange.all_reduce(values)
    return values


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 7, 4097, 600_001])
def test_thread_all_reduce_sums_in_the_order_of_gloo(world_size: int, count: int) -> None:
    wanted = ranks.run(_over_gloo, world_size, count)[0]
    assert all(torch.equal(values, wanted) for values in ranks.threads(_in_threads, world_size, count))


def test_threads_run_raises_first_error_and_can_run_again() -> None:
    def fail(exchange: Exchange) -> Tensor:
        if exchange.rank == 1:
            raise ValueError("rank 1 is broken")
        return exchange.all_gather(torch.zeros(1, dtype=torch.uint8))

    threads = Threads(3)
    for _ in range(2):
        with pytest.raises(ValueError, match="rank 1 is broken"):
            threads.run(fail)
        assert threads.run(lambda exchange: exchange.world_size) == [3, 3, 3]
        assert len(threads.run(lambda exchange: exchange.all_gather(torch.zeros(1, dtype=torch.uint8)))) == 3
    threads.close()


def test_thread_all_reduce_refuses_unlike_shapes() -> None:
    def uneven(exchange: Exchange) -> None:
        exchange.all_reduce(torch.zeros(3 + exchange.rank))

    assert all(isinstance(outcome.error, ExchangeError) for outcome in ranks.thread_outcomes(uneven, 2))


def test_thread_all_gather_shares_one_copy() -> None:
    threads = Threads(16)
    gathered = threads.run(lambda exchange: exchange.all_gather(torch.zeros(5, dtype=torch.uint8)).data_ptr())
    threads.close()
    assert len(set(gathered)) == 1
