"""Random schedules of workers that send, die, sleep and join, against a literal model, with crashes between any calls.

A worker's movement is a set of tokens, one for each piece of work. A message carries the oldest tokens that it has not
seen applied. The weights are the list of tokens applied so far. Each worker is a thread, and each of its calls to the
store waits for its turn, which the test gives; so calls can come in any order, and none depends on speed.
"""

import json
import queue
import threading
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from stores import Crash, Wrapped

from demopt.errors import DemoptError
from demopt.runs import exchange as exchange_module
from demopt.runs import log
from demopt.runs.exchange import CoveredError, FolderExchange, bytes_of, tensor_of
from demopt.runs.store import ObjectStore

SIZE, MOST = 200, 8  # bytes and tokens of a message


class Worker:
    """A worker of the run with tokens for weights. It runs in a thread of its own, one store call per turn."""

    def __init__(self, name: str, bare: ObjectStore, keep_log: bool) -> None:
        self.turns: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.waits: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.run = FolderExchange(Wrapped(bare, self._wait), late=0.0, keep_log=keep_log, checkpoint_every=3)
        self.run._all = lambda calls: [call() for call in calls]  # in this thread
        self.run.worker, self.run.say = name, lambda _: None
        self.weights: list[str] = []
        self.pending: list[str] = []  # done here, and not known to be applied
        self.rounds, self.made, self.patient = 0, 0, False
        self.error: BaseException | None = None
        self.alive, self.thread = True, threading.Thread(target=self._main, daemon=True)
        self.thread.start()
        self.waits.get()

    def turn(self, order: str = "go") -> None:
        """Lets it make its next call to the store."""
        if self.alive:
            self.turns.put(order)
            self.alive = self.waits.get()

    def _wait(self, call: str) -> None:
        self.waits.put(True)
        order = self.turns.get()
        if order == "die":
            raise Crash
        self.run.late = 0.0 if order == "late" else 1e9

    def _main(self) -> None:
        try:
            self._join()
            while not (self.run.stopping or self.run.leaving):
                self._work()
        except Crash:
            pass
        except BaseException as error:
            self.error = error
        self.waits.put(False)

    # As runs/weights.py and LocalDeMo do it, with tokens

    def _join(self) -> None:
        start = json.dumps([0, []]).encode()
        if not self.run.meet({}, (), [], start):
            self._load(log.checkpoints(self.run.store)[-1])
            self._catch_up()
            self.run.stopping = False
        self.run.hello(self.rounds)

    def _load(self, number: int) -> None:
        data = self.run.store.get(log.checkpoint_name(self.run.run, number), 1 << 20)
        assert data is not None, "the newest checkpoint is gone"
        self.rounds, self.weights = json.loads(data)
        self.run.decided = log.read_manifest(self.run.store, self.run.run.run, number - 1) if number else None

    def _catch_up(self) -> None:
        while (manifest := log.read_manifest(self.run.store, self.run.run.run, self.rounds)) is not None:
            try:
                self._apply(self.run.rows(manifest, SIZE, torch.empty(0)))
            except CoveredError:
                newest = log.checkpoints(self.run.store)[-1]
                assert newest > manifest.round
                self._load(newest)
            else:
                self.run.decided, self.run.stopping = manifest, self.run.stopping or manifest.stop

    def _apply(self, rows: torch.Tensor) -> None:
        for row in rows:
            self.weights += json.loads(bytes_of(row))
        self.rounds += 1

    def _work(self) -> None:
        self.made += 1
        self.pending.append(f"{self.run.worker}:{self.made}")
        sent = self.pending[:MOST]
        body = tensor_of(json.dumps(sent).encode().ljust(SIZE))
        try:
            rows = self.run.exchange_round(self.rounds, body, lambda _: "")
        except CoveredError:
            if self.run.row is not None:
                self.pending = [token for token in self.pending if token not in sent]
        else:
            if self.run.row is not None:
                self.pending = [token for token in self.pending if token not in sent]
            self._apply(rows)
            self._save()
        if self.run.behind:
            self._catch_up()
            if not self.run.stopping:
                self.run.hello(self.rounds)

    def _save(self) -> None:
        run, number = self.run, self.rounds
        assert run.decided is not None
        if number % 3 == 0 and run.row is not None and run.row == number // 3 % len(run.decided.senders):
            before = [each for each in log.checkpoints(run.store) if each < number]
            run.store.put_if_absent(log.checkpoint_name(run.run, number), json.dumps([number, self.weights]).encode())
            if not run.run.keep_log and len(before) > 1:
                log.clear(run.store, range(before[-2], before[-1]))
                run.store.delete(log.checkpoint_name(run.run, each) for each in before[:-1] if each)


