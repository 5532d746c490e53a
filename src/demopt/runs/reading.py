"""Who reads which sequences of a run's data: each manifest hands them out, so nothing new has to be exchanged.

Sequences are numbered through all epochs: number i is sequence i mod N of epoch i div N, in that epoch's order. A
member of the run holds spans of numbers, handed out by a manifest. Its message says how many of them it has read: they
leave its spans from the front when a manifest lists that message. What a lost or leaving worker still holds is handed
out again, first of all. So every number is read at least once, and twice only if a worker read it and was lost before
a manifest listed its message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, pairwise, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from demopt.errors import MessageError, SettingsError
from demopt.validation import check_count

if TYPE_CHECKING:
    from demopt.replicator.replicator import Round
    from demopt.runs.exchange import FolderExchange
    from demopt.runs.open_round import Attached

MOST_NUMBER = (1 << 62) - 1  # the highest number, and the most numbers
Span = tuple[int, int]  # first number, and the one after the last


class Sequences:
    """The sequences of one worker: those that it may read, and those that it has trained on and not sent.

    A trainer, or `RunSampler`, sets `total`, `wanted` and `weigh`, takes numbers, and counts in `in_steps` what it
    trains on; what it takes ahead of its steps, `note_step` counts.
    """

    def __init__(self, run: FolderExchange) -> None:
        self._run = run
        self.total = 0  # of the run, all epochs together; 0: the run does not hand out sequences
        self.wanted = 0  # how many this worker wants to hold after the next round
        self.weigh = False  # whether `LocalDeMo.samples`, this worker's weight in a round, follows the unsent ones
        self.in_steps = 0  # trained on in local steps that no message has
        self.in_error = 0  # trained on, and in the error: from messages that were not listed
        self.read = set[int]()  # numbers that it has read; `reads` forgets those that a manifest counts
        self.ahead = deque[list[int]]()  # numbers by batch, the oldest first, that no step has trained on yet
        self.is_ending = False  # `RunSampler` has nothing more to give out, and the run ends after the last of `ahead`

    @property
    def unsent(self) -> int:
        """How many this worker has trained on, and no listed message has."""
        return self.in_steps + self.in_error

    def take(self, most: int, ahead: bool = False) -> list[int]:
        """Returns the next numbers for this worker to read, `most` at most; they count as read, unless taken `ahead`.

        Empty until a manifest hands some out, as the first message requests, and once all are handed out.
        """
        found = [*islice(self._untaken, most)]
        if not ahead:
            self.read |= {*found}
        elif found:
            self.ahead.append(found)
        return found

    def note_step(self) -> None:
        """Counts the oldest batch that was taken ahead as read, because a local step has trained on it."""
        if self.ahead:
            numbers = self.ahead.popleft()
            self.read |= {*numbers}
            self.in_steps += len(numbers)

    @property
    def read_first(self) -> set[int]:
        """The numbers that are read before the first one that is not: the next message counts these."""
        return {*takewhile(self.read.__contains__, self._holds)}

    @property
    def left(self) -> int:
        """How many numbers this worker holds that `take` has not returned."""
        return sum(1 for _ in self._untaken)

    @property
    def are_all_read(self) -> bool:
        """Whether the manifests count all of the run's numbers as read."""
        return self._reading is not None and self._reading.position == self._reading.total

    @property
    def are_all_held(self) -> bool:
        """Whether no number is left to be handed out, unless a worker that holds some is lost."""
        known = self._reading
        return known is not None and known.unread == known.total and not known.returned

    @property
    def _untaken(self) -> Iterator[int]:
        taken = self.read.union(*self.ahead)
        return (number for number in self._holds if number not in taken)

    @property
    def _reading(self) -> Reading | None:
        return self._run.decided.reading if self._run.decided else None

    @property
    def _holds(self) -> Iterator[int]:
        return self._reading.numbers(self._run.worker) if self._reading else iter(())

    # In a round

    def reads(self) -> Reads | None:
        """Returns the next message's account; None if the run hands out no sequences."""
        run, theirs = self._run, self._reading
        total, wanted = (check_count(name, getattr(self, name), 0, MOST_NUMBER) for name in ("total", "wanted"))
        if not total:
            return None
        if theirs and theirs.total != total:
            raise SettingsError(
                f"the data of {run.worker} has {total:,} sequences in all epochs, that of the run in "
                f"{run.store.address} has {theirs.total:,}; give all workers the same data and epochs"
            )
        self.read.intersection_update(self._holds)  # forgets those that a manifest counts: nobody gets them again
        return Reads(len(self.read_first), wanted, total)

    def after(self, current: Round, is_listed: bool) -> tuple[int, int]:
        """Returns `in_steps` and `in_error` after a round: local steps since its message remain in the former."""
        attached: Attached = current.attached
        in_error = 0
        if not current.finite:  # its local steps are dropped, the error is as before
            in_error = self.in_error
        elif not is_listed:
            in_error = attached.from_steps + attached.from_error
        return self.in_steps - attached.from_steps, in_error

    def end(self, current: Round, is_listed: bool) -> None:
        """Counts after a round."""
        self.in_steps, self.in_error = self.after(current, is_listed)

    def drop_steps(self) -> None:
        """Notes that local steps are dropped: `take` returns their numbers, the last ones that are read, again."""
        read = [number for number in self._holds if number in self.read]
        self.read.difference_update(read[max(0, len(read) - self.in_steps) :])
        self.in_steps = 0

    def drop(self) -> None:
        """Notes that local steps and error are dropped; batches that a loader has ahead are still to come."""
        self.read, self.in_steps, self.in_error = set(), 0, 0


