"""shared: all ranks send the same positions, so an all_reduce sums the values. At most 2 C K float32 values, any W.

Positions are not sent. Every ceil(N / K) steps, all ranks draw a random order of the N positions, seeded by the step's
number, and each step sends the next K: in ceil(N / K) steps every coefficient is sent at least once, and exactly once
if K divides N. Chunk c starts c K places further on, so that not all chunks send the same frequencies at once.

Unlike `gather`, it changes the algorithm: it does not send the strongest coefficients. All ranks send each position, so
reductions "senders" and "mean" are the same.

Shapes: W ranks, C chunks, N elements in a chunk, K kept.
"""

import math

import torch
from torch import Tensor

from demopt.errors import MessageError
from demopt.exchange import Exchange
from demopt.exchange.wrappers import all_reduce_bytes
from demopt.optim.bucket import Bucket
from demopt.optim.combine import update
from demopt.optim.routes.interface import Route, Team, Traffic, flags_of
from demopt.optim.stages import Workspace
from demopt.wire import frame
from demopt.wire.coefficients import Coefficients
from demopt.wire.frame import HEADER_BYTES, Header


def positions_at(step: int, length: int, keep: int, first: int, stop: int) -> Tensor:
    """Returns the positions [C, K] (int64, ascending) that chunks [first, stop) send at a step.

    Example:
        >>> visited = torch.cat([positions_at(step, length=6, keep=2, first=0, stop=1) for step in range(3)], dim=1)
        >>> visited.sort().values
        tensor([[0, 1, 2, 3, 4, 5]])
    """
    cycle = math.ceil(length / keep)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(step // cycle))
    begin = (step % cycle + torch.arange(first, stop)) * keep
    return order[(begin.unsqueeze(1) + torch.arange(keep)) % length].sort(dim=1).values


class Shared(Route):
    """Does an all_gather of headers, then one all_reduce of float32 values."""

    def __init__(self, buckets: list[Bucket], team: Team, workspace: Workspace) -> None:
        super().__init__(buckets, team, workspace)
        self._values = sum(bucket.tiles * bucket.kind.keep for bucket in buckets)
        self._row = -(-4 * self._values // team.world)  # bytes of the sum in each row of the result
        self._step = 0
        self.chosen = self._positions

    def begin(self, step: int) -> None:
        self._step = step

    @property
    def widths(self) -> tuple[int, int]:
        return HEADER_BYTES + 4 * self._values, HEADER_BYTES + self._row

    def message(self, header: Header, data: list[Tensor]) -> Tensor:
        """Returns the header as a frame without a body, then the values as float32."""
        head = frame.build(header, torch.zeros(0, dtype=torch.uint8, device=self.device))
        values = [bucket.section.sent(part).to(self.device) for bucket, part in zip(self.buckets, data, strict=False)]
        flat = (
            torch.cat([value.reshape(-1) for value in values])
            if values
            else torch.zeros(self._values, device=self.device)
        )
        return torch.cat((head, flat.to(torch.float32).view(torch.uint8)))

    def exchange(self, message: Tensor, exchange: Exchange, header: Header) -> Tensor:
        """Returns the headers uint8 [W, 64], each followed by 1/W of the bytes of the sum."""
        del header
        heads = exchange.all_gather(message[:HEADER_BYTES].clone())
        values = message[HEADER_BYTES:].clone().view(torch.float32)
        exchange.all_reduce(values)
        dealt = torch.nn.functional.pad(values.view(torch.uint8), (0, self._row * self.team.world - 4 * self._values))
        return torch.cat((heads, dealt.view(self.team.world, -1)), dim=1)

    def check(self, messages: Tensor, header: Header) -> list[Header]:
        if messages.dim() != 2 or messages.shape[1] != HEADER_BYTES + self._row:
            raise MessageError(f"got {list(messages.shape)} bytes, expected rows of {HEADER_BYTES + self._row}")
        headers = frame.check(messages[:, :HEADER_BYTES], header, 0)
        if not flags_of(headers) and not bool(torch.isfinite(self._sums(messages)).all()):
            raise MessageError("the sum of all ranks is NaN or infinite")
        return headers

    def apply(self, messages: Tensor) -> None:
        means, start = self._sums(messages) / self.team.world, 0
        for bucket in self.buckets:
            keep = bucket.kind.keep
            for block in bucket.blocks:
                positions = self._positions(bucket, block.start, block.stop)
                values = means[start : start + positions.numel()].view(1, -1, keep).to(bucket.kind.device)
                start += positions.numel()
                coefficients = Coefficients(positions.unsqueeze(0), values)
                update(bucket, [block], coefficients, self.workspace)

    def traffic(self) -> Traffic:
        both = (self.team.world - 1) * HEADER_BYTES + all_reduce_bytes(4 * self._values, self.team.world)
        return Traffic(both, both)

    def _positions(self, bucket: Bucket, start: int, stop: int) -> Tensor:
        kind = bucket.kind
        return positions_at(self._step, kind.length, kind.keep, start, stop).to(kind.device)

    def _sums(self, messages: Tensor) -> Tensor:
        dealt = messages[:, HEADER_BYTES:].reshape(-1)[: 4 * self._values]
        return dealt.clone().view(torch.float32)
