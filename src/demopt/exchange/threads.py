"""Ranks as threads of one process, for tests and simulation: no ports, no processes.

Ranks share received messages, which are read-only, so that W ranks hold W messages, not W x W.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from demopt.errors import ExchangeError
from demopt.exchange.interface import Exchange
from demopt.kernels.step import room_for_kernels
from demopt.validation import check_count

T = TypeVar("T")


class Threads:
    """W ranks in one process: each brings a tensor, one thread combines them, all get the result.

    A wait raises ExchangeError after `timeout` seconds; None waits as long as it takes.

    Examples:
        >>> threads = Threads(2)
        >>> threads.run(lambda exchange: exchange.all_gather(torch.tensor([exchange.rank], dtype=torch.uint8)).tolist())
        [[[0], [1]], [[0], [1]]]
        >>> threads.close()
    """

    def __init__(self, world_size: int, timeout: float | None = None) -> None:
        world_size = check_count("world_size", world_size, high=65535)
        self.exchanges: list[Exchange] = [_Thread(rank, world_size, self) for rank in range(world_size)]
        self._timeout = timeout
        self._brought: list[Tensor | None] = [None] * world_size
        self._make: Callable[[list[Tensor]], Tensor] = torch.stack
        self._made: Tensor | Exception = torch.empty(0, device="cpu")
        self._barrier = threading.Barrier(world_size, action=self._combine)
        self._pool = ThreadPoolExecutor(world_size, thread_name_prefix="demopt-rank")  # its threads start in `run`
        self._starting = threading.RLock()  # `close` comes before all threads of a `run` have begun, or after
        self._closed = False
        self._errors: list[BaseException] = []
        self._aborted = False  # waits end because a rank or the caller gave up, not at the timeout
        self._twins: list[Threads] = []  # that `duplicate` made; not all ranks may have the last one yet

    def run(self, work: Callable[[Exchange], T]) -> list[T]:
        """Runs `work` on every rank, each in its thread; raises the first error after all threads have finished."""
        try:
            with self._starting, room_for_kernels():
                if self._closed:
                    raise ExchangeError("these threads are closed; make new ones")
                futures = [self._pool.submit(self._guarded, work, exchange) for exchange in self.exchanges]
        except BaseException:  # an interrupt: those that have begun would wait for those that have not
            self._abort()
            raise
        for future in futures:
            future.exception()  # waits
        if self._errors:
            first = self._errors[0]
            self._errors.clear()
            for each in (self, *self._twins):
                each._brought = [None] * len(each._brought)
                each._barrier.reset()
                each._aborted = False
            raise first
        return [future.result() for future in futures]

    def combine(self, rank: int, tensor: Tensor, make: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Returns `make(tensors of all ranks)`: one tensor for all ranks."""
        self._brought[rank], self._make = tensor, make
        try:
            self._barrier.wait(self._timeout)
        except threading.BrokenBarrierError:
            missing = [str(rank) for rank, brought in enumerate(self._brought) if brought is None]
            if self._aborted or not missing:
                raise ExchangeError("another rank gave up") from None
            raise ExchangeError(f"no message from rank {', '.join(missing)} within {self._timeout:g} s") from None
        made = self._made
        if isinstance(made, Exception):
            raise ExchangeError(str(made)) from made
        return made

    def duplicate(self, rank: int) -> "Threads":
        """Returns the same ranks, separate from other traffic: else two rounds of a rank would meet in one barrier."""

        def make(brought: list[Tensor]) -> Tensor:
            self._twins.append(Threads(len(brought), self._timeout))
            return brought[0]

        self.combine(rank, torch.empty(0, device="cpu"), make)
        return self._twins[-1]  # all ranks have it before the next one is made: that waits for all

    def close(self) -> None:
        """Stops the threads; whoever waits in a round gives up."""
        with self._starting:
            self._closed = True
            self._abort()
        self._pool.shutdown()

    def _abort(self) -> None:
        for each in (self, *self._twins):
            each._aborted = True
            each._barrier.abort()

    def _combine(self) -> None:
        """Runs in one thread, after all have arrived and before any continues."""
        brought = [tensor for tensor in self._brought if tensor is not None]
        self._brought = [None] * len(brought)
        try:
            if len({tensor.shape for tensor in brought}) > 1:
                raise ExchangeError(f"ranks sent messages of different lengths: {[t.nbytes for t in brought]} bytes")
            self._made = self._make(brought)
        except Exception as error:  # for every rank to raise
            self._made = error

    def _guarded(self, work: Callable[[Exchange], T], exchange: Exchange) -> T:
        try:
            return work(exchange)
        except BaseException as error:
            self._errors.append(error)
            self._abort()  # otherwise the others would wait for this rank
            raise


class _Thread(Exchange):
    def __init__(self, rank: int, world_size: int, threads: Threads) -> None:
        self.rank, self.world_size, self._threads = rank, world_size, threads

    def all_gather(self, message_B: Tensor) -> Tensor:
        return self._threads.combine(self.rank, message_B, torch.stack)

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        return self._threads.combine(self.rank, parts_WB, lambda by_rank: torch.stack(by_rank, dim=1))[self.rank]

    def broadcast(self, data_B: Tensor, src: int) -> None:
        data_B.copy_(self._threads.combine(self.rank, data_B, lambda by_rank: by_rank[src].clone()))

    def duplicate(self) -> Exchange:
        return self._threads.duplicate(self.rank).exchanges[self.rank]