class Reads(NamedTuple):
    """A message's account of its worker's data; a list in the folder."""

    read: int  # how many of the numbers that it holds, from the first one on
    wanted: int  # how many it wants to hold after the round
    total: int  # numbers, of all epochs


@dataclass(frozen=True)
class Reading:
    """The numbers that are handed out, and that no manifest counts as read yet.

    Examples:
        >>> start = Reading(10).after({}, {"a": 4})
        >>> start.held, start.unread
        ({'a': [(0, 4)]}, 4)
        >>> later = start.after({"a": 4}, {"a": 4, "b": 2})  # a has read its four; b comes
        >>> later.held
        {'a': [(4, 8)], 'b': [(8, 10)]}
        >>> later.after({"b": 2}, {"b": 4}).held  # a is lost
        {'b': [(4, 8)]}
    """

    total: int  # numbers, of all epochs
    unread: int = 0  # the first number that nobody has had
    held: dict[str, list[Span]] = field(default_factory=dict)  # by worker, in the order in which it reads them
    returned: list[Span] = field(default_factory=list)  # to be handed out again, first of all

    def after(self, read: Mapping[str, int], wanted: Mapping[str, int]) -> Reading:
        """Returns the next round's reading. `read`: the count that each worker has read; `wanted`: is to hold."""
        held, returned, unread = {}, list(self.returned), self.unread
        for worker in sorted(self.held):
            rest = [*_without(self.held[worker], read.get(worker, 0))]
            if worker in wanted:
                held[worker] = rest
            else:
                returned += rest
        for worker in sorted(wanted):
            mine = held.setdefault(worker, [])
            while (missing := wanted[worker] - count(mine)) > 0 and (returned or unread < self.total):
                first, last = returned.pop(0) if returned else (unread, self.total)
                end = min(last, first + missing)
                if first == unread:
                    unread = end
                elif end < last:
                    returned.insert(0, (end, last))
                if mine and mine[-1][1] == first:
                    first = mine.pop()[0]
                mine.append((first, end))
        return Reading(self.total, unread, {worker: spans for worker, spans in held.items() if spans}, returned)

    @property
    def position(self) -> int:
        """How many numbers the manifests so far count as read."""
        return self.unread - count(self.returned) - sum(map(count, self.held.values()))

    def numbers(self, worker: str) -> Iterator[int]:
        """Yields the numbers that a worker holds, in reading order; one by one, because a stranger may write many."""
        return (number for span in self.held.get(worker, ()) for number in range(*span))


def reading_of(name: str, value: Any) -> Reading:
    """Returns the reading in a manifest; MessageError if it is damaged."""
    try:
        held = {str(worker): _spans(spans) for worker, spans in value["held"].items()}
        found = Reading(value["total"], value["unread"], held, _spans(value["returned"]))
        every = sorted([*found.returned, *(span for spans in held.values() for span in spans)])
        known = type(found.total) is type(found.unread) is int and 0 <= found.unread <= found.total < 1 << 62
        if not known or any(a[1] > b[0] for a, b in pairwise(every)) or (every and every[-1][1] > found.unread):
            raise ValueError
    except (ValueError, TypeError, LookupError, AttributeError):
        raise MessageError(f"{name} is damaged: its account of the data that is read") from None
    return found


def reads_of(name: str, value: Any) -> Reads:
    """Returns a message's account of the data; MessageError if it is damaged."""
    whole = isinstance(value, list) and len(value) == 3
    if not whole or not all(type(each) is int and 0 <= each < 1 << 62 for each in value):
        raise MessageError(f"{name} is damaged: reads")
    return Reads(*value)


def count(spans: Iterable[Span]) -> int:
    return sum(last - first for first, last in spans)


def sequence_at(number: int, sequences: int, seed: int) -> int:
    """Returns the sequence with this number: each epoch has an order of its own, drawn from the seed.

    Examples:
        >>> sorted(sequence_at(number, 3, seed=0) for number in range(3, 6))
        [0, 1, 2]
    """
    epoch, place = divmod(number, sequences)
    return int(_order(sequences, seed, epoch)[place])


@lru_cache(2)  # a round may span two epochs
def _order(sequences: int, seed: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
    return torch.randperm(sequences, generator=generator, device="cpu")


def _without(spans: Iterable[Span], number: int) -> Iterator[Span]:
    """Yields what remains of spans without their first `number` numbers."""
    for first, last in spans:
        cut = min(number, last - first)
        number -= cut
        if first + cut < last:
            yield first + cut, last


def _spans(value: Any) -> list[Span]:
    found = [(first, last) for first, last in value]
    if not all(type(number) is int for span in found for number in span) or not all(0 <= a < b for a, b in found):
        raise ValueError
    return found
