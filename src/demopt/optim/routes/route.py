"""The interface of routes: how the messages of a step travel, and how their result is applied.

Shapes: W ranks, B bytes in a message, C chunks, N elements in a chunk (r rows, c columns), K kept.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from demopt.errors import MessageError
from demopt.exchange import Exchange
from demopt.optim.chunk_group import ChunkGroup
from demopt.optim.compress import Workspace
from demopt.wire import frame
from demopt.wire.coefficients import Coefficients
from demopt.wire.frame import Header
from demopt.wire.layout import Layout, Section


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
    """Turns every rank's coefficients into the same direction on every rank.

    `message`, `exchange`, `check`, `apply` and `finish` are called in this order, once per step. Only `exchange` uses
    the network. Only `apply` changes parameters; only `finish` changes the route's own state.
    """

    name: ClassVar[str]  #: what users call it
    like_gather: ClassVar[bool] = True  #: it gives the same bits as gather, so that "auto" may take it
    state_names: ClassVar[tuple[str, ...]] = ()  #: of what it keeps in a parameter's state from step to step

    def __init__(self, chunk_groups: list[ChunkGroup], rank: int, world_size: int, workspace: Workspace) -> None:
        self.chunk_groups = chunk_groups
        self.rank = rank
        self.world_size = world_size
        self.workspace = workspace
        self.device = chunk_groups[0].key.device if chunk_groups else torch.device("cpu")  # where messages are built
        self.layout = Layout(tuple(chunk_group.section for chunk_group in chunk_groups))

    @classmethod
    def refusal(cls, group: Mapping[str, Any]) -> str:
        """Returns why it cannot carry the settings of a parameter group, or an empty text."""
        del group
        return ""

    @property
    @abstractmethod
    def widths(self) -> tuple[int, int]:
        """The bytes in this rank's message, and in a row of the result of `exchange`."""

    @property
    @abstractmethod
    def traffic(self) -> Traffic:
        """The bytes per step, which are known before the first step."""

    @property
    @abstractmethod
    def collectives(self) -> int:
        """The collective calls per step."""

    @abstractmethod
    def message(self, header: Header, data: list[Tensor]) -> Tensor:
        """Builds this rank's message, uint8 [B], from each group's bytes; `data` is empty if the header is flagged."""

    @abstractmethod
    def exchange(self, message: Tensor, exchange: Exchange, header: Header) -> tuple[Tensor, Any]:
        """Exchanges the messages; returns the result, the same bytes on every rank, and what `finish` will want."""

    @abstractmethod
    def check(self, messages: Tensor, header: Header) -> tuple[list[Header], Any]:
        """Checks all of the result; returns its headers and, decoded, what `apply` wants. MessageError if invalid."""

    @abstractmethod
    def apply(self, decoded: Any) -> None:
        """Updates the parameters of all chunk groups."""

    def finish(self, pending: Any) -> None:  # noqa: B027 - most routes have no state of their own
        """Updates the route's own state with what `exchange` kept for it, after all ranks have accepted the round."""

    def state(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yields parameters with the state that the route keeps for them, views of its own buffers."""
        yield from ()

    def adopt(self, mine: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:  # noqa: B027 - as `finish`
        """Copies a parameter's saved state into `mine`, one of those that `state` yields."""

    @property
    def kept_back_bytes(self) -> int:
        """The memory of the route's own state, on the rank that has most."""
        return 0


def received(section: Section, data_WB: Tensor, rank: int | None = None) -> Coefficients:
    """Decodes and checks all chunks of a section, once; `rank` is the sender of a single row.

    Raises MessageError if a coefficient is invalid. The result is compact: it waits until all other parts are checked.
    """
    try:
        runs = section.runs or [slice(0, 0)]
        parts = [section.checked(data_WB, run.start, run.stop) for run in runs]  # in runs, which bounds memory
        return parts[0] if len(parts) == 1 else Coefficients.joined(parts)
    except MessageError as error:
        raise MessageError(error.reason, error.rank if rank is None else rank) from None


def flags_of(headers: list[Header]) -> int:
    """Returns the union of the headers' flags that leave a body empty.

    Examples:
        >>> flags_of([])
        0
    """
    flags = 0
    for header in headers:
        flags |= header.flags & ~frame.FINGERPRINT
    return flags
