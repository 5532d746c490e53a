"""gather: every rank receives every message, and all compute the same sums. (W - 1) B received.

Shapes: W ranks, B bytes in a message, C chunks, K kept.
"""

from torch import Tensor

from demopt.codec.decompress import ShardedMatrices, decompress
from demopt.exchange import Exchange
from demopt.replicator.route import Arrived, Route, Traffic, any_of, empty_body, weighted
from demopt.wire import message as wire
from demopt.wire.coefficients import Coefficients, SignBits
from demopt.wire.message import HEADER_BYTES, Header


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

    def unchecked(self, bodies_WB: Tensor) -> tuple[list[Coefficients | SignBits], Tensor]:
        groups = zip(self.chunk_groups, self.layout.bodies(bodies_WB), strict=True)
        found = [group.section.unchecked(data.to(group.key.device)) for group, data in groups]
        return [decoded for decoded, _ in found], any_of([invalid for _, invalid in found], bodies_WB)

    def check(self, arrived: Arrived, header: Header) -> tuple[list[Header], list[Coefficients | SignBits]]:
        headers = wire.check(arrived.headers, header, self.layout.size)
        if empty_body(headers):
            return headers, []
        decoded = arrived.decoded
        if decoded is None:
            bodies = self.layout.bodies(arrived.messages[:, HEADER_BYTES:])
            groups = zip(self.chunk_groups, bodies, strict=True)
            decoded = [group.section.received(data.to(group.key.device)) for group, data in groups]
        samples = tuple([header.samples for header in headers])
        return headers, [weighted(coefficients, samples) for coefficients in decoded]

    def sent(self, data: list[Tensor], decoded: list[Coefficients | SignBits] | None) -> list[Coefficients | SignBits]:
        if decoded is None or not data:
            return super().sent(data, decoded)
        return [coefficients.rank(self.rank) for coefficients in decoded]

    def apply(self, decoded: list[Coefficients | SignBits], step: int, sharded: ShardedMatrices) -> None:
        for chunk_group, coefficients in zip(self.chunk_groups, decoded, strict=True):
            decompress(chunk_group, coefficients, step, self.workspace, sharded)