def literal(bare: ObjectStore) -> list[list[str]]:
    """The weights after each round, from the log alone."""
    record = log.read_record(bare)
    found: list[list[str]] = [[]]
    while record and (manifest := log.read_manifest(bare, record.run, len(found) - 1)) is not None:
        tokens: list[str] = []
        for sender in manifest.senders:
            data = bare.get(log.message_name(manifest.round, sender.worker), 1 << 20)
            assert data is not None
            assert log.digest(data) == sender.digest
            tokens += json.loads(data.partition(b"\n")[2])
        found.append(found[-1] + tokens)
    return found


def check(workers: list[Worker], bare: ObjectStore, keep_log: bool) -> None:
    for worker in workers:
        assert worker.error is None, worker.error
        assert len(set(worker.weights)) == len(worker.weights), "a movement was applied twice"
        own = [token for token in worker.weights if token.startswith(f"{worker.run.worker}:")]
        if worker.alive or worker.run.leaving or worker.run.stopping:
            unseen = {f"{worker.run.worker}:{number + 1}" for number in range(worker.made)} - set(own)
            assert unseen <= set(worker.pending), "a movement was lost"
    if keep_log:
        expected = literal(bare)
        for worker in workers:
            assert worker.weights == expected[worker.rounds] if worker.rounds else not worker.weights
    else:
        furthest = max((worker.weights for worker in workers), key=len, default=[])
        assert all(worker.weights == furthest[: len(worker.weights)] for worker in workers)


TURNS = st.one_of(st.integers(1, 3), st.integers(1, 30))
ACTIONS = st.one_of(
    st.tuples(st.just("go"), st.integers(0, 5), TURNS),
    st.tuples(st.just("late"), st.integers(0, 5), TURNS),  # it waits for nobody
    st.tuples(st.just("die"), st.integers(0, 5), st.just(1)),
    st.tuples(st.just("join"), st.just(0), st.just(1)),
    st.tuples(st.just("stop"), st.just(0), st.just(1)),
    st.tuples(st.just("leave"), st.integers(0, 5), st.just(1)),
)


def play(actions: list[tuple[str, int, int]], keep_log: bool) -> None:
    bare, workers, pause = ObjectStore(), [], exchange_module.time.sleep
    exchange_module.time.sleep = lambda _: None  # type: ignore[assignment]  # turns are what a worker waits for
    try:
        for action, who, turns in [*[("join", 0, 1)] * 3, *actions]:
            living = [worker for worker in workers if worker.alive]
            if action == "join" and len(living) < 6:
                workers.append(Worker(f"w{len(workers):02d}", bare, keep_log))
            elif action == "stop":
                bare.put(log.STOP, str(len(workers) + who).encode())
            elif living:
                chosen = living[who % len(living)]
                chosen.run.leaving = chosen.run.leaving or action == "leave"
                for _ in range(turns):
                    chosen.turn(action)
                if action in ("leave", "stop"):
                    continue
            check(workers, bare, keep_log)
        for _ in range(400):  # all that live get on, and nobody waits for ever
            for worker in workers:
                worker.turn("late")
        check(workers, bare, keep_log)
        rounds = [worker.rounds for worker in workers if worker.alive]
        assert not rounds or max(rounds) > 0
    finally:
        for worker in workers:
            worker.turn("die")
        exchange_module.time.sleep = pause


@hypothesis.given(st.lists(ACTIONS, min_size=10, max_size=60), st.booleans())
@hypothesis.settings(max_examples=300)
def test_no_schedule_loses_or_doubles_a_movement(actions: list[Any], keep_log: bool) -> None:
    play(actions, keep_log)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@hypothesis.given(st.lists(ACTIONS, max_size=60), st.booleans())
@hypothesis.settings(max_examples=10000, derandomize=False)
def test_ten_thousand_schedules(actions: list[Any], keep_log: bool) -> None:
    play(actions, keep_log)


def test_worker_that_slept_through_a_checkpoint_does_not_open_an_old_round_again() -> None:
    """The sleeper holds a message of round 0 when all messages of that time are deleted."""
    play([("late", 0, 40), *[("late", 1, 30)] * 12, ("late", 0, 200), ("late", 1, 60)], keep_log=False)


def test_damaged_manifest_is_named() -> None:
    store = ObjectStore()
    for data in (b"", b"{", b"[]", b'{"run": 3}', b'{"senders": 1}', b'{"senders": [{"worker": 1}]}'):
        store.put("rounds/00000000/manifest", data)
        with pytest.raises(DemoptError, match="rounds/00000000/manifest is damaged"):
            log.read_manifest(store, "r", 0)
