"""The interface of routes: the way of a step's messages between ranks, and the choice of one.

Shapes: W ranks, B bytes in a message.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
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
from demopt.wire.message import HEADER_BYTES, Header, RawHeader

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


@dataclass(frozen=True)
class Arrived:
    """The result of an exchange, uint8 [W, B], the version of its bytes, and its headers, not checked yet.

    On an accelerator it is decoded already, if all bodies are valid, so that headers and the outcome of all checks take
    one copy to the host. Otherwise `check` decodes it, and finds the error.
    """

    messages: Tensor
    version: int
    headers: list[RawHeader]
    decoded: Any = None


def read(
    messages: Tensor, shape: tuple[int, int], device: torch.device, unchecked: Callable[[Tensor], tuple[Any, Tensor]]
) -> Arrived:
    """Reads messages [W, B], which `unchecked` decodes on a device."""
    if device.type == "cpu" or messages.shape != shape or messages.dtype != torch.uint8:
        return Arrived(messages, messages._version, wire.read_headers(messages))
    here = messages.to(device, non_blocking=True)
    decoded, invalid = unchecked(here[:, HEADER_BYTES:])
    headers = wire.read_headers(here, invalid)
    valid = not any(header.has_invalid_body for header in headers)
    return Arrived(messages, messages._version, headers, decoded if valid else None)


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

    def read(self, messages: Tensor) -> Arrived:
        """Reads the result of `exchange`, as it arrived: nothing is checked yet."""
        return read(messages, (self.world_size, self.widths[1]), self.device, self.unchecked)

    @abstractmethod
    def unchecked(self, bodies_WB: Tensor) -> tuple[Any, Tensor]:
        """Decodes all of the result without waiting for the device; returns also bool [W]: which bodies are invalid."""

    @abstractmethod
    def check(self, arrived: Arrived, header: Header) -> tuple[list[Header], Any]:
        """Checks all of the result; returns its headers, and decoded the input of `apply`. MessageError if invalid."""

    def own_state(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yields each parameter of which this rank owns chunks, with its state of them; tensors are views."""
        yield from ()

    def sent(self, data: list[Tensor], decoded: Any) -> list[Coefficients | SignBits]:
        """Returns this rank's coefficients of each chunk group, from its bytes, or from `decoded`, by `check`."""
        del decoded
        sections = [chunk_group.section for chunk_group in self.chunk_groups]
        if self.device.type != "cpu":  # its own bytes: to check them, it would wait for the device
            return [section.unchecked(each.unsqueeze(0))[0] for section, each in zip(sections, data, strict=False)]
        return [section.received(each.unsqueeze(0)) for section, each in zip(sections, data, strict=False)]

    @abstractmethod
    def apply(self, decoded: Any, step: int, sharded: ShardedMatrices) -> None:
        """Updates the parameters of all chunk groups; `step` and `sharded` as in `decompress`."""


def any_of(invalid: list[Tensor], bodies_WB: Tensor) -> Tensor:
    """Returns bool [W]: which ranks have an invalid body, if `invalid` says it of parts, on any device."""
    if not invalid:
        return bodies_WB.new_zeros(len(bodies_WB), dtype=torch.bool)
    return torch.stack([each.to(bodies_WB.device) for each in invalid]).any(0)


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
