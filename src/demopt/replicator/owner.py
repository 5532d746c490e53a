"""owner: each rank reduces 1/W of the chunks and sends back signs (docs/algorithm.md#routes).

Every rank cuts its message into parts, one per owner. An owner decodes its parts as `gather` would.

Shapes: W ranks, B bytes in a message, C chunks, N elements in a chunk.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from demopt.codec.chunk_group import ChunkGroup
from demopt.codec.hyperparameters import Hyperparameters
from demopt.codec.steps import Workspace, decompress, subtract, sum_and_encode
from demopt.errors import MessageError
from demopt.exchange import Exchange
from demopt.replicator.route import OWNER_ERROR, OWNER_START, Decoded, Result, Route, count_faults, read_result
from demopt.wire.bits import pack_sections
from demopt.wire.coefficients import Coefficients
from demopt.wire.layout import SIGN_GRANULE, Layout, Section
from demopt.wire.message import HEADER_BYTES, NEW_LAYOUT, NONFINITE, REFUSED, Header, check_headers, pack_message


class Owner(Route):
    """For `LocalDeMo`. An owner answers with signs of the mean Q of its chunks, plus an error E of its own:

        sum <- E + Q;   the signs of sum, and a scale per chunk, are the answer;   E <- sum - answer, once it is applied

    All ranks apply the same answers, on any hardware. The update differs from that of gather.

    Source: a second error at the server: arXiv 2102.02888 (1-bit Adam), section 4.
    """

    name = "owner"
    least_ranks = 5  # the second compression costs some loss, and with fewer ranks gather receives few messages

    def __init__(self, chunk_groups: list[ChunkGroup], rank: int, world_size: int, workspace: Workspace) -> None:
        super().__init__(chunk_groups, rank, world_size, workspace)
        self.spans_of = divided(self.layout.sections, world_size)
        self.spans = self.spans_of[rank]  # the chunks that this rank owns, by chunk group
        layouts = []
        for spans in self.spans_of:
            pairs = zip(self.layout.sections, spans, strict=True)
            layouts.append(Layout(tuple(replace(section, chunks=span.stop - span.start) for section, span in pairs)))
        least = max(layout.size for layout in layouts)
        self.layouts = [replace(layout, least=least) for layout in layouts]  # of the parts, all of one length, by owner
        self.errors = [
            chunk_group.flat_momentum.new_zeros(span.stop - span.start, chunk_group.key.length)
            for chunk_group, span in zip(chunk_groups, self.spans, strict=True)
        ]
        self._owned = Route(chunk_groups, rank, world_size, workspace)  # which decodes the parts for this rank
        self._owned.layout = self.layouts[rank]
        self._sums: list[Tensor] = []  # of the last answer that was sent, until it is applied

    @classmethod
    def unsupported(cls, settings: Hyperparameters) -> str:
        if not settings.momentum_is_error:
            return "route 'owner' is LocalDeMo's"
        if settings.clip_to_median:
            return "clip_to_median needs route 'gather': an owner alone decides what it answers"
        if settings.top_k is not None:
            return (
                f"route 'owner' answers with signs of all coefficients, and top_k is {settings.top_k}: leave it out, "
                "or use route 'gather'"
            )
        return ""

    @cached_property
    def widths(self) -> tuple[int, int]:
        part = HEADER_BYTES + self.layouts[0].size  # an answer has the layout of the owner's part
        return self.world_size * part, part

    @property
    def bytes_each_way(self) -> int:
        return (self.world_size - 1) * 2 * self.widths[1]

    def owner_state(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        for chunk_group, span, errors in zip(self.chunk_groups, self.spans, self.errors, strict=True):
            begin = 0
            for chunked in chunk_group.parameters:
                start, stop = max(span.start, begin), min(span.stop, begin + chunked.chunking.chunks)
                if start < stop:
                    rows = errors[start - span.start : stop - span.start]
                    yield chunked.parameter, {OWNER_ERROR: rows, OWNER_START: torch.tensor(start - begin, device="cpu")}
                begin += chunked.chunking.chunks

    def message(self, header: Header, data: list[Tensor]) -> Tensor:
        """Builds the parts for all owners, one after the other, each a message."""
        messages = []
        for layout, spans in zip(self.layouts, self.spans_of, strict=True):
            planes = []
            for section, bytes_B, span in zip(self.layout.sections, data, spans, strict=False):
                planes += section.cut(bytes_B, span)
            head = replace(header, layout=layout.digest)
            messages.append(pack_message(head, *planes, size=layout.size, device=self.device))
        return torch.cat(messages)

    def exchange(self, message: Tensor, exchange: Exchange, header: Header) -> Tensor:
        """Also answers as an owner; with zeros and a flag if a part is flagged or refused."""
        self._sums, planes, owned = [], [], self._owned
        parts_WB = exchange.all_to_all(message.view(self.world_size, -1))
        try:
            flags, decoded = owned.check(read_result(owned, parts_WB), replace(header, layout=owned.layout.digest))
            for chunk_group, received, errors in zip(self.chunk_groups, decoded, self.errors, strict=False):
                sums, encoded = sum_and_encode(chunk_group, received, errors)
                self._sums.append(sums)
                planes.append(encoded)
            head = replace(header, flags=header.flags | flags & (NONFINITE | NEW_LAYOUT))
        except MessageError as error:  # the fingerprint field then holds the rank at fault, or W if it is unknown
            blamed = self.world_size if error.rank is None else error.rank
            announced = header.flags & (NEW_LAYOUT | NONFINITE)  # the owner's own flags, which all ranks must see
            head = replace(header, flags=REFUSED | announced, fingerprint=blamed)
        size = self.layouts[0].size
        return exchange.all_gather(pack_message(head, *pack_sections(planes), size=size, device=self.device))

    def decode(self, bodies_WB: Tensor) -> tuple[Decoded, Tensor]:
        found, wrong = [], []
        for body_B, layout in zip(bodies_WB, self.layouts, strict=True):
            answers, faults = layout.decode(body_B.unsqueeze(0), self.devices)
            found.append(answers)
            wrong.append(count_faults(faults, bodies_WB[:1]))
        return _by_chunk_group(found), torch.cat(wrong)

    def check(self, result: Result, expected: Header) -> tuple[int, Decoded]:
        flags = check_headers(result.headers, expected, self.layouts[0].size, answers=True)
        if flags & NONFINITE:
            return flags, []
        if result.decoded is not None:
            return flags, result.decoded
        rows = result.messages[:, HEADER_BYTES:].split(1)
        owners = enumerate(zip(self.layouts, rows, strict=True))
        return flags, _by_chunk_group([layout.checked(body, owner) for owner, (layout, body) in owners])

    def apply(self, decoded: Decoded, round_number: int) -> None:
        try:
            for chunk_group, answers in zip(self.chunk_groups, decoded, strict=True):
                decompress(chunk_group, answers, round_number, self.workspace)
        finally:  # the other ranks apply the answers even if this one cannot, so its errors lose them in any case
            ended, self._sums = self._sums, []
            for errors in self.errors[: len(ended)]:
                errors.zero_()  # stay zero if memory runs out below: a later answer would send the same error again
            for number, sums in enumerate(ended):
                span, answers = self.spans[number], decoded[number]
                subtract(self.chunk_groups[number], sums, answers.chunks(span.start, span.stop))
                self.errors[number].copy_(sums)

    def subtract_sent(self, data: list[Tensor], decoded: Decoded | None = None, row: int = 0) -> str:
        del decoded, row  # `decoded` holds the owners' answers, not this rank's coefficients
        return super().subtract_sent(data)


def _by_chunk_group(answers: list[Decoded]) -> Decoded:
    """Returns the signs from all owners, by chunk group."""
    return [Coefficients.cat(spans, dim=1) for spans in zip(*answers, strict=True)]


def divided(sections: tuple[Section, ...], world_size: int) -> list[list[slice]]:
    """Returns the chunks of each section that each owner owns, in whole granules, by owner.

    The granules of all sections lie end to end, each as long as its elements. An owner's span ends at the boundary
    nearest to the end of its 1/W of the total, so that parts differ by a granule at most.
    """
    sizes = [SIGN_GRANULE * section.length for section in sections]  # of a granule
    counts = [-(-section.chunks // SIGN_GRANULE) for section in sections]
    total = sum(count * size for count, size in zip(counts, sizes, strict=True))
    ends = [total * owner // world_size for owner in range(world_size + 1)]
    spans, begin = [], 0
    for section, size, count in zip(sections, sizes, counts, strict=True):
        nearest = [max((end - begin + size // 2) // size, 0) for end in ends]
        bounds = [min(number * SIGN_GRANULE, section.chunks) for number in nearest]
        spans.append([slice(start, stop) for start, stop in pairwise(bounds)])
        begin += count * size
    return [[each[owner] for each in spans] for owner in range(world_size)]
