"""gather: every rank receives every message, and all compute the same sums. (W - 1) B received.

Shapes: W ranks, B bytes in a message, C chunks, K kept.
"""

from torch import Tensor

from demopt.codec.decompress import ShardedMatrices, decompress
from demopt.exchange import Exchange
from demopt.replicator.route import Route, Traffic, empty_body, weighted
from demopt.wire import message as wire
from demopt.wire.coefficients import Coefficients, SignBits
from demopt.wire.message import HEADER_BYTES, Header, RawHeader


class Gather(Route):
    """One all_gather; the messages themselves are the result."""

    name = "gather"
    collectives = 1

    @property
    def widths(self) -> tuple[int, int]:
        return 2 * (HEADER_BYTES + self.layout.size,)

    @property
    def traffic(self) -> Traffic:
        others = (self.world_size - 1) * self.widths[0]
        return Traffic(others, others)

    def message(self, header: Header, data: list[Tensor]) -> Tensor:
        return wire.build(header, self.layout.join(data, self.device))

    def exchange(self, message: Tensor, exchange: Exchange, header: Header) -> Tensor:
        del header
        return exchange.all_gather(message)

    def check(
        self, messages: Tensor, received: list[RawHeader], header: Header
    ) -> tuple[list[Header], list[Coefficients | SignBits]]:
        headers = wire.check(received, header, self.layout.size)
        if empty_body(headers):
            return headers, []
        bodies = self.layout.bodies(messages[:, HEADER_BYTES:])
        groups = zip(self.chunk_groups, bodies, strict=True)
        samples = tuple([header.samples for header in headers])
        return headers, [weighted(group.section.received(data.to(group.key.device)), samples) for group, data in groups]

    def sent(self, data: list[Tensor], decoded: list[Coefficients | SignBits] | None) -> list[Coefficients | SignBits]:
        if decoded is None or not data:
            return super().sent(data, decoded)
        return [coefficients.rank(self.rank) for coefficients in decoded]

    def apply(self, decoded: list[Coefficients | SignBits], step: int, sharded: ShardedMatrices) -> None:
        for chunk_group, coefficients in zip(self.chunk_groups, decoded, strict=True):
            decompress(chunk_group, coefficients, step, self.workspace, sharded)
