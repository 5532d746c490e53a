"""A route: how the messages of a step travel, and what comes out of them.

Shapes: W ranks, B bytes in a message, C chunks, N elements in a chunk (r rows, c columns), K kept.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from demopt.exchange import Exchange
from demopt.optim.bucket import Bucket
from demopt.optim.stages import Chosen, Workspace
from demopt.wire import frame
from demopt.wire.frame import Header
from demopt.wire.layout import Layout


@dataclass(frozen=True)
class Team:
    """This rank among `world`.

    Example:
        >>> Team(rank=0, world=4).world
        4
    """

    rank: int
    world: int


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends and receives a step, headers included.

    Example:
        >>> Traffic(sent=10, received=20).received
        20
    """

    sent: int
    received: int


class Route(ABC):
    """One way from every rank's coefficients to the same direction on every rank.

    `message`, `exchange`, `check` and `apply` are called in this order once a step. Only `exchange` uses the network.
    Only `apply` changes parameters, and the route's own state.
    """

    chosen: Chosen | None = None  #: the positions that are sent; None: those of the strongest coefficients

    def __init__(self, buckets: list[Bucket], team: Team, workspace: Workspace) -> None:
        self.buckets = buckets
        self.team = team
        self.workspace = workspace
        self.device = buckets[0].kind.device if buckets else torch.device("cpu")  # where messages are put together
        self.layout = Layout(tuple(bucket.section for bucket in buckets))

    def begin(self, step: int) -> None:  # noqa: B027 - most routes do the same at every step
        """A step begins; its number is the same on all ranks."""

    @property
    @abstractmethod
    def widths(self) -> tuple[int, int]:
        """Bytes in this rank's message, and in a row of what `exchange` returns."""

    @abstractmethod
    def message(self, header: Header, data: list[Tensor]) -> Tensor:
        """This rank's message, uint8 [B], of the bytes of each bucket; empty data where the header says non-finite."""

    @abstractmethod
    def exchange(self, message: Tensor, exchange: Exchange, header: Header) -> Tensor:
        """What all ranks, together, make of the messages; the same bytes on every rank."""

    @abstractmethod
    def check(self, messages: Tensor, header: Header) -> list[Header]:
        """The headers of what `exchange` returned, all of whose contents are checked; MessageError otherwise."""

    @abstractmethod
    def apply(self, messages: Tensor) -> None:
        """Updates the parameters of all buckets from what `check` has passed."""

    def keep(self) -> None:  # noqa: B027 - most routes have no state of their own
        """What `apply` does to the route's own state; alone where another rank applies to the same parameters."""

    @abstractmethod
    def traffic(self) -> Traffic:
        """Bytes a step, known before the first."""


def flags_of(headers: list[Header]) -> int:
    """All flags that some header has and that leave its body empty.

    Example:
        >>> flags_of([])
        0
    """
    flags = 0
    for header in headers:
        flags |= header.flags & ~frame.FINGERPRINT
    return flags
