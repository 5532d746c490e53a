"""Ranks as threads: errors, and one copy of each result for all ranks."""

import pytest
import torch
from torch import Tensor

from demopt.exchange import Exchange
from demopt.exchange.threads import Threads


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


def test_thread_all_gather_shares_one_copy() -> None:
    threads = Threads(16)
    gathered = threads.run(lambda exchange: exchange.all_gather(torch.zeros(5, dtype=torch.uint8)).data_ptr())
    threads.close()
    assert len(set(gathered)) == 1
