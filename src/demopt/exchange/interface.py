"""The interface of exchanges, which move bytes between ranks; a single rank's exchange; and one that counts bytes.

An exchange never looks inside a message.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Exchange(ABC):
    """A fixed set of ranks that pass bytes to each other; every rank makes the same calls in the same order.

    Calls raise ExchangeError when a peer is gone or a wait times out; after that the exchange is unusable. Results are
    read-only: ranks that are threads share them.

    Examples:
        >>> isinstance(SingleRank(), Exchange)
        True
    """

    rank: int
    world_size: int
    #: The torch.distributed global ranks behind this exchange; empty without torch.distributed.
    global_ranks: frozenset[int] = frozenset()
    #: The exchange between the processes that count as this rank, if there are several.
    intra_node: "Exchange | None" = None

    @abstractmethod
    def all_gather(self, message_B: Tensor) -> Tensor:
        """Returns uint8 [W, B]: the messages of all ranks, row r from rank r. B is equal on all ranks."""

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        """Sends row s of `parts_WB` to rank s; returns uint8 [W, B], row r from rank r. For route "owner" and nodes."""
        raise NotImplementedError(
            f"{type(self).__name__} has no all_to_all, which route 'owner' needs, and every route with several "
            "processes per node: write it; with one process per node, route='gather' does without"
        )

    @abstractmethod
    def broadcast(self, data_B: Tensor, src: int) -> None:
        """Overwrites uint8 [B] with the data of rank `src`. B is equal on all ranks."""

    def gather(self, message_B: Tensor, dst: int) -> Tensor | None:
        """Returns the result of `all_gather` on the leader of rank `dst`; None elsewhere."""
        rows = self.all_gather(message_B)
        return rows if self.rank == dst and self.is_leader else None

    def await_all(self, call: str) -> None:  # noqa: B027  exchanges without such a way just begin
        """Before a call that is not part of a round: waits for all ranks; ExchangeError if some went on without it."""

    def duplicate(self) -> "Exchange":
        """Returns an exchange between the same ranks, separate from other traffic; all ranks call this together."""
        return self

    @property
    def is_leader(self) -> bool:
        """Whether this process itself talks to the other ranks; with Hierarchical, only the first of each node does."""
        return self.intra_node is None or self.intra_node.rank == 0

    @property
    def speaks(self) -> bool:
        """Whether this process emits warnings that hold for all ranks."""
        return self.rank == 0 and self.is_leader


class SingleRank(Exchange):
    """The exchange of a single process: no network.

    Examples:
        >>> SingleRank().all_gather(torch.zeros(3, dtype=torch.uint8)).shape
        torch.Size([1, 3])
    """

    rank = 0
    world_size = 1

    def all_gather(self, message_B: Tensor) -> Tensor:
        return message_B.unsqueeze(0)

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        return parts_WB

    def broadcast(self, data_B: Tensor, src: int) -> None:
        """Does nothing."""


class Meter(Exchange):
    """Forwards every call to `inner`, and counts calls and the bytes that this rank sends and receives.

    With `Hierarchical`, the first process of each node counts the traffic between nodes; the others count nothing.

    Examples:
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


def all_reduce_bytes(size: int, world_size: int) -> int:
    """Returns the bytes of a ring all-reduce of `size` bytes: a reduce-scatter and an all-gather, rounded up."""
    return -(-2 * (world_size - 1) * size // world_size)


def device_between(devices: Iterable[torch.device]) -> torch.device:
    """Returns the device whose tensors ranks exchange: the first accelerator, as nccl moves no host tensors."""
    return next((each for each in devices if each.type not in ("cpu", "meta")), torch.device("cpu"))


def gather_values(exchange: Exchange, value: Any, device: torch.device | None = None) -> list[Any]:
    """Returns each rank's value, by rank. It travels as JSON on `device`, so tuples arrive as lists."""
    text, device = json.dumps(value).encode(), device or torch.device("cpu")
    sizes = exchange.all_gather(torch.tensor([len(text)], device=device).view(torch.uint8)).cpu().view(torch.int64)
    size = int(sizes.max())  # of leaders: another process of a node may have a longer text, which does not travel
    raw = torch.frombuffer(bytearray(text.ljust(size)[:size]), dtype=torch.uint8)
    return [json.loads(bytes(row.tolist())) for row in exchange.all_gather(raw.to(device)).cpu()]
