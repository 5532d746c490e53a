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
from demopt.optim.chunk_group import ChunkGroup
from demopt.optim.compress import Workspace
from demopt.optim.decompress import update
from demopt.optim.routes.interface import Route, Team, Traffic, flags_of
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

    def __init__(self, chunk_groups: list[ChunkGroup], team: Team, workspace: Workspace) -> None:
        super().__init__(chunk_groups, team, workspace)
        self._values = sum(chunk_group.chunks * chunk_group.key.keep for chunk_group in chunk_groups)
        self._row = -(-4 * self._values // team.world_size)  # bytes of the sum in each row of the result
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
        values = [
            chunk_group.section.sent(part).to(self.device)
            for chunk_group, part in zip(self.chunk_groups, data, strict=False)
        ]
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
        dealt = torch.nn.functional.pad(
            values.view(torch.uint8), (0, self._row * self.team.world_size - 4 * self._values)
        )
        return torch.cat((heads, dealt.view(self.team.world_size, -1)), dim=1)

    def check(self, messages: Tensor, header: Header) -> list[Header]:
        if messages.dim() != 2 or messages.shape[1] != HEADER_BYTES + self._row:
            raise MessageError(f"got {list(messages.shape)} bytes, expected rows of {HEADER_BYTES + self._row}")
        headers = frame.check(messages[:, :HEADER_BYTES], header, 0)
        if not flags_of(headers) and not bool(torch.isfinite(self._sums(messages)).all()):
            raise MessageError("the sum of all ranks is NaN or infinite")
        return headers

    def apply(self, messages: Tensor) -> None:
        means, start = self._sums(messages) / self.team.world_size, 0
        for chunk_group in self.chunk_groups:
            keep = chunk_group.key.keep
            for block in chunk_group.blocks:
                positions = self._positions(chunk_group, block.start, block.stop)
                values = means[start : start + positions.numel()].view(1, -1, keep).to(chunk_group.key.device)
                start += positions.numel()
                coefficients = Coefficients(positions.unsqueeze(0), values)
                update(chunk_group, [block], coefficients, self.workspace)

    def traffic(self) -> Traffic:
        both = (self.team.world_size - 1) * HEADER_BYTES + all_reduce_bytes(4 * self._values, self.team.world_size)
        return Traffic(both, both)

    def _positions(self, chunk_group: ChunkGroup, start: int, stop: int) -> Tensor:
        kind = chunk_group.key
        return positions_at(self._step, kind.length, kind.keep, start, stop).to(kind.device)

    def _sums(self, messages: Tensor) -> Tensor:
        dealt = messages[:, HEADER_BYTES:].reshape(-1)[: 4 * self._values]
        return dealt.clone().view(torch.float32)
