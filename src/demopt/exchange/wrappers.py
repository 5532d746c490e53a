"""Exchanges that wrap another: Meter counts bytes, Delay waits like a slow link, Faulty damages messages."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from demopt.exchange.interface import Exchange


class Wrapper(Exchange):
    """Forwards every call to `inner`.

    Examples:
        >>> from demopt.exchange import SingleRank
        >>> Wrapper(SingleRank()).world_size
        1
    """

    def __init__(self, inner: Exchange) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.global_ranks = inner.global_ranks
        self.is_leader = inner.is_leader

    def all_gather(self, message_B: Tensor) -> Tensor:
        return self.inner.all_gather(message_B)

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        return self.inner.all_to_all(parts_WB)

    def all_reduce(self, values: Tensor) -> None:
        self.inner.all_reduce(values)

    def broadcast(self, data_B: Tensor, src: int) -> None:
        self.inner.broadcast(data_B, src)

    def gather(self, message_B: Tensor, dst: int) -> Tensor | None:
        return self.inner.gather(message_B, dst)

    def duplicate(self, device: torch.device) -> Exchange:
        self.inner = self.inner.duplicate(device)
        return self

    def average(self, gradients: list[Tensor]) -> None:
        self.inner.average(gradients)

    @cached_property
    def intra_node(self) -> Exchange | None:
        return self.inner.intra_node


# The bytes that each rank sends and receives in a collective; everything in demopt that counts bytes uses these.


def all_gather_bytes(size: int, world_size: int) -> int:
    """Returns the bytes of an all-gather of `size` bytes per rank, in a ring as well as in pairs.

    Examples:
        >>> all_gather_bytes(size=1000, world_size=4)
        3000
    """
    return (world_size - 1) * size


def all_to_all_bytes(size: int, world_size: int) -> int:
    """Returns the bytes of an all-to-all, or a reduce-scatter, of `size` bytes for all ranks together.

    Examples:
        >>> all_to_all_bytes(size=1000, world_size=4)
        750
    """
    return (world_size - 1) * size // world_size


def all_reduce_bytes(size: int, world_size: int) -> int:
    """Returns the bytes of a ring all-reduce of `size` bytes: a reduce-scatter and an all-gather, rounded up.

    Examples:
        >>> all_reduce_bytes(size=1000, world_size=4)
        1500
    """
    return -(-2 * (world_size - 1) * size // world_size)


class Meter(Wrapper):
    """Counts calls and the bytes that this rank sends and receives.

    With `Hierarchical`, the first process of each node counts the traffic between nodes; the others count nothing.

    Examples:
        >>> import torch
        >>> from demopt.exchange import SingleRank
        >>> meter = Meter(SingleRank())
        >>> _ = meter.all_gather(torch.zeros(3, dtype=torch.uint8))
        >>> meter.calls, meter.sent_bytes, meter.received_bytes
        (1, 0, 0)
    """

    def __init__(self, inner: Exchange) -> None:
        super().__init__(inner)
        self.calls = 0
        self.sent_bytes = 0
        self.received_bytes = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The context in which nothing is counted."""
        before = self.calls, self.sent_bytes, self.received_bytes
        try:
            yield
        finally:
            self.calls, self.sent_bytes, self.received_bytes = before

    def all_gather(self, message_B: Tensor) -> Tensor:
        """Counts the call, then forwards it."""
        each_way = all_gather_bytes(message_B.nbytes, self.world_size)
        self._count(each_way, each_way)
        return self.inner.all_gather(message_B)

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        """Counts the call, without this rank's part for itself, then forwards it."""
        each_way = all_to_all_bytes(parts_WB.nbytes, self.world_size)
        self._count(each_way, each_way)
        return self.inner.all_to_all(parts_WB)

    def all_reduce(self, values: Tensor) -> None:
        """Counts a ring's traffic, then forwards the call."""
        each_way = all_reduce_bytes(values.nbytes, self.world_size)
        self._count(each_way, each_way)
        self.inner.all_reduce(values)

    def broadcast(self, data_B: Tensor, src: int) -> None:
        """Counts one message from the src to each other rank, then forwards the call."""
        mine = self.rank == src
        size = data_B.nbytes
        self._count((self.world_size - 1) * size if mine else 0, 0 if mine else size)
        self.inner.broadcast(data_B, src)

    def gather(self, message_B: Tensor, dst: int) -> Tensor | None:
        """Counts one message from each other rank to `dst`, then forwards the call."""
        mine = self.rank == dst
        size = message_B.nbytes
        self._count(0 if mine else size, (self.world_size - 1) * size if mine else 0)
        return self.inner.gather(message_B, dst)

    def exchange_round(
        self, number: int, body: Tensor, refusal: Callable[[Tensor], str], weights: int | None, samples: int
    ) -> Tensor:
        """Sends a message in a round and returns those of its list of senders, where exchanges vary."""
        raise NotImplementedError(f"{type(self.inner).__name__} has the same senders in every round")

    row: int | None = 0  # of this rank's message in the last such round

    def _count(self, sent: int, received: int) -> None:
        if not self.is_leader:
            return
        self.calls += 1
        self.sent_bytes += sent
        self.received_bytes += received


