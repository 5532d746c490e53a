"""How bytes move between ranks. An exchange never looks inside a message.

Shapes: W ranks, B bytes.
"""

from abc import ABC, abstractmethod

from torch import Tensor


class Exchange(ABC):
    """A fixed set of ranks that can pass bytes to each other; every rank makes the same calls in the same order.

    Calls raise ExchangeError when a peer is gone or a wait times out; after that the exchange is unusable.

    Example:
        >>> from demopt.exchange import Alone
        >>> isinstance(Alone(), Exchange)
        True
    """

    rank: int
    world: int
    #: Global ranks of torch.distributed behind this exchange; empty where there are none.
    members: frozenset[int] = frozenset()
    #: Whether this process itself talks to the other ranks; with Nodes, one process of a node does.
    leads: bool = True

    @abstractmethod
    def all_gather(self, message_B: Tensor) -> Tensor:
        """uint8 [W, B]: the messages of all ranks, row r from rank r. B is equal on all ranks."""

    @abstractmethod
    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        """uint8 [W, B], row r from rank r, where row s of `parts_WB` goes to rank s."""

    @abstractmethod
    def all_reduce(self, values: Tensor) -> None:
        """Overwrites float32 values with their sum over all ranks, the same bits on every rank."""

    def average(self, gradients: list[Tensor]) -> None:  # noqa: B027 - there is nothing below most exchanges
        """Overwrites gradients with their mean over the processes that count as this rank."""

    @property
    def inside(self) -> "Exchange | None":
        """The exchange among the processes that count as this rank, where there are several."""
        return None

    def apart(self) -> "Exchange":
        """An exchange among the same ranks whose calls do not mix with others'; all ranks call it together."""
        return self

    @abstractmethod
    def broadcast(self, data_B: Tensor, source: int) -> None:
        """Overwrites uint8 [B] with that of the rank `source`. B is equal on all ranks."""
