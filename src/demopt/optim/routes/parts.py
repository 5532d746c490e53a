"""Assigns chunks to owners: each rank owns a run of every chunk group, in whole granules.

Shapes: W ranks, C chunks.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from demopt.errors import MessageError
from demopt.wire import frame
from demopt.wire.frame import Header
from demopt.wire.layout import GRANULE, Layout, Section


@dataclass(frozen=True)
class Parts:
    """The chunks of `sections`, divided among `world_size` owners.

    Examples:
        >>> parts = Parts((Section(20, 64, 4, "sign"),), world_size=2)
        >>> parts.range(0, owner=0), parts.range(0, owner=1)
        ((0, 8), (8, 20))
    """

    sections: tuple[Section, ...]
    world_size: int

    def range(self, number: int, owner: int) -> tuple[int, int]:
        """Returns the chunks [start, stop) of section `number` that `owner` owns."""
        chunks = self.sections[number].chunks
        granules = -(-chunks // GRANULE)
        start, stop = (min(chunks, granules * rank // self.world_size * GRANULE) for rank in (owner, owner + 1))
        return start, stop

    @cached_property
    def layouts(self) -> list[Layout]:
        """The layout of the part for each owner; all parts have the same length."""
        shares = [
            tuple(self._share(section, *self.range(number, owner)) for number, section in enumerate(self.sections))
            for owner in range(self.world_size)
        ]
        least = max(Layout(share).size for share in shares)
        return [Layout(share, least) for share in shares]

    def cut(self, data: list[Tensor], owner: int) -> list[Tensor]:
        """Returns one owner's share of each section's bytes."""
        return [
            section.cut(bytes_B, *self.range(number, owner))
            for number, (section, bytes_B) in enumerate(zip(self.sections, data, strict=True))
        ]

    def message(self, header: Header, data: list[Tensor], device: torch.device) -> Tensor:
        """Builds a frame for each owner from the sections' bytes (zeros if there are none), one after the other."""
        frames = []
        for owner, layout in enumerate(self.layouts):
            body = layout.join(self.cut(data, owner) if data else [], device)
            frames.append(frame.build(replace(header, layout=layout.digest), body))
        return torch.cat(frames)

    def owners(self, number: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Splits chunks [start, stop) of a section by owner, into (owner, start, stop).

        Examples:
            >>> Parts((Section(20, 64, 4, "sign"),), world_size=2).owners(0, 0, 16)
            [(0, 0, 8), (1, 8, 16)]
        """
        runs = ((owner, *self.range(number, owner)) for owner in range(self.world_size))
        cut = ((owner, max(start, first), min(stop, last)) for owner, first, last in runs)
        return [run for run in cut if run[1] < run[2]]

    @staticmethod
    def _share(section: Section, start: int, stop: int) -> Section:
        return replace(section, chunks=stop - start)


def refusal(header: Header, error: MessageError) -> Header:
    """Returns the header of an owner's refusal; its fingerprint field holds the refused rank, or W if unknown.

    Examples:
        >>> mine = Header(step=3, rank=0, world_size=4, layout=1, settings=2)
        >>> refusal(mine, MessageError("truncated", rank=3)).fingerprint
        3
    """
    blamed = header.world_size if error.rank is None else error.rank
    announced = header.flags & (frame.NEW_LAYOUT | frame.NONFINITE)  # the owner's own flags, which all ranks must see
    return replace(header, flags=frame.REFUSED | announced, fingerprint=blamed)


def check_refusals(answers: list[Header]) -> None:
    """Raises MessageError, with the blamed rank, if an owner answered that it refused a message.

    Examples:
        >>> check_refusals([])
    """
    for owner, header in enumerate(answers):
        if header.flags & frame.REFUSED:
            blamed = header.fingerprint if header.fingerprint < header.world_size else None
            raise MessageError(f"refused by rank {owner}, which owns the chunks that it speaks of", blamed)