class Delay(Wrapper):
    """Waits before each call like a slow link: `latency_seconds`, plus the received bytes at `bytes_per_second`.

    Examples:
        >>> import torch
        >>> from demopt.exchange import SingleRank
        >>> Delay(SingleRank(), latency_seconds=0.001).all_gather(torch.zeros(3, dtype=torch.uint8)).shape
        torch.Size([1, 3])
    """

    def __init__(self, inner: Exchange, latency_seconds: float = 0.0, bytes_per_second: float = float("inf")) -> None:
        super().__init__(inner)
        self._latency_seconds = latency_seconds
        self._bytes_per_second = bytes_per_second

    def all_gather(self, message_B: Tensor) -> Tensor:
        """Waits for the time of W - 1 messages, then forwards the call."""
        self._wait(all_gather_bytes(message_B.nbytes, self.world_size))
        return super().all_gather(message_B)

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        """Waits for the time of the other ranks' parts, then forwards the call."""
        self._wait(all_to_all_bytes(parts_WB.nbytes, self.world_size))
        return super().all_to_all(parts_WB)

    def all_reduce(self, values: Tensor) -> None:
        """Waits for the time of a ring all-reduce, then forwards the call."""
        self._wait(all_reduce_bytes(values.nbytes, self.world_size))
        super().all_reduce(values)

    def broadcast(self, data_B: Tensor, src: int) -> None:
        """Waits for the time of the data, then forwards the call."""
        self._wait(data_B.nbytes)
        super().broadcast(data_B, src)

    def gather(self, message_B: Tensor, dst: int) -> Tensor | None:
        """Waits for the time of the other ranks' messages, on rank `dst`, then forwards the call."""
        self._wait(all_gather_bytes(message_B.nbytes, self.world_size) if self.rank == dst else 0)
        return super().gather(message_B, dst)

    def _wait(self, received: int) -> None:
        time.sleep(self._latency_seconds + received / self._bytes_per_second)


class Faulty(Wrapper):
    """Passes received messages to `damage`, which returns a replacement, or raises.

    Examples:
        >>> import torch
        >>> from demopt.exchange import SingleRank
        >>> faulty = Faulty(SingleRank(), damage=lambda messages: messages[:, :-1])
        >>> faulty.all_gather(torch.zeros(3, dtype=torch.uint8)).shape
        torch.Size([1, 2])
    """

    def __init__(self, inner: Exchange, damage: Callable[[Tensor], Tensor]) -> None:
        super().__init__(inner)
        self._damage = damage

    def all_gather(self, message_B: Tensor) -> Tensor:
        """Returns a damaged copy of the gathered messages."""
        return self._damage(super().all_gather(message_B).clone())

    def gather(self, message_B: Tensor, dst: int) -> Tensor | None:
        """Returns, on rank `dst`, a damaged copy of the gathered messages."""
        rows = super().gather(message_B, dst)
        return None if rows is None else self._damage(rows.clone())

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        """Returns a damaged copy of the received parts."""
        return self._damage(super().all_to_all(parts_WB).clone())
