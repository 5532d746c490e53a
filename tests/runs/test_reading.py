"""Which sequences a run reads: each exactly once per epoch, whoever comes, leaves, is late or dies."""

import random
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from demopt.errors import MessageError
from demopt.runs.reading import Reading, count, sequence_at

MOST_SILENT = 2


class _Member:
    """A worker as the manifests see it: what it holds, what it has read since its last message, its silence."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.read, self.silent, self.alive = wanted, 0, 0, True


def _numbers(spans: list[tuple[int, int]]) -> list[int]:
    return [number for first, last in spans for number in range(first, last)]


def _run(schedule: random.Random, total: int) -> Counter[int]:
    """Plays a run to its end; returns how often each number is in a manifest."""
    reading, members, names = Reading(), {"w0": _Member(schedule.randint(1, 9))}, 1
    reading = reading.after(total, {}, {name: member.wanted for name, member in members.items()})
    taken: Counter[int] = Counter()
    for _ in range(100 + 50 * total):
        if reading.done(total):
            break
        read, leaving = {}, set()
        for name, member in members.items():
            if member.alive and len(members) > 1 and schedule.random() < 0.05:
                member.alive = False
            held = _numbers(reading.held.get(name, []))
            if member.alive:
                member.read = min(len(held), member.read + schedule.randint(0, member.wanted))
                if schedule.random() < 0.8:  # otherwise it is late: its message is in no manifest
                    read[name], member.silent = member.read, 0
                    taken.update(held[: member.read])
                    member.read = 0
                    if len(members) - len(leaving) > 1 and schedule.random() < 0.05:
                        leaving.add(name)
                    continue
            member.silent += 1
            if member.silent >= MOST_SILENT:
                leaving.add(name)
        if len(leaving) < len(members):
            for name in leaving:
                del members[name]
        else:
            members = {}
        if schedule.random() < 0.2 or not members:
            members[f"w{names}"] = _Member(schedule.randint(1, 9))
            names += 1
        for member in members.values():
            if schedule.random() < 0.1:
                member.wanted = schedule.randint(1, 9)  # another batch
        before = reading
        reading = before.after(total, read, {name: member.wanted for name, member in members.items()})
        assert reading.position == taken.total() == before.position + sum(read.values())
        assert Reading.of(reading.packed()) == reading
    assert reading.done(total)
    return taken


@given(st.integers(1, 300), st.integers(0, 2**32))
def test_manifests_have_every_number_exactly_once_in_any_schedule(total: int, seed: int) -> None:
    assert _run(random.Random(seed), total) == Counter(range(total))


def test_spans_stay_few_over_a_long_run() -> None:
    """What is returned is handed out first, so holes close."""
    reading, schedule = Reading(), random.Random(0)
    wanted = {f"w{number}": 20 for number in range(16)}
    reading = reading.after(10**6, {}, wanted)
    for round_number in range(2000):
        gone = schedule.choice(list(wanted))
        wanted = {name: size for name, size in wanted.items() if name != gone} | {f"n{round_number}": 20}
        reading = reading.after(10**6, {name: schedule.randint(0, 20) for name in reading.held}, wanted)
    assert sum(map(len, reading.held.values())) + len(reading.returned) < 100
    assert count(reading.returned) < 1000


def test_each_epoch_has_every_sequence_in_an_order_of_its_own() -> None:
    epochs = [[sequence_at(number, 50, 7) for number in range(50 * e, 50 * e + 50)] for e in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize(
    "value",
    [
        None, [], {}, {"unread": "4", "held": {}, "returned": []}, {"unread": True, "held": {}, "returned": []},
        {"unread": 4, "held": {"a": [[0, 5]]}, "returned": []},  # of a number that nobody has had
        {"unread": 4, "held": {"a": [[0, 2]]}, "returned": [[1, 3]]},  # one number twice
        {"unread": 4, "held": {"a": [[2, 2]]}, "returned": []},
        {"unread": 4, "held": {"a": [[0.0, 2]]}, "returned": []},
        {"unread": 4, "held": {"a": 5}, "returned": []},
        {"unread": 1 << 20, "held": {}, "returned": [[2 * i, 2 * i + 1] for i in range(1 << 15)]},
    ],
)  # fmt: skip
def test_damaged_reading_of_a_manifest_is_refused(value: Any) -> None:
    with pytest.raises(MessageError, match="account of the data"):
        Reading.of(value)
