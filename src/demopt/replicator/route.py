"""Routes, the ways of a round's messages between ranks: here gather, the plainest; `owner.py` changes parts of it.

gather: every rank receives every message, and all compute the same sums. (W - 1) B received.

Shapes: W ranks, B bytes in a message, C chunks, K kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from demopt.codec.chunk_group import ChunkGroup
from demopt.codec.hyperparameters import Hyperparameters
from demopt.codec.steps import Workspace, decompress, subtract_sent
from demopt.core.agreement import trusted
from demopt.errors import first_line
from demopt.exchange import Exchange
from demopt.exchange.interface import device_between
from demopt.wire.bits import Faults
from demopt.wire.coefficients import Coefficients
from demopt.wire.layout import Layout
from demopt.wire.message import HEADER_BYTES, NONFINITE, Header, RawHeader, check_headers, pack_message, read_headers

OWNER_ERROR = "owner_error"  # in a parameter's state: the owner's error [chunks, N] of the chunks that this rank owns
OWNER_START = "owner_start"  # the first of these chunks

Decoded = list[Coefficients]  # of each chunk group


@dataclass
class Result:
    """The result of an exchange, uint8 [W, B], with its headers, and decoded.

    On an accelerator it is decoded on arrival, so that headers and faults take one copy to the host; with a fault, the
    decoded part is dropped. `Route.check` decodes such a result again, to find the error, and every result on a CPU.
    """

    messages: Tensor
    version: int  # of the bytes of `messages`: a change in place raises torch's counter
    headers: list[RawHeader]
    decoded: Any = None
    checked: bool = False
    skipped: bool = False  # a gradient was not finite, or a folder's round has no sender

    @property
    def tensors(self) -> Iterator[Tensor]:
        yield self.messages
        for part in self.decoded or ():
            yield from (each for each in vars(part).values() if isinstance(each, Tensor))


class Route:
    """A way of messages, which turns every rank's coefficients into the same update on every rank.

    This one is gather: one all_gather, and the messages themselves are the result; in a folder, any number of them.

    A round calls `message`, `exchange`, then the function `read_result` (which may call `decode`), `check`, `apply` and
    `subtract_sent`; all but the last two any number of times, as when a handshake repeats a round. Only `exchange` uses
    the network between nodes, and only `apply` changes parameters.
    """

    name: ClassVar[str] = "gather"  #: as users write it
    least_ranks: ClassVar[int] = 1  #: route "auto" considers it with this many ranks or more

    def __init__(self, chunk_groups: list[ChunkGroup], rank: int, world_size: int, workspace: Workspace) -> None:
        self.chunk_groups = chunk_groups
        self.rank = rank
        self.world_size = world_size
        self.workspace = workspace
        self.devices = [chunk_group.key.device for chunk_group in chunk_groups]
        self.device = device_between(self.devices)  # of messages
        self.layout = Layout(tuple(chunk_group.section for chunk_group in chunk_groups))

    @classmethod
    def unsupported(cls, settings: Hyperparameters) -> str:
        """Returns the reason why it cannot carry the settings of a parameter group, or an empty text."""
        del settings
        return ""

    @cached_property
    def widths(self) -> tuple[int, int]:
        """The bytes in this rank's message, and in a row of the result of `exchange`."""
        each = HEADER_BYTES + self.layout.size
        return each, each

    @property
    def bytes_each_way(self) -> int:
        """The bytes that each rank sends per round, headers included; it receives as many."""
        return (self.world_size - 1) * self.widths[0]

    def message(self, header: Header, data: list[Tensor]) -> Tensor:
        """Builds this rank's message, uint8 [B], from each group's bytes; `data` is empty if the header is flagged."""
        return pack_message(header, *data, size=self.layout.size, device=self.device)

    def exchange(self, message: Tensor, exchange: Exchange, header: Header) -> Tensor:
        """Exchanges the messages; returns the result uint8 [rows, B], the same bytes on every rank."""
        del header
        return exchange.all_gather(message)

    def decode(self, bodies_WB: Tensor) -> tuple[Decoded, Tensor]:
        """Decodes the result without waiting for the device; also returns each body's number of faults, int64 [W]."""
        found, faults = self.layout.decode(bodies_WB, self.devices)
        return found, count_faults(faults, bodies_WB)

    def check(self, result: Result, expected: Header) -> tuple[int, Decoded]:
        """Checks all of the result; returns the union of its flags, and the input of `apply`. Raises MessageError."""
        flags = check_headers(result.headers, expected, self.layout.size)
        if flags & NONFINITE:
            return flags, []
        decoded = result.decoded or self.layout.checked(result.messages[:, HEADER_BYTES:])
        samples = tuple([header.samples for header in result.headers])  # weights of the ranks where all signs are sent
        return flags, [replace(each, samples=samples) for each in decoded]

    def owner_state(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yields each parameter of which this rank owns chunks, with the state of these chunks; tensors are views."""
        yield from ()

    def apply(self, decoded: Decoded, round_number: int) -> None:
        """Updates the parameters of all chunk groups; `round_number` as in `decompress`."""
        for chunk_group, coefficients in zip(self.chunk_groups, self._trusted(decoded), strict=True):
            decompress(chunk_group, coefficients, round_number, self.workspace)

    def subtract_sent(self, data: list[Tensor], decoded: Decoded | None = None, row: int = 0) -> str:
        """The rest of step 4: the coefficients in this rank's message, which all have applied, leave its momentum.

        They are decoded from the message's bytes `data`, or are row `row` of `decoded`. If memory runs out, momenta
        that still have some of them are dropped: a later round would apply these again. Returns that error, or "".
        """
        done = 0
        try:
            mine = self._own(data) if decoded is None else [coefficients.rank(row) for coefficients in decoded]
            for chunk_group, coefficients in zip(self.chunk_groups, mine, strict=False):  # none if `data` is empty
                subtract_sent(chunk_group, coefficients)
                done += 1
        except (MemoryError, RuntimeError) as error:
            for chunk_group in self.chunk_groups[done:]:
                chunk_group.momentum.zero_()
            return first_line(error)
        return ""

    def _own(self, data: list[Tensor]) -> Decoded:
        """Returns the coefficients in the bytes of this rank's message."""
        if self.device.type != "cpu" and data:  # its own bytes need no check, which would wait for the device
            body = torch.cat([each.to(self.device) for each in data])
            return self.layout.decode(body.unsqueeze(0), self.devices)[0]
        pairs = zip(self.layout.sections, data, strict=False)
        return [section.checked(each.unsqueeze(0)) for section, each in pairs]

    def _trusted(self, decoded: Decoded) -> Decoded:
        """With clip_to_median, leaves out the ranks that work against the others. Their momenta lose all they sent."""
        judged = [number for number, group in enumerate(self.chunk_groups) if group.settings.clip_to_median]
        if not judged or decoded[0].world_size < 3:
            return decoded
        agreements = [decoded[number].with_float64().agreement() for number in judged]
        ranks = trusted(torch.stack([each.cpu() for each in agreements]).sum(0))
        if len(ranks) == decoded[0].world_size:
            return decoded
        return [each.ranks(ranks) if number in judged else each for number, each in enumerate(decoded)]


def read_result(route: Route, messages: Tensor) -> Result:
    """Reads the result of a route's `exchange`; MessageError if its rows are no messages. Nothing else is checked."""
    if not isinstance(messages, Tensor):
        raise TypeError(f"messages is a {type(messages).__name__}; give the tensor of all messages, uint8 [W, B]")
    fits = messages.dim() == 2 and messages.shape[1] == route.widths[1] and messages.dtype == torch.uint8
    if route.device.type == "cpu" or not fits:
        return Result(messages, messages._version, read_headers(messages))
    here = messages.to(route.device, non_blocking=True)
    decoded, invalid = route.decode(here[:, HEADER_BYTES:])
    headers = read_headers(here, invalid)
    valid = not any(header.has_faults for header in headers)
    return Result(messages, messages._version, headers, decoded if valid else None)


def count_faults(faults: Faults, bodies_WB: Tensor) -> Tensor:
    """Returns the number of faults in each rank's body, int64 [W], on the bodies' device."""
    if not faults:
        return bodies_WB.new_zeros(len(bodies_WB), dtype=torch.int64)
    return torch.cat([fault.flatten(1).to(bodies_WB.device) for _, fault in faults], dim=1).sum(1)
