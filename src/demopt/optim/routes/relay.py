"""relay: like owner, but an owner answers with its K2 strongest coefficients. About B + B2 bytes received, for any W.

1. Every rank cuts its message into parts, one per owner (all_to_all).
2. An owner adds the aggregate Q of its chunks to what it has kept back: A <- b A + Q, where b is 1 for momenta, and the
   decay of the error for movements. It answers with the K2 strongest coefficients of A, quantised as in a message,
   q2, and keeps the rest: A <- A - q2, a second error feedback.
3. All answers go to all ranks (all_gather); the update is U = T^-1(q2).

Unlike `owner`, it changes the algorithm: coefficients that are not among the K2 are sent later. `state[p]["relay"]` is
A, for the chunks of p that this rank owns.

Shapes: W ranks, B bytes in a message (B2 with K2 coefficients), C chunks, N elements in a chunk, K kept, K2 answered.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from demopt.core.select import strongest
from demopt.optim.chunk_group import ChunkGroup
from demopt.optim.compress import Workspace
from demopt.optim.decompress import clipped, decompress, reduce
from demopt.optim.routes.owned import OwnedRoute
from demopt.optim.routes.parts import Parts
from demopt.optim.routes.route import received
from demopt.optim.settings import keep_count
from demopt.wire.coefficients import Coefficients
from demopt.wire.frame import HEADER_BYTES

#: This owner's parts, decoded, and its answer's bytes, of each chunk group.
Pending = list[tuple[Coefficients, Tensor]]


class Relay(OwnedRoute):
    """Owners answer with their strongest coefficients."""

    name = "relay"
    like_gather = False
    state_names = ("relay", "relay_start")

    def __init__(self, chunk_groups: list[ChunkGroup], rank: int, world_size: int, workspace: Workspace) -> None:
        super().__init__(chunk_groups, rank, world_size, workspace)
        sections = tuple(
            replace(group.section, keep=keep_count(group.group["relay_top_k"], group.group, group.key.length))
            for group in chunk_groups
        )
        self.answers = Parts(sections, world_size)
        self.kept_back = []  # A of this owner's run of each chunk group, [C, N]
        for number, group in enumerate(chunk_groups):
            start, stop = self.parts.range(number, rank)
            self.kept_back.append(group.momentum.new_zeros(stop - start, group.key.length))

    @property
    def kept_back_bytes(self) -> int:
        return max(
            sum(
                (stop - start) * group.key.length * group.key.dtype.itemsize
                for number, group in enumerate(self.chunk_groups)
                for start, stop in [self.parts.range(number, owner)]
            )
            for owner in range(self.world_size)
        )

    @property
    def answer_bytes(self) -> int:
        return self.answers.layouts[0].size

    def answer(self, parts: list[Coefficients]) -> tuple[Tensor, Pending]:
        """Returns the K2 strongest coefficients of this owner's chunks, encoded."""
        pending = [(part, self._strongest(number, part)) for number, part in enumerate(parts)]
        return self.answers.layouts[self.rank].join([data for _, data in pending], self.device), pending

    def decode_answers(self, messages: Tensor) -> list[list[Coefficients]]:
        """Returns the coefficients of each owner's answer by chunk group."""
        answers = []
        for owner, layout in enumerate(self.answers.layouts):
            bodies = layout.bodies(messages[owner : owner + 1, HEADER_BYTES:])
            parts = zip(self.chunk_groups, layout.sections, bodies, strict=True)
            answers.append([received(section, data.to(group.key.device), owner) for group, section, data in parts])
        return answers

    def apply(self, decoded: list[list[Coefficients]]) -> None:
        for number, chunk_group in enumerate(self.chunk_groups):
            for block in chunk_group.blocks:
                runs = []
                for owner, start, stop in self.parts.owners(number, block.start, block.stop):
                    first, _ = self.parts.range(number, owner)
                    runs.append(decoded[owner][number].chunks(start - first, stop - first))
                decompress(chunk_group, [block], Coefficients.joined(runs), self.workspace)

    def finish(self, pending: Pending | None) -> None:
        """A <- A + Q - q2. Runs only after all ranks have the answers, so that a vetoed round changes nothing."""
        for number, (part, answer) in enumerate(pending or []):
            kept_back, section = self.kept_back[number], self.answers.layouts[self.rank].sections[number]
            for start, stop, aggregate in self._aggregates(number, part):
                kept_back[start:stop].mul_(self._memory(number)).add_(aggregate)
            if section.chunks:
                answered = section.decode(answer.unsqueeze(0), 0, section.chunks)
                kept_back.scatter_add_(1, answered.positions[0], -answered.values[0].to(kept_back.dtype))

    def state(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yields each parameter's rows of A, often none, as "relay", and the chunk of the first as "relay_start"."""
        for number, group in enumerate(self.chunk_groups):
            kept_back, (first, stop), start = self.kept_back[number], self.parts.range(number, self.rank), 0
            for parameter, whole in group.members:
                low, high = (min(max(at, first), stop) for at in (start, start + whole.chunks))
                yield (
                    parameter,
                    {"relay": kept_back[low - first : high - first], "relay_start": torch.tensor(low - start)},
                )
                start += whole.chunks

    def adopt(self, mine: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
        """Copies what this rank kept back for chunks that it still owns; zeros for chunks that another rank owned."""
        rows, start = mine["relay"], int(mine["relay_start"])
        rows.zero_()
        if "relay" not in saved or "relay_start" not in saved or saved["relay"].shape[1:] != rows.shape[1:]:
            return
        value, first = saved["relay"], int(saved["relay_start"])
        low, high = max(start, first), min(start + len(rows), first + len(value))
        if low < high:
            rows[low - start : high - start].copy_(value[low - first : high - first])

    def _memory(self, number: int) -> float:
        """Returns b: where ranks keep an error that decays, not a momentum, what an owner keeps decays alike."""
        group = self.chunk_groups[number].group
        return float(group["momentum"]) if group["gradient_scale"] == "sum" else 1.0

    def _strongest(self, number: int, part: Coefficients) -> Tensor:
        """Encodes the K2 strongest coefficients of each chunk of A + Q."""
        chunk_group = self.chunk_groups[number]
        section = self.answers.layouts[self.rank].sections[number]
        shape = (section.chunks, section.keep)
        positions = torch.zeros(shape, dtype=torch.int64, device=chunk_group.key.device)
        values = torch.zeros(shape, dtype=chunk_group.key.dtype, device=chunk_group.key.device)
        for start, stop, aggregate in self._aggregates(number, part):
            total = aggregate.add_(self.kept_back[number][start:stop], alpha=self._memory(number))
            positions[start:stop], values[start:stop] = strongest(total, section.keep)
        return section.encode(positions, values)

    def _aggregates(self, number: int, part: Coefficients) -> Iterator[tuple[int, int, Tensor]]:
        """Yields Q of this owner's run of a chunk group, some chunks [start, stop) at a time, in the workspace."""
        chunk_group, chunks = self.chunk_groups[number], part.positions.shape[1]
        for start in range(0, chunks, chunk_group.block_chunks):
            stop = min(start + chunk_group.block_chunks, chunks)
            pair = self.workspace.pair(chunk_group, stop - start)
            yield start, stop, reduce(chunk_group, clipped(chunk_group, part.chunks(start, stop)), pair)
