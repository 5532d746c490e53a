"""gather: every rank receives every message, and all compute the same sums. (W - 1) B received.

Shapes: W ranks, B bytes in a message, C chunks, K kept.
"""

from torch import Tensor

from demopt.exchange import Exchange
from demopt.optim.decompress import decompress
from demopt.optim.routes.route import Route, Traffic, flags_of, received
from demopt.wire import frame
from demopt.wire.coefficients import Coefficients
from demopt.wire.frame import Header


class Gather(Route):
    """One all_gather; the messages themselves are the result."""

    name = "gather"
    collectives = 1

    @property
    def widths(self) -> tuple[int, int]:
        return 2 * (frame.HEADER_BYTES + self.layout.size,)

    @property
    def traffic(self) -> Traffic:
        others = (self.world_size - 1) * self.widths[0]
        return Traffic(others, others)

    def message(self, header: Header, data: list[Tensor]) -> Tensor:
        return frame.build(header, self.layout.join(data, self.device))

    def exchange(self, message: Tensor, exchange: Exchange, header: Header) -> tuple[Tensor, None]:
        del header
        return exchange.all_gather(message), None

    def check(self, messages: Tensor, header: Header) -> tuple[list[Header], list[Coefficients]]:
        headers = frame.check(messages, header, self.layout.size)
        if flags_of(headers):
            return headers, []
        bodies = self.layout.bodies(messages[:, frame.HEADER_BYTES :])
        groups = zip(self.chunk_groups, bodies, strict=True)
        return headers, [received(group.section, data.to(group.key.device)) for group, data in groups]

    def apply(self, decoded: list[Coefficients]) -> None:
        for chunk_group, coefficients in zip(self.chunk_groups, decoded, strict=True):
            for blocks in chunk_group.spans(self.world_size):
                span = coefficients.chunks(blocks[0].start, blocks[-1].stop)
                decompress(chunk_group, blocks, span, self.workspace)
