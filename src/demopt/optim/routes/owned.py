"""The base of routes "owner" and "relay": each rank owns 1/W of the chunks, reduces them, and sends the answer to all.

Shapes: W ranks, B bytes in a message, C chunks.
"""

from abc import abstractmethod
from dataclasses import replace

from torch import Tensor

from demopt.errors import MessageError
from demopt.exchange import Exchange
from demopt.optim.chunk_group import ChunkGroup
from demopt.optim.compress import Workspace
from demopt.optim.routes.interface import Route, Team, Traffic, flags_of
from demopt.optim.routes.parts import Parts, check_refusals, refusal
from demopt.wire import frame
from demopt.wire.frame import HEADER_BYTES, Header


class OwnedRoute(Route):
    """Does an all_to_all of message parts, one for each owner, then an all_gather of the owners' answers."""

    def __init__(self, chunk_groups: list[ChunkGroup], team: Team, workspace: Workspace) -> None:
        super().__init__(chunk_groups, team, workspace)
        self.parts = Parts(self.layout.sections, team.world_size)

    @property
    @abstractmethod
    def answer_bytes(self) -> int:
        """The bytes in the body of an answer, equal for all owners."""

    @abstractmethod
    def answer(self, parts_WB: Tensor) -> Tensor:
        """Computes the body of this owner's answer from the frames of its parts; MessageError if one is invalid."""

    @abstractmethod
    def check_answers(self, messages: Tensor) -> None:
        """Raises MessageError if an owner's answer is invalid."""

    @property
    def widths(self) -> tuple[int, int]:
        part = HEADER_BYTES + self.parts.layouts[0].size
        return self.team.world_size * part, HEADER_BYTES + self.answer_bytes

    def message(self, header: Header, data: list[Tensor]) -> Tensor:
        """Builds the parts for all owners, one after the other, each a frame."""
        return self.parts.message(header, data, self.device)

    def exchange(self, message: Tensor, exchange: Exchange, header: Header) -> Tensor:
        parts_WB = exchange.all_to_all(message.view(self.team.world_size, -1))
        return exchange.all_gather(self._answer(parts_WB, header))

    def check(self, messages: Tensor, header: Header) -> list[Header]:
        headers = frame.check(messages, header, self.answer_bytes, answers=True)
        check_refusals(headers)
        if not flags_of(headers):
            self.check_answers(messages)
        return headers

    def traffic(self) -> Traffic:
        message, answer = self.widths
        both = (self.team.world_size - 1) * (message // self.team.world_size + answer)
        return Traffic(both, both)

    def _answer(self, parts_WB: Tensor, header: Header) -> Tensor:
        """Builds this owner's frame; flagged and with zeros as its body if a part is flagged or refused."""
        layout, nothing = self.parts.layouts[self.team.rank], parts_WB.new_zeros(self.answer_bytes)
        try:
            flags = flags_of(frame.check(parts_WB, replace(header, layout=layout.digest), layout.size))
            body = nothing if flags else self.answer(parts_WB)
        except MessageError as error:
            return frame.build(refusal(header, error), nothing)
        return frame.build(replace(header, flags=header.flags | flags), body)
