"""owner: each rank reduces 1/W of the chunks and sends back signs. Bytes received do not grow with W.

1. Every rank cuts its message into parts, one per owner (all_to_all).
2. An owner decodes its parts as `gather` would, and answers with signs of its chunks, one bit each:
   `UpdateSigns`: of the elements of the update, which is all that update "signum" needs; with one bit per chunk, which
   is 0 if nothing was sent. Where zeros carry meaning (float values, identity transform), two bits per element. A rank
   receives about B + P/8 bytes.
   `TwoWay`: of the coefficients, with a scale per chunk, as in the messages; the owner keeps the quantisation error. A
   rank receives about 2 B bytes.
3. All answers go to all ranks (all_gather), which apply them.

Shapes: W ranks, B bytes in a message, C chunks, N elements in a chunk (r rows, c columns), K kept, P parameters.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from demopt.codec.chunk_group import ChunkGroup
from demopt.codec.compress import Workspace, subtract
from demopt.codec.decompress import ShardedMatrices, decompress, direction, sum_and_encode, update_parameters
from demopt.codec.hyperparameters import Hyperparameters
from demopt.errors import MessageError
from demopt.exchange import Exchange
from demopt.replicator.route import OWNER_ERROR, OWNER_START, Gather, Result, Route, count_faults, read
from demopt.wire import message as wire
from demopt.wire.bits import pack, pack_sections, packed_bytes, unpack
from demopt.wire.coefficients import Coefficients, Faults, SignBits, refuse
from demopt.wire.layout import GRANULE, SIGN_GRANULE, Layout, Section, padded_alike
from demopt.wire.message import HEADER_BYTES, Header

NEEDS_GATHER = "clip_to_median needs route 'gather': an owner alone decides what it answers"


class Owner(Route):
    """An all_to_all of message parts, one for each owner, then an all_gather of the owners' answers."""

    name = "owner"
    collectives = 2
    granule = GRANULE  # chunks that one rank owns are whole granules
    answer_bytes: int  # of an answer's body, the same for all owners

    def __init__(self, chunk_groups: list[ChunkGroup], rank: int, world_size: int, workspace: Workspace) -> None:
        super().__init__(chunk_groups, rank, world_size, workspace)
        self.parts = Parts(self.layout.sections, world_size, self.granule)
        self._owned = Gather(chunk_groups, rank, world_size, workspace)  # which decodes the parts for this rank
        self._owned.layout = self.parts.layouts[rank]

    @cached_property
    def widths(self) -> tuple[int, int]:
        part = HEADER_BYTES + self.parts.layouts[0].size
        return self.world_size * part, HEADER_BYTES + self.answer_bytes

    @property
    def bytes_each_way(self) -> int:
        message, answer = self.widths
        return (self.world_size - 1) * (message // self.world_size + answer)

    def message(self, header: Header, data: list[Tensor]) -> Tensor:
        """Builds the parts for all owners, one after the other, each a message."""
        messages = []
        for layout, runs in zip(self.parts.layouts, self.parts.runs, strict=True):
            planes = []
            for section, bytes_B, run in zip(self.layout.sections, data, runs, strict=False):
                planes += section.cut(bytes_B, run)
            head = replace(header, layout=layout.digest)
            messages.append(wire.build(head, *planes, size=layout.size, device=self.device))
        return torch.cat(messages)

    def exchange(self, message: Tensor, exchange: Exchange, header: Header) -> Tensor:
        """Also answers as an owner; with zeros and a flag if a part is flagged or refused."""
        parts_WB, owned, planes = exchange.all_to_all(message.view(self.world_size, -1)), self._owned, []
        try:
            flags, decoded = owned.check(read(owned, parts_WB), replace(header, layout=owned.layout.digest))
            planes = [self.encode_answer(number, received) for number, received in enumerate(decoded)]
            head = replace(header, flags=header.flags | flags & (wire.NONFINITE | wire.NEW_LAYOUT))
        except MessageError as error:
            head = refusing(header, error)
        encoded = pack_sections(planes)
        return exchange.all_gather(wire.build(head, *encoded, size=self.answer_bytes, device=self.device))

    def check(self, result: Result, expected: Header) -> tuple[int, Any]:
        flags = wire.check(result.headers, expected, self.answer_bytes, answers=True)
        if flags & wire.NONFINITE:
            return flags, []
        return flags, result.decoded if result.decoded is not None else self.checked(result.messages[:, HEADER_BYTES:])

    @abstractmethod
    def checked(self, bodies_WB: Tensor) -> Any:
        """Checks the answers' bodies on a CPU, and decodes them; MessageError if one has a fault."""

    @abstractmethod
    def encode_answer(self, number: int, received: Coefficients | SignBits) -> list[Tensor]:
        """Encodes this owner's answer for its run of a chunk group, from all ranks' checked coefficients, as planes."""


class UpdateSigns(Owner):
    """Owners answer with the signs of the update, for update "signum": the same direction, bit for bit, as `Gather`."""

    def __init__(self, chunk_groups: list[ChunkGroup], rank: int, world_size: int, workspace: Workspace) -> None:
        super().__init__(chunk_groups, rank, world_size, workspace)
        layouts = []
        for runs in self.parts.runs:
            sections = []
            for chunk_group, run in zip(self.chunk_groups, runs, strict=True):
                bits = 1 if chunk_group.key.ties else 2
                sections.append(AnswerSection(run.stop - run.start, chunk_group.key.length, bits))
            layouts.append(Layout(tuple(sections)))
        self._answers = padded_alike(layouts)  # of each owner
        self.answer_bytes = self._answers[0].size

    @classmethod
    def unsupported(cls, settings: Hyperparameters) -> str:
        if settings.clip_to_median:
            return NEEDS_GATHER
        if settings.update.signs_only:
            return ""
        return f"route 'owner' sends back signs, so it needs update 'signum', not {settings.update.name!r}"

    def encode_answer(self, number: int, received: Coefficients | SignBits) -> list[Tensor]:
        chunk_group, answer = self.chunk_groups[number], self._answers[self.rank].sections[number]
        maps, elements = [], []  # by block, whose chunks are whole granules
        for start in range(0, answer.chunks, chunk_group.block_chunks):
            stop = min(start + chunk_group.block_chunks, answer.chunks)
            pair = self.workspace.pair(chunk_group, stop - start)
            signs = direction(chunk_group, received.chunks(start, stop), pair)
            map_of_block, elements_of_block = answer.encode(signs.view(-1, answer.length))
            maps.append(map_of_block)
            elements.append(elements_of_block)
        return [*maps, *elements]

    def decode(self, bodies_WB: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the bodies themselves, because signs are decoded fastest block by block."""
        return bodies_WB, torch.cat(
            [count_faults(self._faults(bodies_WB, owner), bodies_WB[:1]) for owner in range(len(bodies_WB))]
        )

    def checked(self, bodies_WB: Tensor) -> Tensor:
        for owner in range(self.world_size):
            refuse(self._faults(bodies_WB, owner), owner)
        return bodies_WB

    def apply(self, decoded: Tensor, round_number: int, sharded: ShardedMatrices | None) -> None:
        del sharded  # signs need no whole matrices
        for number, chunk_group in enumerate(self.chunk_groups):
            for block in chunk_group.blocks:
                pair = self.workspace.pair(chunk_group, block.stop - block.start)
                flat = pair[0].view(-1, chunk_group.key.length)
                for owner, start, stop in self.parts.owners(number, block.start, block.stop):
                    run = flat[start - block.start : stop - block.start]
                    run.copy_(self._answered(decoded[owner], number, owner, start, stop))
                update_parameters(chunk_group, block, pair, round_number)

    def _faults(self, bodies_WB: Tensor, owner: int) -> Faults:
        """Returns the faults of an owner's answer, bool [1, 1]: an element of two bits is none of -1, 0 and 1."""
        answers, faults = self._answers[owner], Faults()
        for signs, data_B in zip(answers.sections, answers.bodies(bodies_WB[owner]), strict=True):
            if signs.bits == 2:
                faults.append(("an element has an invalid sign", (data_B & data_B >> 1 & 0b01010101).any().view(1, 1)))
        return faults

    def _answered(self, body_B: Tensor, number: int, owner: int, start: int, stop: int) -> Tensor:
        """Decodes chunks [start, stop) of a chunk group from their owner's answer."""
        answers, first = self._answers[owner], self.parts.runs[owner][number].start
        return answers.sections[number].decode(answers.bodies(body_B)[number], start - first, stop - first)


class TwoWay(Owner):
    """Owners answer with signs of all coefficients too: of the mean of their chunks, plus an error of their own.

    The error E keeps the difference between the mean Q and the answer, as a rank's error does for its messages:

        sum <- E + Q;   the signs of sum, and a scale per chunk, are the answer;   E <- sum - answer, once it is applied

    All ranks apply the same answers, on any hardware. The update differs from that of `Gather`.

    Source: a second error at the server: arXiv 2102.02888 (1-bit Adam), section 4.
    """

    granule = SIGN_GRANULE
    least_ranks = 5  # the second compression costs some loss, and few messages are cheap to receive

    has_owner_errors = True

    def __init__(self, chunk_groups: list[ChunkGroup], rank: int, world_size: int, workspace: Workspace) -> None:
        super().__init__(chunk_groups, rank, world_size, workspace)
        self.answer_bytes = self.parts.layouts[0].size
        self.runs = self.parts.runs[rank]  # the chunks that this rank owns, by chunk group
        self.errors = [
            chunk_group.flat_momentum.new_zeros(run.stop - run.start, chunk_group.key.length)
            for chunk_group, run in zip(chunk_groups, self.runs, strict=True)
        ]
        self._sums: list[Tensor] = []  # of the answer that was sent last, if nothing has applied it yet

    @classmethod
    def unsupported(cls, settings: Hyperparameters) -> str:
        if not settings.momentum_is_error:  # of DeMo
            return UpdateSigns.unsupported(settings)
        if settings.clip_to_median:
            return NEEDS_GATHER
        if settings.top_k is not None:
            return (
                f"route 'owner' answers with signs of all coefficients, and top_k is {settings.top_k}: leave it out, "
                "or use route 'gather'"
            )
        return ""

    def own_state(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        for chunk_group, run, errors in zip(self.chunk_groups, self.runs, self.errors, strict=True):
            begin = 0
            for member in chunk_group.members:
                start, stop = max(run.start, begin), min(run.stop, begin + member.chunking.chunks)
                if start < stop:
                    rows = errors[start - run.start : stop - run.start]
                    yield member.parameter, {OWNER_ERROR: rows, OWNER_START: torch.tensor(start - begin, device="cpu")}
                begin += member.chunking.chunks

    def exchange(self, message: Tensor, exchange: Exchange, header: Header) -> Tensor:
        self._sums = []
        return super().exchange(message, exchange, header)

    def encode_answer(self, number: int, received: Coefficients | SignBits) -> list[Tensor]:
        assert isinstance(received, SignBits)
        sums, planes = sum_and_encode(self.chunk_groups[number], received, self.errors[number])
        self._sums.append(sums)
        return planes

    def decode(self, bodies_WB: Tensor) -> tuple[list[SignBits], Tensor]:
        found, wrong = [], []
        for body_B, layout in zip(bodies_WB, self.parts.layouts, strict=True):
            answers, faults = layout.decode(body_B.unsqueeze(0), self.devices)
            found.append(answers)
            wrong.append(count_faults(faults, bodies_WB[:1]))
        return _by_chunk_group(found), torch.cat(wrong)

    def checked(self, bodies_WB: Tensor) -> list[SignBits]:
        layouts = enumerate(self.parts.layouts)
        return _by_chunk_group([layout.checked(bodies_WB[owner : owner + 1], owner) for owner, layout in layouts])

    def apply(self, decoded: list[SignBits], round_number: int, sharded: ShardedMatrices | None) -> None:
        for chunk_group, answers in zip(self.chunk_groups, decoded, strict=True):
            decompress(chunk_group, answers, round_number, self.workspace, sharded)
        for number, sums in enumerate(self._sums):
            run = self.runs[number]
            subtract(self.chunk_groups[number], sums, decoded[number].chunks(run.start, run.stop))
            self.errors[number].copy_(sums)
        self._sums = []


def _by_chunk_group(answers: list[list[Coefficients | SignBits]]) -> list[SignBits]:
    """Returns the signs of each chunk group's chunks, of all owners."""
    return [SignBits.cat(list(runs)) for runs in zip(*answers, strict=True)]


@dataclass(frozen=True)
class Parts:
    """The chunks of `sections`, divided among `world_size` owners: each owns a run of every section.

    Examples:
        >>> parts = Parts((Section(20, 64, 4, "sign"),), world_size=2)
        >>> parts.runs
        [[slice(0, 16, None)], [slice(16, 20, None)]]
    """

    sections: tuple[Section, ...]
    world_size: int
    granule: int = GRANULE

    @cached_property
    def runs(self) -> list[list[slice]]:
        """The chunks of each section that an owner owns, whole granules, by owner.

        The granules of all sections lie end to end, each as long as its elements. An owner's run ends at the boundary
        nearest to the end of its 1/W of the total, so that parts differ by a granule at most.
        """
        sizes = [self.granule * section.length for section in self.sections]  # of a granule
        counts = [-(-section.chunks // self.granule) for section in self.sections]
        total = sum(count * size for count, size in zip(counts, sizes, strict=True))
        ends = [total * owner // self.world_size for owner in range(self.world_size + 1)]
        runs, begin = [], 0
        for section, size, count in zip(self.sections, sizes, counts, strict=True):
            nearest = [max((end - begin + size // 2) // size, 0) for end in ends]
            bounds = [min(number * self.granule, section.chunks) for number in nearest]
            runs.append([slice(start, stop) for start, stop in pairwise(bounds)])
            begin += count * size
        return [[each[owner] for each in runs] for owner in range(self.world_size)]

    @cached_property
    def layouts(self) -> list[Layout[Section]]:
        """The layout of the part for each owner; all parts have the same length."""
        found = []
        for runs in self.runs:
            parts = [
                replace(section, chunks=run.stop - run.start) for section, run in zip(self.sections, runs, strict=True)
            ]
            found.append(Layout(tuple(parts)))
        return padded_alike(found)

    def owners(self, number: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Splits chunks [start, stop) of a section by owner, into (owner, start, stop).

        Examples:
            >>> Parts((Section(20, 64, 4, "sign"),), world_size=2).owners(0, 8, 20)
            [(0, 8, 16), (1, 16, 20)]
        """
        runs = [
            (owner, max(start, mine[number].start), min(stop, mine[number].stop))
            for owner, mine in enumerate(self.runs)
        ]
        return [run for run in runs if run[1] < run[2]]


@dataclass(frozen=True)
class AnswerSection:
    """The signs of a run of chunks in an answer: `bits` per element, after one bit per chunk if `bits` is 1.

    Examples:
        >>> AnswerSection(chunks=8, length=4096, bits=1).size
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

    def encode(self, direction_CN: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes elements -1, 0 and 1 of whole granules as two planes: bits of chunks, bits of elements.

        With one bit per element, a chunk must be all zero or all nonzero.
        """
        if self.bits == 2:
            return direction_CN.new_empty(0, dtype=torch.uint8), pack(direction_CN.to(torch.int32) + 1, 2)
        return pack(direction_CN[:, 0] != 0, 1), pack(direction_CN > 0, 1)

    def decode(self, data_B: Tensor, start: int, stop: int) -> Tensor:
        """Decodes chunks [start, stop) to [C, N] of -1, 0 and 1."""
        begin = start - start % GRANULE  # on a byte boundary
        first, last = (self._maps + packed_bytes(chunk * self.length, self.bits) for chunk in (begin, stop))
        numbers = unpack(data_B[first:last], self.bits, (stop - begin) * self.length).view(-1, self.length)
        numbers = numbers[start - begin :]
        if self.bits == 2:
            return numbers - 1
        present = unpack(data_B[begin // 8 : packed_bytes(stop, 1)], 1, stop - begin)[start - begin :]
        return (2 * numbers - 1) * present.unsqueeze(1)


def refusing(header: Header, error: MessageError) -> Header:
    """Returns the header of an owner that refuses a message; its fingerprint field holds that rank, or W if unknown."""
    blamed = header.world_size if error.rank is None else error.rank
    announced = header.flags & (wire.NEW_LAYOUT | wire.NONFINITE)  # the owner's own flags, which all ranks must see
    return replace(header, flags=wire.REFUSED | announced, fingerprint=blamed)
