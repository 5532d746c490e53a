"""relay: like owner, but an owner answers with its K2 strongest coefficients. About B + B2 bytes received, for any W.

1. Every rank cuts its message into parts, one per owner (all_to_all).
2. An owner adds the aggregate Q of its chunks to what it has kept back: A <- A + Q. It answers with the K2 strongest
   coefficients of A, quantised as in a message, q2, and keeps the rest: A <- A - q2, a second error feedback.
3. All answers go to all ranks (all_gather); the update is U = T^-1(q2).

Unlike `owner`, it changes the algorithm: coefficients that are not among the K2 are sent later. `state[p]["relay"]` is
A, for the chunks of p that this rank owns.

Shapes: W ranks, B bytes in a message (B2 with K2 coefficients), C chunks, N elements in a chunk, K kept, K2 answered.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from demopt.core.select import strongest
from demopt.errors import MessageError
from demopt.exchange import Exchange
from demopt.optim.chunk_group import ChunkGroup
from demopt.optim.compress import Workspace
from demopt.optim.decompress import reduced, update
from demopt.optim.routes.interface import Team
from demopt.optim.routes.owned import OwnedRoute
from demopt.optim.routes.parts import Parts
from demopt.wire.coefficients import Coefficients
from demopt.wire.frame import HEADER_BYTES, Header
from demopt.wire.layout import Section


class Relay(OwnedRoute):
    """Owners answer with their strongest coefficients."""

    def __init__(self, chunk_groups: list[ChunkGroup], team: Team, workspace: Workspace) -> None:
        super().__init__(chunk_groups, team, workspace)
        self.answers = Parts(tuple(replace(b.section, keep=b.key.relay_keep) for b in chunk_groups), team.world_size)
        self._received: Tensor | None = None  # between exchange and apply: the parts behind the answer
        self._answered: list[Tensor] = []
        for number, chunk_group in enumerate(chunk_groups):
            chunk_group.own(*self.parts.range(number, team.rank))

    @property
    def answer_bytes(self) -> int:
        return self.answers.layouts[0].size

    def exchange(self, message: Tensor, exchange: Exchange, header: Header) -> Tensor:
        self._received, self._answered = None, []
        return super().exchange(message, exchange, header)

    def answer(self, parts_WB: Tensor) -> Tensor:
        """Returns the K2 strongest coefficients of this owner's chunks, encoded."""
        layout, answers = self.parts.layouts[self.team.rank], self.answers.layouts[self.team.rank]
        for section, data in zip(layout.sections, layout.bodies(parts_WB[:, HEADER_BYTES:]), strict=True):
            self._check(section, data)
        self._answered = [self._strongest(number, parts_WB) for number in range(len(self.chunk_groups))]
        self._received = parts_WB
        return answers.join(self._answered, parts_WB.device)

    def check_answers(self, messages: Tensor) -> None:
        for owner, layout in enumerate(self.answers.layouts):
            for section, data in zip(layout.sections, layout.bodies(messages[:, HEADER_BYTES:]), strict=True):
                self._check(section, data[owner : owner + 1], owner)

    def apply(self, messages: Tensor) -> None:
        for number, chunk_group in enumerate(self.chunk_groups):
            for block in chunk_group.blocks:
                runs = self.parts.owners(number, block.start, block.stop)
                coefficients = Coefficients.joined([self._run(messages, number, *run) for run in runs])
                update(chunk_group, [block], coefficients, self.workspace)
        self.keep()

    def keep(self) -> None:
        """A <- A + Q - q2. Runs only after all ranks have the answers, so that a vetoed round changes nothing."""
        if self._received is None:
            return
        for number, chunk_group in enumerate(self.chunk_groups):
            kept_back = self._kept_back(number)
            for start, stop, aggregate in self._aggregates(number, self._received[:, HEADER_BYTES:]):
                kept_back[start:stop].add_(aggregate)
            section = self.answers.layouts[self.team.rank].sections[number]
            if section.chunks:
                answered = section.decode(self._answered[number].unsqueeze(0), 0, section.chunks)
                kept_back.scatter_add_(1, answered.positions[0], -answered.values[0].to(chunk_group.key.dtype))
        self._received = None

    def _strongest(self, number: int, parts_WB: Tensor) -> Tensor:
        """Encodes the K2 strongest coefficients of each chunk of A + Q."""
        chunk_group = self.chunk_groups[number]
        section = self.answers.layouts[self.team.rank].sections[number]
        positions = torch.zeros(section.chunks, section.keep, dtype=torch.int64, device=chunk_group.key.device)
        values = torch.zeros(section.chunks, section.keep, dtype=chunk_group.key.dtype, device=chunk_group.key.device)
        for start, stop, aggregate in self._aggregates(number, parts_WB[:, HEADER_BYTES:]):
            total = aggregate.add_(self._kept_back(number)[start:stop])
            positions[start:stop], values[start:stop] = strongest(total, section.keep)
        return section.encode(positions, values)

    def _kept_back(self, number: int) -> Tensor:
        """Returns A [C, N] of this owner's run of a chunk group."""
        kept_back = self.chunk_groups[number].relay
        assert kept_back is not None
        return kept_back

    def _aggregates(self, number: int, bodies_WB: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yields Q of this owner's run of a chunk group, some chunks [start, stop) at a time, in the workspace."""
        chunk_group, layout = self.chunk_groups[number], self.parts.layouts[self.team.rank]
        section, data_WB = layout.sections[number], layout.bodies(bodies_WB)[number].to(chunk_group.key.device)
        for start in range(0, section.chunks, chunk_group.block_chunks):
            stop = min(start + chunk_group.block_chunks, section.chunks)
            coefficients = section.decode(data_WB, start, stop)
            yield start, stop, reduced(chunk_group, coefficients, self.workspace.pair(chunk_group, stop - start))

    def _run(self, messages: Tensor, number: int, owner: int, start: int, stop: int) -> Coefficients:
        """Decodes chunks [start, stop) of a chunk group from their owner's answer."""
        first, _ = self.parts.range(number, owner)
        layout = self.answers.layouts[owner]
        data = layout.bodies(messages[owner : owner + 1, HEADER_BYTES:])[number]
        return layout.sections[number].decode(
            data.to(self.chunk_groups[number].key.device), start - first, stop - first
        )

    @staticmethod
    def _check(section: Section, data_WB: Tensor, rank: int | None = None) -> None:
        """Raises MessageError unless all coefficients of a section are valid; `rank` is the sender of a single row."""
        try:
            section.decode(data_WB, 0, section.chunks).check(section.length)
        except MessageError as error:
            raise MessageError(error.reason, error.rank if rank is None else rank) from None
