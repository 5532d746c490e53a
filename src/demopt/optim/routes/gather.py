"""gather: every rank receives every message, and all compute the same sums. (W - 1) B received.

Shapes: W ranks, B bytes in a message, C chunks, K kept.
"""

from collections.abc import Iterator

from torch import Tensor

from demopt.exchange import Exchange
from demopt.optim.bucket import Block, Bucket
from demopt.optim.combine import update
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
            for bucket, _, coefficients in self._decoded(messages):
                coefficients.check(bucket.kind.length)
        return headers

    def apply(self, messages: Tensor) -> None:
        for bucket, span, coefficients in self._decoded(messages):
            update(bucket, span, coefficients, self.workspace)

    def traffic(self) -> Traffic:
        others = (self.team.world - 1) * (frame.HEADER_BYTES + self.layout.size)
        return Traffic(others, others)

    def _decoded(self, messages: Tensor) -> Iterator[tuple[Bucket, list[Block], Coefficients]]:
        """Yields the coefficients of all ranks, a span of blocks at a time."""
        bodies = self.layout.bodies(messages[:, frame.HEADER_BYTES :])
        for bucket, data in zip(self.buckets, bodies, strict=True):
            local = data.to(bucket.kind.device)
            for span in bucket.spans(messages.shape[0]):
                yield bucket, span, bucket.section.decode(local, span[0].start, span[-1].stop)
