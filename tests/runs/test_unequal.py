"""Unequal workers: each that lives is in a round again and again, whatever the ratio of speeds and links."""

import heapq
import itertools
import threading
from typing import Any

import hypothesis
from hypothesis import strategies as st
from stores import Crash, Through, time_by
from test_protocol import Faulty, Worker, weights_after

from demopt.runs import log
from demopt.runs.store import Store


class Clock:
    """A clock for threads that all wait for it: when one waits, the next to wake goes on at once."""

    def __init__(self) -> None:
        self.now, self._order = 0.0, itertools.count()
        self._waiting: list[tuple[float, int, threading.Semaphore]] = []

    def expect(self, seconds: float) -> threading.Semaphore:
        """Returns the lock that opens after some seconds."""
        lock = threading.Semaphore(0)
        heapq.heappush(self._waiting, (self.now + seconds, next(self._order), lock))
        return lock

    def sleep(self, seconds: float) -> None:
        lock = self.expect(seconds)
        self.go_on()
        lock.acquire()

    def go_on(self) -> None:
        if self._waiting:
            self.now, _, lock = heapq.heappop(self._waiting)
            lock.release()

    def monotonic(self) -> float:
        return self.now


class Far(Through):
    """A store that is `trip` seconds away; a message takes `upload` seconds more, and is absent until then."""

    def __init__(self, inner: Store, clock: Clock, trip: float, upload: float) -> None:
        super().__init__(inner)
        self.clock, self.trip, self.upload = clock, trip, upload

    def _pass(self, call: str, *given: Any) -> Any:
        uploads = call == "put_if_absent" and given[0].endswith(".message")
        self.clock.sleep(self.trip + self.upload * uploads)
        return super()._pass(call, *given)


class Timed(Worker):
    """A worker whose local steps take `steps` seconds, until the clock shows `end`."""

    def __init__(self, number: int, store: Far, steps: float, end: float, late: float) -> None:
        super().__init__(number, store, late=late, keep_log=True)
        self.clock, self.steps, self.end = store.clock, steps, end
        self.done, begin = threading.Event(), self.clock.expect(0.01 * number)
        self.thread = threading.Thread(target=lambda: (begin.acquire(), self._main()), daemon=True)
        self.thread.start()

    def wait(self, call: str) -> None:
        if self.clock.now > self.end:
            raise Crash

    def work(self) -> None:
        self.clock.sleep(self.steps)
        super().work()

    def ended(self) -> None:
        self.done.set()
        self.clock.go_on()


def rounds_with(kinds: list[tuple[float, float, float]], late: float, end: float) -> list[set[str]]:
    """The senders of each round of workers with these seconds of steps, trip and upload."""
    clock, bare = Clock(), Faulty()
    with time_by(clock):
        workers = [
            Timed(number, Far(bare, clock, trip, upload), steps, end, late)
            for number, (steps, trip, upload) in enumerate(kinds)
        ]
        clock.go_on()
        for worker in workers:
            assert worker.done.wait(120)
            assert worker.error is None, worker.error
            assert worker.made > 4, "a step does not return"
            assert worker.tokens.applied == weights_after(log.digest_of(worker.run.decided), bare.ever)
    identity, rounds = log.read_record(bare).identity, max(worker.rounds for worker in workers)
    manifests = [log.read_manifest(bare, identity, number) for number in range(rounds)]
    return [{sender.worker for sender in manifest.senders} for manifest in manifests]


SECONDS = st.sampled_from([0.05, 0.3, 1.0, 4.0, 15.0])  # of local steps, and of the upload of a message
KINDS = st.tuples(SECONDS, st.sampled_from([0.01, 0.05, 0.3]), SECONDS)  # and of a trip to the store


@hypothesis.given(st.lists(KINDS, min_size=2, max_size=4), st.sampled_from([0.02, 1.0, 10.0]))
@hypothesis.settings(max_examples=max(6, hypothesis.settings.default.max_examples // 50))
@hypothesis.example([(1.0, 0.01, 0.05), (1.0, 0.01, 3.0)], 0.02)  # an upload of three of the other's rounds,
@hypothesis.example([(1.0, 0.01, 0.05), (1.0, 0.01, 10.0)], 0.02)  # of ten,
@hypothesis.example([(1.0, 0.01, 0.05), (1.0, 0.01, 30.0)], 0.02)  # of thirty,
@hypothesis.example([(0.05, 0.01, 0.05), (0.05, 0.01, 15.0)], 0.02)  # of two hundred
@hypothesis.example([(1.0, 0.01, 0.05), (1.0, 0.01, 0.05), (1.0, 1.5, 0.05)], 0.02)  # it reads slower than they decide
def test_every_worker_that_lives_is_in_a_round_again_and_again(kinds, late):
    """By a simulated clock. The first time may take long, while nobody knows a worker's pace."""
    slowest = max(steps + upload + 20 * trip for steps, trip, upload in kinds)
    fastest = min(steps + upload + trip for steps, trip, upload in kinds)
    rounds = rounds_with(kinds, late, end=30 * slowest + 60)
    for number in range(len(kinds)):
        present = [place for place, senders in enumerate(rounds) if f"w{number:02d}" in senders]
        assert len(present) > 4
        absent = [after - before - 1 for before, after in itertools.pairwise([-1, *present, len(rounds)])]
        assert max(absent) <= 16 + 4 * slowest / fastest
        assert max(absent[3:]) <= 8, absent  # its pace is known from its third message on
