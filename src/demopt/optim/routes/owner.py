"""owner: each rank reduces 1/W of the chunks and sends back the signs. About B + P/8 bytes received, for any W.

1. Every rank cuts its message into parts, one per owner (all_to_all).
2. An owner decodes its parts as `gather` would, and answers with the signs of its chunks: one bit per element, and one
   bit per chunk, which is 0 if nothing was sent. Where zeros carry meaning (float values, identity transform), it uses
   two bits per element instead.
3. All answers go to all ranks (all_gather), which apply them.

The direction has the same bits as with `gather`. Signs are enough for update "signum" only.

Shapes: W ranks, B bytes in a message, C chunks, N elements in a chunk (r rows, c columns), K kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from demopt.core.update import rule_of
from demopt.errors import MessageError
from demopt.optim.chunk_group import ChunkGroup
from demopt.optim.compress import Workspace
from demopt.optim.decompress import clipped, direction, update_parameters
from demopt.optim.routes.owned import OwnedRoute
from demopt.wire.bits import pack, packed_bytes, unpack
from demopt.wire.coefficients import Coefficients
from demopt.wire.frame import HEADER_BYTES


@dataclass(frozen=True)
class Signs:
    """The layout of the signs of a run of chunks: `bits` per element, after one bit per chunk if `bits` is 1.

    Examples:
        >>> Signs(chunks=8, length=4096, bits=1).size
        4097
    """

    chunks: int
    length: int
    bits: int

    @property
    def size(self) -> int:
        """The bytes of these signs in the answer."""
        return self._maps + packed_bytes(self.chunks * self.length, self.bits)

    @property
    def _maps(self) -> int:
        return packed_bytes(self.chunks, 1) if self.bits == 1 else 0

    def encode(self, direction_CN: Tensor) -> Tensor:
        """Encodes elements -1, 0 and 1 as uint8 [size]; with one bit, a chunk must be all zero or all nonzero."""
        if self.bits == 2:
            return pack(direction_CN.to(torch.int32) + 1, 2)
        return torch.cat((pack(direction_CN[:, 0] != 0, 1), pack(direction_CN > 0, 1)))

    def check(self, data_B: Tensor, rank: int) -> None:
        """Raises MessageError if two bits encode none of -1, 0 and 1."""
        if self.bits == 2 and bool((data_B & data_B >> 1 & 0b01010101).any()):
            raise MessageError("an element has a sign that is none", rank)

    def decode(self, data_B: Tensor, start: int, stop: int) -> Tensor:
        """Decodes chunks [start, stop) to [C, N] of -1, 0 and 1; `start` is a multiple of GRANULE."""
        count = (stop - start) * self.length
        first, last = (self._maps + packed_bytes(chunk * self.length, self.bits) for chunk in (start, stop))
        numbers = unpack(data_B[first:last], self.bits, count).view(stop - start, self.length)
        if self.bits == 2:
            return numbers - 1
        present = unpack(data_B[start // 8 : packed_bytes(stop, 1)], 1, stop - start)
        return (2 * numbers - 1) * present.unsqueeze(1)


@dataclass(frozen=True)
class SignLayout:
    """The layout of an owner's answer: the signs of its run of every chunk group, padded as a `Layout` is."""

    sections: tuple[Signs, ...]
    least: int = 0

    @cached_property
    def size(self) -> int:
        """The bytes of the body, padded to a multiple of 8 and to `least`."""
        return max(self.least, -(-sum(section.size for section in self.sections) // 8) * 8)

    def start(self, number: int) -> int:
        """Returns the first byte of a section in the body."""
        return sum(section.size for section in self.sections[:number])


class Owner(OwnedRoute):
    """Owners answer with signs."""

    name = "owner"

    def __init__(self, chunk_groups: list[ChunkGroup], rank: int, world_size: int, workspace: Workspace) -> None:
        super().__init__(chunk_groups, rank, world_size, workspace)
        self._answers = self._answer_layouts()

    @classmethod
    def refusal(cls, group: Mapping[str, Any]) -> str:
        rule = rule_of(group["update"])
        if rule.signs_only:
            return ""
        return f"route 'owner' sends back signs, so it needs update 'signum', not {rule.name!r}; use 'relay'"

    @property
    def answer_bytes(self) -> int:
        return self._answers[0].size

    def answer(self, parts: list[Coefficients]) -> tuple[Tensor, None]:
        """Returns the signs of this owner's chunks."""
        body = torch.zeros(self.answer_bytes, dtype=torch.uint8, device=self.device)
        signs = [self._signs_of(number, coefficients) for number, coefficients in enumerate(parts)]
        joined = torch.cat([body[:0], *signs])
        body[: joined.numel()] = joined
        return body, None

    def decode_answers(self, messages: Tensor) -> Tensor:
        """Returns the messages, because signs are decoded fastest block by block; they are valid, all of them."""
        for owner, answers in enumerate(self._answers):
            for number, signs in enumerate(answers.sections):
                at = HEADER_BYTES + answers.start(number)
                signs.check(messages[owner, at : at + signs.size], owner)
        return messages

    def apply(self, decoded: Tensor) -> None:
        for number, chunk_group in enumerate(self.chunk_groups):
            for block in chunk_group.blocks:
                chunks, _ = self.workspace.pair(chunk_group, block.stop - block.start)
                flat = chunks.view(-1, chunk_group.key.length)
                for owner, start, stop in self.parts.owners(number, block.start, block.stop):
                    run = flat[start - block.start : stop - block.start]
                    run.copy_(self._answered(decoded[owner, HEADER_BYTES:], number, owner, start, stop))
                update_parameters(chunk_group, block, chunks)

    def _answer_layouts(self) -> list[SignLayout]:
        layouts = []
        for owner in range(self.world_size):
            runs = []
            for number, chunk_group in enumerate(self.chunk_groups):
                start, stop = self.parts.range(number, owner)
                runs.append(Signs(stop - start, chunk_group.key.length, bits=1 if chunk_group.key.ties else 2))
            layouts.append(SignLayout(tuple(runs)))
        least = max(layout.size for layout in layouts)
        return [replace(layout, least=least) for layout in layouts]

    def _signs_of(self, number: int, part: Coefficients) -> Tensor:
        """Returns the encoded signs of this owner's run of a chunk group."""
        chunk_group, answer = self.chunk_groups[number], self._answers[self.rank].sections[number]
        run = torch.zeros(answer.chunks, answer.length, dtype=torch.int8, device=chunk_group.key.device)
        for start in range(0, answer.chunks, chunk_group.block_chunks):
            stop = min(start + chunk_group.block_chunks, answer.chunks)
            pair = self.workspace.pair(chunk_group, stop - start)
            signs = direction(chunk_group, clipped(chunk_group, part.chunks(start, stop)), pair)
            run[start:stop] = signs.view(-1, answer.length)
        return answer.encode(run.to(self.device))

    def _answered(self, body_B: Tensor, number: int, owner: int, start: int, stop: int) -> Tensor:
        """Decodes chunks [start, stop) of a chunk group from their owner's answer."""
        first, _ = self.parts.range(number, owner)
        answers = self._answers[owner]
        signs, at = answers.sections[number], answers.start(number)
        return signs.decode(body_B[at : at + signs.size], start - first, stop - first)
