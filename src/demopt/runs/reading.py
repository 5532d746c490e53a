"""Who reads which sequences of a run's data: each manifest hands them out, so nothing new has to be exchanged.

Sequences are numbered through all epochs: number i is sequence i mod N of epoch i div N, in that epoch's order. A
member of the run holds spans of numbers, handed out by a manifest. Its message says how many of them it has read since
its last one: they leave its spans from the front when a manifest has that message. What a lost or leaving worker still
holds is handed out again, first of all. So every number is read at least once, and twice only if a worker read it and
was lost before its message was in a manifest.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from demopt.errors import MessageError

Span = tuple[int, int]  # first number, and the one after the last
MOST_SPANS = 1 << 14  # of all workers together: what a manifest may hold


@dataclass(frozen=True)
class Reading:
    """The numbers that are handed out and not in a manifest yet.

    Examples:
        >>> start = Reading().after(10, {}, {"a": 4})
        >>> start.held, start.unread
        ({'a': [(0, 4)]}, 4)
        >>> next_one = start.after(10, {"a": 4}, {"a": 4, "b": 2})  # a has read its four; b comes
        >>> next_one.held
        {'a': [(4, 8)], 'b': [(8, 10)]}
        >>> next_one.after(10, {"b": 2}, {"b": 4}).held  # a is lost
        {'b': [(4, 8)]}
    """

    unread: int = 0  # the first number that nobody has had
    held: dict[str, list[Span]] = field(default_factory=dict)  # by worker, in the order in which it reads them
    returned: list[Span] = field(default_factory=list)  # to be handed out again, first of all

    def after(self, total: int, read: Mapping[str, int], wanted: Mapping[str, int]) -> "Reading":
        """Returns the next round's reading: `wanted` has all members, and how many numbers each wants to hold.

        `read`: how many numbers each sender has read since its last message. `total`: the numbers of all epochs.
        """
        held, returned = {}, list(self.returned)
        for worker in sorted(self.held):
            rest = list(_without(self.held[worker], read.get(worker, 0)))
            if worker in wanted:
                held[worker] = rest
            else:
                returned += rest
        unread = self.unread
        for worker in sorted(wanted):
            mine = held.setdefault(worker, [])
            while (missing := wanted[worker] - count(mine)) > 0 and (returned or unread < total):
                if returned:
                    first, last = returned.pop(0)
                    if last - first > missing:
                        returned.insert(0, (first + missing, last))
                else:
                    first, last = unread, total
                    unread = min(total, first + missing)
                _append(mine, (first, min(last, first + missing)))
        return Reading(unread, {worker: spans for worker, spans in held.items() if spans}, returned)

    def done(self, total: int) -> bool:
        """Whether a manifest has every number."""
        return self.unread >= total and not self.held and not self.returned

    @property
    def position(self) -> int:
        """How many numbers the manifests so far have."""
        return self.unread - count(self.returned) - sum(map(count, self.held.values()))

    def packed(self) -> dict[str, Any]:
        """Returns it as a manifest holds it."""
        return {"unread": self.unread, "held": self.held, "returned": self.returned}

    @staticmethod
    def of(value: Any) -> "Reading":
        """Reads what `packed` returned; MessageError for anything else.

        Examples:
            >>> Reading.of(Reading(4, {"a": [(0, 4)]}).packed())
            Reading(unread=4, held={'a': [(0, 4)]}, returned=[])
        """
        try:
            unread, held, returned = value["unread"], dict(value["held"]), value["returned"]
            found = Reading(unread, {worker: _spans(held[worker]) for worker in held}, _spans(returned))
            every = sorted([*found.returned, *(span for spans in found.held.values() for span in spans)])
            apart = all(before[1] <= after[0] for before, after in pairwise(every))
            if type(unread) is not int or len(every) > MOST_SPANS or not apart or (every and every[-1][1] > unread):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            raise MessageError("a manifest's account of the data that is read is damaged") from None
        return found


def count(spans: Iterable[Span]) -> int:
    """Returns how many numbers spans have.

    Examples:
        >>> count([(0, 4), (6, 7)])
        5
    """
    return sum(last - first for first, last in spans)


def sequence_at(number: int, sequences: int, seed: int) -> int:
    """Returns the sequence with this number: each epoch has an order of its own, drawn from the seed.

    Examples:
        >>> sorted(sequence_at(number, 3, seed=0) for number in range(3, 6))
        [0, 1, 2]
    """
    epoch, place = divmod(number, sequences)
    return int(_order(sequences, seed, epoch)[place])


_orders: dict[tuple[int, int, int], torch.Tensor] = {}


def _order(sequences: int, seed: int, epoch: int) -> torch.Tensor:
    """Returns an epoch's order; keeps the last two, because a round may span a border."""
    key = (sequences, seed, epoch)
    if key not in _orders:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        while len(_orders) > 1:
            del _orders[next(iter(_orders))]
        _orders[key] = torch.randperm(sequences, generator=generator)
    return _orders[key]


def _without(spans: Iterable[Span], number: int) -> Iterator[Span]:
    """Yields what remains of spans without their first `number` numbers."""
    for first, last in spans:
        cut = min(number, last - first)
        number -= cut
        if first + cut < last:
            yield first + cut, last


def _append(spans: list[Span], span: Span) -> None:
    """Appends a span, joined to the last one where they touch."""
    if spans and spans[-1][1] == span[0]:
        spans[-1] = (spans[-1][0], span[1])
    else:
        spans.append(span)


def _spans(value: Any) -> list[Span]:
    found = [(first, last) for first, last in value]
    if not all(type(number) is int for span in found for number in span) or not all(0 <= a < b for a, b in found):
        raise ValueError
    return found
