"""The interface of exchanges, which move bytes between ranks. An exchange never looks inside a message.

Shapes: W ranks, B bytes.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Exchange(ABC):
    """A fixed set of ranks that pass bytes to each other; every rank makes the same calls in the same order.

    Calls raise ExchangeError when a peer is gone or a wait times out; after that the exchange is unusable. What they
    return is to be read only: ranks that are threads share it.

    Examples:
        >>> from demopt.exchange import SingleRank
        >>> isinstance(SingleRank(), Exchange)
        True
    """

    rank: int
    world_size: int
    #: The torch.distributed global ranks behind this exchange; empty without torch.distributed.
    global_ranks: frozenset[int] = frozenset()
    #: Whether this process itself talks to the other ranks; with Hierarchical, only one process of each node does.
    is_leader: bool = True
    #: Bytes that a message grows by on its way.
    tag_bytes: int = 0

    @abstractmethod
    def all_gather(self, message_B: Tensor) -> Tensor:
        """Returns uint8 [W, B]: the messages of all ranks, row r from rank r. B is equal on all ranks."""

    @abstractmethod
    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        """Sends row s of `parts_WB` to rank s; returns uint8 [W, B], row r from rank r."""

    @abstractmethod
    def all_reduce(self, values: Tensor) -> None:
        """Overwrites float32 values with their sum over all ranks, the same bits on every rank."""

    def gather(self, message_B: Tensor, dst: int) -> Tensor | None:
        """Returns what `all_gather` does, on rank `dst` alone, and there on its leader; None elsewhere."""
        rows = self.all_gather(message_B)
        return rows if self.rank == dst and self.is_leader else None

    def average(self, gradients: list[Tensor]) -> None:  # noqa: B027 - in most exchanges a rank is one process
        """Overwrites gradients with their mean over the processes that count as this rank."""

    @property
    def intra_node(self) -> "Exchange | None":
        """The exchange among the processes that count as this rank, if there are several."""
        return None

    def duplicate(self, device: torch.device) -> "Exchange":
        """Returns an exchange among the same ranks, separate from other traffic; all ranks call this together.

        `device` is where its messages are.
        """
        del device
        return self

    @abstractmethod
    def broadcast(self, data_B: Tensor, src: int) -> None:
        """Overwrites uint8 [B] with the data of rank `src`. B is equal on all ranks."""
