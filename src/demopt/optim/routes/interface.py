"""The interface of routes: how the messages of a step travel, and how their result is applied.

Shapes: W ranks, B bytes in a message, C chunks, N elements in a chunk (r rows, c columns), K kept.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from demopt.exchange import Exchange
from demopt.optim.chunk_group import ChunkGroup
from demopt.optim.compress import Chosen, Workspace
from demopt.wire import frame
from demopt.wire.frame import Header
from demopt.wire.layout import Layout


@dataclass(frozen=True)
class Team:
    """This rank, and the number of ranks.

    Example:
        >>> Team(rank=0, world_size=4).world_size
        4
    """

    rank: int
    world_size: int


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends and receives per step, headers included.

    Example:
        >>> Traffic(sent=10, received=20).received
        20
    """

    sent: int
    received: int


class Route(ABC):
    """Turns every rank's coefficients into the same direction on every rank.

    `message`, `exchange`, `check` and `apply` are called in this order, once per step. Only `exchange` uses the
    network. Only `apply` changes parameters; only `apply` and `keep` change the route's own state.
    """

    chosen: Chosen | None = None  #: chooses the positions to send; None: the strongest coefficients

    def __init__(self, chunk_groups: list[ChunkGroup], team: Team, workspace: Workspace) -> None:
        self.chunk_groups = chunk_groups
        self.team = team
        self.workspace = workspace
        self.device = chunk_groups[0].key.device if chunk_groups else torch.device("cpu")  # where messages are built
        self.layout = Layout(tuple(chunk_group.section for chunk_group in chunk_groups))

    def begin(self, step: int) -> None:  # noqa: B027 - most routes do the same at every step
        """Begins a step; its number is the same on all ranks."""

    @property
    @abstractmethod
    def widths(self) -> tuple[int, int]:
        """The bytes in this rank's message, and in a row of the result of `exchange`."""

    @abstractmethod
    def message(self, header: Header, data: list[Tensor]) -> Tensor:
        """Builds this rank's message, uint8 [B], from each group's bytes; `data` is empty if the header is flagged."""

    @abstractmethod
    def exchange(self, message: Tensor, exchange: Exchange, header: Header) -> Tensor:
        """Exchanges the messages of all ranks; returns the result, the same bytes on every rank."""

    @abstractmethod
    def check(self, messages: Tensor, header: Header) -> list[Header]:
        """Checks all that `exchange` returned and returns its headers; raises MessageError if anything is invalid."""

    @abstractmethod
    def apply(self, messages: Tensor) -> None:
        """Updates the parameters of all chunk groups from messages that `check` has passed."""

    def keep(self) -> None:  # noqa: B027 - most routes have no state of their own
        """Updates only the route's own state, as `apply` does, when another rank updates the same parameters."""

    @abstractmethod
    def traffic(self) -> Traffic:
        """Returns the bytes per step, which are known before the first step."""


def flags_of(headers: list[Header]) -> int:
    """Returns the union of the headers' flags that leave a body empty.

    Example:
        >>> flags_of([])
        0
    """
    flags = 0
    for header in headers:
        flags |= header.flags & ~frame.FINGERPRINT
    return flags
