"""Ranks as threads of one process that share received tensors, so that W ranks hold W messages, not W x W.

Shapes: W ranks, B bytes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from demopt.errors import ExchangeError
from demopt.exchange import Exchange

T = TypeVar("T")
RING_SEGMENT = 1 << 20  # bytes, the largest bucket of gloo's ring


class Room:
    """Exchange between `world_size` threads: all bring a tensor, one thread combines them, all get the result.

    Example:
        >>> room = Room(2)
        >>> room.run(lambda exchange: exchange.all_gather(torch.tensor([exchange.rank], dtype=torch.uint8)).tolist())
        [[[0], [1]], [[0], [1]]]
    """

    def __init__(self, world_size: int) -> None:
        self.exchanges: list[Exchange] = [_Member(rank, world_size, self) for rank in range(world_size)]
        self._brought: list[Tensor] = [torch.empty(0)] * world_size
        self._made: Tensor = torch.empty(0)
        self._make: Callable[[list[Tensor]], Tensor] = torch.stack
        self._barrier = threading.Barrier(world_size, action=self._act)
        self._pool = ThreadPoolExecutor(world_size, thread_name_prefix="demopt-rank")

    def run(self, work: Callable[[Exchange], T]) -> list[T]:
        """Run `work` on every rank, each in its thread; raise the first error after all threads have finished."""
        futures = [self._pool.submit(self._guarded, work, exchange) for exchange in self.exchanges]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            self._barrier.reset()
            raise next((error for error in errors if not isinstance(error, _EchoError)), errors[0])
        return [future.result() for future in futures]

    def meet(self, rank: int, tensor: Tensor, make: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Return `make(tensors of all ranks)`: one tensor shared by all ranks, not to be written to."""
        self._brought[rank], self._make = tensor, make
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise _EchoError("another rank gave up") from None
        return self._made

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()

    def _act(self) -> None:
        """Combine the tensors: in one thread, after all have arrived and before any continues."""
        self._made = self._make(self._brought)

    def _guarded(self, work: Callable[[Exchange], T], exchange: Exchange) -> T:
        try:
            return work(exchange)
        except BaseException:
            self._barrier.abort()  # otherwise the others would wait forever
            raise


class _EchoError(ExchangeError):
    """This rank failed only because another one did."""


class _Member(Exchange):
    def __init__(self, rank: int, world_size: int, room: Room) -> None:
        self.rank, self.world_size, self._room = rank, world_size, room

    def all_gather(self, message_B: Tensor) -> Tensor:
        return self._room.meet(self.rank, message_B, torch.stack)

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        return self._room.meet(self.rank, parts_WB, lambda all_parts: torch.stack(all_parts, dim=1))[self.rank]

    def all_reduce(self, values: Tensor) -> None:
        values.copy_(self._room.meet(self.rank, values.clone(), ring_sum))

    def broadcast(self, data_B: Tensor, src: int) -> None:
        data_B.copy_(self._room.meet(self.rank, data_B.clone(), lambda all_data: all_data[src]))


def ring_sum(values: list[Tensor]) -> Tensor:
    """Sum in the order in which gloo's ring adds, because a float32 sum depends on the order.

    The ring cuts the values into W blocks; block b starts at rank b - 1 and passes to the next lower rank each hop.

    Example:
        >>> ring_sum([torch.tensor([1.0, 10.0]), torch.tensor([2.0, 20.0])])
        tensor([ 3., 30.])
    """
    world_size, count = len(values), values[0].numel()
    flat = [value.reshape(-1) for value in values]
    total = torch.empty_like(flat[0])
    block = ring_block(count, flat[0].element_size(), world_size)
    for number in range(world_size):
        part = slice(min(number * block, count), min((number + 1) * block, count))
        order = [(number - 1 - hop) % world_size for hop in range(world_size)]
        run = flat[order[0]][part].clone()
        for rank in order[1:]:
            run += flat[rank][part]
        total[part] = run
    return total.view_as(values[0])


def ring_block(count: int, element_bytes: int, world_size: int) -> int:
    """Return the elements in a rank's block of gloo's ring: at least two buckets per rank, each at most 1 MiB.

    Example:
        >>> ring_block(count=9, element_bytes=4, world_size=2)
        6
    """
    size = count * element_bytes
    buckets = math.ceil(max(math.ceil(size / RING_SEGMENT), 2 * world_size) / world_size) * world_size
    bucket_bytes = math.ceil(size / buckets)
    return buckets // world_size * math.ceil(bucket_bytes / element_bytes)
