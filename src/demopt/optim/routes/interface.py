"""A route: how the messages of a step travel, and what comes out of them.

Shapes: W ranks, B bytes in a message, C chunks, N elements in a chunk (r rows, c columns), K kept.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from demopt.core.select import strongest
from demopt.exchange import Exchange
from demopt.optim.bucket import Block, Bucket
from demopt.optim.stages import Workspace
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

    `message`, `exchange`, `check` and `directions` are called in this order once a step. Only `exchange` uses the
    network. Only `commit`, which follows when all directions were applied, changes state.
    """

    def __init__(self, buckets: list[Bucket], team: Team, workspace: Workspace) -> None:
        self.buckets = buckets
        self.team = team
        self.workspace = workspace
        self.device = buckets[0].kind.device if buckets else torch.device("cpu")  # where messages are put together
        self.layout = Layout(tuple(bucket.section for bucket in buckets))

    def choose(self, bucket: Bucket, block: Block, coefficients_CN: Tensor, spare_CN: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and values [C, K] of what a block sends: the strongest, unless the route says otherwise."""
        del block
        return strongest(coefficients_CN, bucket.kind.keep, spare_CN)

    def begin(self, step: int) -> None:  # noqa: B027 - most routes do the same at every step
        """A step begins; its number is the same on all ranks."""

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
    def directions(self, messages: Tensor) -> Iterator[tuple[Bucket, Block, Tensor]]:
        """phi(U) [C, r, c] of every block, one at a time: it may lie in the workspace."""

    def commit(self) -> None:  # noqa: B027 - most routes have nothing to do
        """The step has been applied."""

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
