"""The interface of routes: the way of a step's messages between ranks, and the choice of one.

Shapes: W ranks, B bytes in a message.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from demopt.codec.chunk_group import ChunkGroup
from demopt.codec.compress import Workspace
from demopt.codec.decompress import ShardedMatrices
from demopt.codec.hyperparameters import Hyperparameters
from demopt.exchange import Exchange
from demopt.wire import message as wire
from demopt.wire.coefficients import Coefficients, SignBits
from demopt.wire.layout import Layout
from demopt.wire.message import Header, RawHeader

OWNER_ERROR = "owner_error"  # in a parameter's state: the owner's error [chunks, N] of the chunks that this rank owns
OWNER_START = "owner_start"  # the first of these chunks


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends and receives per step, headers included.

    Examples:
        >>> Traffic(sent=10, received=20).received
        20
    """

    sent: int
    received: int


class Route(ABC):
    """Turns every rank's coefficients into the same update on every rank.

    `message`, `exchange`, `check` and `apply` are called in this order, once per step. Only `exchange` uses the
    network, and only `apply` changes parameters.
    """

    name: ClassVar[str]  #: as users write it
    collectives: ClassVar[int]  #: calls per step

    def __init__(self, chunk_groups: list[ChunkGroup], rank: int, world_size: int, workspace: Workspace) -> None:
        self.chunk_groups = chunk_groups
        self.rank = rank
        self.world_size = world_size
        self.workspace = workspace
        self.device = chunk_groups[0].key.device if chunk_groups else torch.device("cpu")  # of messages
        self.layout = Layout(tuple(chunk_group.section for chunk_group in chunk_groups))

    @classmethod
    def refusal(cls, settings: Hyperparameters) -> str:
        """Returns the reason why it cannot carry the settings of a parameter group, or an empty text."""
        del settings
        return ""

    @property
    @abstractmethod
    def widths(self) -> tuple[int, int]:
        """The bytes in this rank's message, and in a row of the result of `exchange`."""

    @property
    @abstractmethod
    def traffic(self) -> Traffic:
        """The bytes per step, which are known before the first step."""

    @abstractmethod
    def message(self, header: Header, data: list[Tensor]) -> Tensor:
        """Builds this rank's message, uint8 [B], from each group's bytes; `data` is empty if the header is flagged."""

    @abstractmethod
    def exchange(self, message: Tensor, exchange: Exchange, header: Header) -> Tensor:
        """Exchanges the messages; returns the result uint8 [rows, B], the same bytes on every rank."""

    @abstractmethod
    def check(self, messages: Tensor, received: list[RawHeader], header: Header) -> tuple[list[Header], Any]:
        """Checks all of the result; returns its headers, and decoded the input of `apply`. MessageError if invalid."""

    def own_state(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yields each parameter of which this rank owns chunks, with its state of them; tensors are views."""
        yield from ()

    def sent(self, data: list[Tensor], decoded: Any) -> list[Coefficients | SignBits]:
        """Returns this rank's coefficients of each chunk group, from its bytes, or from `decoded`, by `check`."""
        del decoded
        sections = [chunk_group.section for chunk_group in self.chunk_groups]
        return [section.received(each.unsqueeze(0)) for section, each in zip(sections, data, strict=False)]

    @abstractmethod
    def apply(self, decoded: Any, step: int, sharded: ShardedMatrices) -> None:
        """Updates the parameters of all chunk groups; `step` and `sharded` as in `decompress`."""


def weighted(received: Coefficients | SignBits, samples: tuple[int, ...]) -> Coefficients | SignBits:
    """Returns signs of all coefficients with the ranks' samples; other messages count alike."""
    return replace(received, samples=samples) if isinstance(received, SignBits) else received


def empty_body(headers: list[Header]) -> int:
    """Returns the union of the headers' flags that leave a body empty.

    Examples:
        >>> empty_body([])
        0
    """
    flags = 0
    for header in headers:
        flags |= header.flags & ~wire.FINGERPRINT
    return flags
