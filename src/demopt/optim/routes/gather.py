"""gather: every rank receives every message, and all compute the same sums. (W - 1) B received.

Shapes: W ranks, B bytes in a message, C chunks, K kept.
"""

from collections.abc import Iterator

from torch import Tensor

from demopt.exchange import Exchange
from demopt.optim.chunk_group import Block, ChunkGroup
from demopt.optim.decompress import update
from demopt.optim.routes.interface import Route, Traffic, flags_of
from demopt.wire import frame
from demopt.wire.coefficients import Coefficients
from demopt.wire.frame import Header


class Gather(Route):
    """One all_gather; the messages themselves are the result."""

    @property
    def widths(self) -> tuple[int, int]:
        return 2 * (frame.HEADER_BYTES + self.layout.size,)

    def message(self, header: Header, data: list[Tensor]) -> Tensor:
        return frame.build(header, self.layout.join(data, self.device))

    def exchange(self, message: Tensor, exchange: Exchange, header: Header) -> Tensor:
        del header
        return exchange.all_gather(message)

    def check(self, messages: Tensor, header: Header) -> list[Header]:
        headers = frame.check(messages, header, self.layout.size)
        if not flags_of(headers):
            for chunk_group, _, coefficients in self._decoded(messages):
                coefficients.check(chunk_group.key.length)
        return headers

    def apply(self, messages: Tensor) -> None:
        for chunk_group, span, coefficients in self._decoded(messages):
            update(chunk_group, span, coefficients, self.workspace)

    def traffic(self) -> Traffic:
        others = (self.team.world_size - 1) * (frame.HEADER_BYTES + self.layout.size)
        return Traffic(others, others)

    def _decoded(self, messages: Tensor) -> Iterator[tuple[ChunkGroup, list[Block], Coefficients]]:
        """Yields the coefficients of all ranks, a span of blocks at a time."""
        bodies = self.layout.bodies(messages[:, frame.HEADER_BYTES :])
        for chunk_group, data in zip(self.chunk_groups, bodies, strict=True):
            local = data.to(chunk_group.key.device)
            for span in chunk_group.spans(messages.shape[0]):
                yield chunk_group, span, chunk_group.section.decode(local, span[0].start, span[-1].stop)
