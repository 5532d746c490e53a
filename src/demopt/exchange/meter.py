"""Meter: an exchange that counts the bytes of another."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from demopt.exchange.interface import Exchange


def all_reduce_bytes(size: int, world_size: int) -> int:
    """Returns the bytes of a ring all-reduce of `size` bytes: a reduce-scatter and an all-gather, rounded up."""
    return -(-2 * (world_size - 1) * size // world_size)


class Meter(Exchange):
    """Forwards every call to `inner`, and counts calls and the bytes that this rank sends and receives.

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
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.global_ranks = inner.global_ranks
        self.intra_node = inner.intra_node
        self.calls = self.sent_bytes = self.received_bytes = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The context in which nothing is counted."""
        before = self.calls, self.sent_bytes, self.received_bytes
        try:
            yield
        finally:
            self.calls, self.sent_bytes, self.received_bytes = before

    def all_gather(self, message_B: Tensor) -> Tensor:
        each_way = (self.world_size - 1) * message_B.nbytes  # in a ring as well as in pairs
        self._count(each_way, each_way)
        return self.inner.all_gather(message_B)

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        each_way = (self.world_size - 1) * parts_WB.nbytes // self.world_size  # one part is this rank's own
        self._count(each_way, each_way)
        return self.inner.all_to_all(parts_WB)

    def broadcast(self, data_B: Tensor, src: int) -> None:
        """Counts one message from the src to each other rank."""
        self._count(*((self.world_size - 1) * data_B.nbytes, 0) if self.rank == src else (0, data_B.nbytes))
        self.inner.broadcast(data_B, src)

    def gather(self, message_B: Tensor, dst: int) -> Tensor | None:
        """Counts one message from each other rank to `dst`."""
        self._count(*(0, (self.world_size - 1) * message_B.nbytes) if self.rank == dst else (message_B.nbytes, 0))
        return self.inner.gather(message_B, dst)

    def await_all(self, call: str) -> None:
        self.inner.await_all(call)

    def _count(self, sent: int, received: int) -> None:
        if self.is_leader:
            self.calls += 1
            self.sent_bytes += sent
            self.received_bytes += received
