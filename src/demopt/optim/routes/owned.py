"""The base of routes "owner" and "relay": each rank owns 1/W of the chunks, reduces them, and sends the answer to all.

Shapes: W ranks, B bytes in a message, C chunks.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import Any

from torch import Tensor

from demopt.errors import MessageError
from demopt.exchange import Exchange
from demopt.optim.chunk_group import ChunkGroup
from demopt.optim.compress import Workspace
from demopt.optim.routes.parts import Parts, check_refusals, refusal
from demopt.optim.routes.route import Route, Traffic, flags_of, received
from demopt.wire import frame
from demopt.wire.coefficients import Coefficients
from demopt.wire.frame import HEADER_BYTES, Header


class OwnedRoute(Route):
    """Does an all_to_all of message parts, one for each owner, then an all_gather of the owners' answers."""

    collectives = 2

    def __init__(self, chunk_groups: list[ChunkGroup], rank: int, world_size: int, workspace: Workspace) -> None:
        super().__init__(chunk_groups, rank, world_size, workspace)
        self.parts = Parts(self.layout.sections, world_size)

    @property
    @abstractmethod
    def answer_bytes(self) -> int:
        """The bytes in the body of an answer, equal for all owners."""

    @abstractmethod
    def answer(self, parts: list[Coefficients]) -> tuple[Tensor, Any]:
        """Computes the body of this owner's answer from its part of each chunk group, and what `finish` will want."""

    @abstractmethod
    def decode_answers(self, messages: Tensor) -> Any:
        """Decodes all owners' answers; raises MessageError if one is invalid."""

    @property
    def widths(self) -> tuple[int, int]:
        part = HEADER_BYTES + self.parts.layouts[0].size
        return self.world_size * part, HEADER_BYTES + self.answer_bytes

    def message(self, header: Header, data: list[Tensor]) -> Tensor:
        """Builds the parts for all owners, one after the other, each a frame."""
        return self.parts.message(header, data, self.device)

    def exchange(self, message: Tensor, exchange: Exchange, header: Header) -> tuple[Tensor, Any]:
        parts_WB = exchange.all_to_all(message.view(self.world_size, -1))
        answer, pending = self._answer(parts_WB, header)
        return exchange.all_gather(answer), pending

    def check(self, messages: Tensor, header: Header) -> tuple[list[Header], Any]:
        headers = frame.check(messages, header, self.answer_bytes, answers=True)
        check_refusals(headers)
        return headers, None if flags_of(headers) else self.decode_answers(messages)

    @property
    def traffic(self) -> Traffic:
        message, answer = self.widths
        both = (self.world_size - 1) * (message // self.world_size + answer)
        return Traffic(both, both)

    def _answer(self, parts_WB: Tensor, header: Header) -> tuple[Tensor, Any]:
        """Builds this owner's frame; flagged and with zeros as its body if a part is flagged or refused."""
        layout, nothing = self.parts.layouts[self.rank], parts_WB.new_zeros(self.answer_bytes)
        try:
            flags = flags_of(frame.check(parts_WB, replace(header, layout=layout.digest), layout.size))
            body, pending = (nothing, None) if flags else self.answer(self._decoded(parts_WB))
        except MessageError as error:
            return frame.build(refusal(header, error), nothing), None
        return frame.build(replace(header, flags=header.flags | flags), body), pending

    def _decoded(self, parts_WB: Tensor) -> list[Coefficients]:
        """Decodes and checks this owner's part of each chunk group."""
        layout = self.parts.layouts[self.rank]
        bodies = zip(self.chunk_groups, layout.sections, layout.bodies(parts_WB[:, HEADER_BYTES:]), strict=True)
        return [received(section, data.to(group.key.device)) for group, section, data in bodies]
