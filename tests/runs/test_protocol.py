"""Random schedules of workers that send, die, sleep and join, against a literal model, with crashes between any calls.

A worker's movement is a set of tokens, one for each piece of work. A message carries the oldest tokens that it has not
seen applied. The weights are the list of tokens applied so far. Each worker is a thread, and each of its calls to the
store waits for its turn, which the test gives; so calls can come in any order, and none depends on speed.
"""

import dataclasses
import queue
import struct
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import hypothesis
import torch
from hypothesis import strategies as st
from stores import Crash, Wrapped, put

from demopt.errors import DemoptError, ExchangeError
from demopt.replicator.route import Result
from demopt.runs import exchange as exchange_module
from demopt.runs import inbox as inbox_module
from demopt.runs import log
from demopt.runs import store as store_module
from demopt.runs import weights as weights_module
from demopt.runs.exchange import FolderExchange
from demopt.runs.store import ObjectStore, Store, StoreError
from demopt.runs.weights import FolderRounds
from demopt.wire.message import HEADER_BYTES, Header

MOST = 8  # tokens in a message
W = TypeVar("W", bound="InTurns")


@dataclasses.dataclass(frozen=True)
class Rows:
    """Stands for decoded messages: a row of tokens each, 0 for none."""

    tokens: torch.Tensor
    samples: tuple[int, ...] = (1,)
    top: None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"tokens": self.tokens}


class Tokens:
    """Stands for a replicator, its wiring and its route: its weights are the tokens applied so far, in order."""

    groups: ClassVar[list[Any]] = []
    device, widths = torch.device("cpu"), (HEADER_BYTES + 4 * MOST,) * 2
    message_bytes = widths[0]
    in_flight = False

    def __init__(self, run: FolderExchange) -> None:
        self.round_number, self.weights = torch.zeros((), dtype=torch.int64), torch.zeros(8192, dtype=torch.int32)
        self.options = types.SimpleNamespace(config_facts=tuple)
        self.route, self.run, self.round = self, run, None
        self.pending: list[int] = []  # done here, and not known to be applied

    def wiring(self) -> "Tokens":
        return self

    def facts(self) -> dict[str, str]:
        return {}

    def replicated_tensors(self) -> list[torch.Tensor]:
        return [self.weights]

    def header(self, _: Any) -> Header:
        return Header(int(self.round_number), 0, 1, 0, 0)

    def check(self, result: Result, _: Any) -> tuple[int, list[Rows]]:
        return 0, [Rows(result.messages[:, HEADER_BYTES:].contiguous().view(torch.int32))]

    def extract(self) -> None:
        sent = self.pending[:MOST]
        tokens = torch.tensor(sent + [0] * (MOST - len(sent)), dtype=torch.int32).view(torch.uint8)
        message = torch.cat([torch.zeros(HEADER_BYTES, dtype=torch.uint8), tokens])
        attached = self.run.attachment(self, self.header(None), None)
        known = {"message": message, "data": [tokens], "attached": attached}
        self.round = types.SimpleNamespace(header=self.header(None), outcome=None, **known)

    def exchange(self) -> Any:
        now = self.round
        now.outcome = self.run.exchange_round(self, now.header, now.message, now.attached)
        if now.outcome.error is not None:
            raise now.outcome.error
        return now.outcome.result

    def apply(self, result: Result) -> None:
        self.apply_missed(result)
        self.mark_applied()

    def mark_applied(self) -> None:
        if self.round.outcome.row is not None:
            sent = tokens_of(self.round.message)
            self.pending = [token for token in self.pending if token not in sent]
        self.round = None

    def rollback(self) -> None:
        self.round = None

    def recount(self, message: torch.Tensor, applied: bool) -> None:
        self.pending = [token for token in self.pending if token not in tokens_of(message)]
        self.pending = self.pending if applied else [*tokens_of(message), *self.pending]

    def apply_missed(self, result: Result) -> None:
        rows = result.decoded[0].tokens if result.decoded else torch.empty(0)
        applied = [*self.applied, *(token for token in rows.flatten().tolist() if token)]
        self.weights[: len(applied)] = torch.tensor(applied, dtype=torch.int32)
        self.round_number += 1

    @property
    def applied(self) -> list[int]:
        return self.weights[self.weights != 0].tolist()


def tokens_of(message: torch.Tensor) -> list[int]:
    return [token for token in message[HEADER_BYTES:].view(torch.int32).tolist() if token]


class Faulty(ObjectStore):
    """Objects in memory. A call that is made while there is a `fault` meets it."""

    def __init__(self) -> None:
        super().__init__()
        self.fault, self.forks, self.gone = "", 0, 0
        self.young: list[str] = []  # the last objects that were put
        self.under_way: list[tuple[str, bytes]] = []

    def get(self, name: str, most: int) -> bytes | None:
        return None if self.fault == "stale" and name in self.young else super().get(name, most)

    def list(self, folder: str) -> set[str]:
        hidden = self.young if self.fault == "stale" else []
        return {name for name in super().list(folder) if f"{folder}/{name}" not in hidden}

    def put_if_absent(self, name: str, data: bytes) -> bool:
        if self.fault == "conflict":
            raise StoreError("409: another put is under way")
        if self.fault == "slow":
            self.under_way.append((name, data))
            raise StoreError("no answer for ten seconds")
        if self.fault == "two win" and name.endswith("/manifest") and super().get(name, 1 << 30) is not None:
            self.forks += 1
            self.delete([name])
        won = super().put_if_absent(name, data)
        self.young = [*self.young, name][-4:] if won else self.young
        if self.fault == "no answer":
            raise StoreError("500, after it was done")
        return won

    def arrive(self) -> None:
        """The uploads that were slow are there."""
        for name, data in self.under_way:
            super().put_if_absent(name, data)
        self.under_way.clear()

    def lose(self, number: int) -> None:
        """Deletes a round's messages, which some may have read."""
        names = [log.message_name(number, worker) for worker in sorted(log.look(self, number).messages)]
        self.gone += len(names)
        self.delete(names)


class Worker:
    """A worker with tokens for weights. It runs in a thread of its own, and calls `wait` before each store call."""

    def __init__(self, number: int, store: Store, **settings: Any) -> None:
        self.run = FolderExchange(Wrapped(store, self.wait), checkpoint_every=3, **settings)
        turn = 1 if number % 2 else -1  # requests side by side come in any order
        self.run._all = lambda calls: [call() for call in calls[::turn]][::turn]  # in this thread
        self.run.later = self._later
        self.said: list[str] = []
        self.run.worker, self.run.say, self.number = f"w{number:02d}", self.said.append, number
        self.tokens = Tokens(self.run)
        self.folder = FolderRounds(self.tokens, self.run)
        self.made, self.error = 0, None
        self.thread = threading.Thread(target=self._main, daemon=True)

    @property
    def rounds(self) -> int:
        return int(self.tokens.round_number)

    def wait(self, call: str) -> None:
        raise NotImplementedError

    def ended(self) -> None:
        """It makes no more calls."""
        raise NotImplementedError

    def work(self) -> None:
        """Does a piece of work."""
        self.made += 1
        self.tokens.pending.append(1000 * (self.number + 1) + self.made)

    def _later(self, call: Callable[[], None]) -> None:
        try:
            call()
        except DemoptError as error:  # other bytes of a checkpoint, after a fork
            self.said.append(str(error))

    def _main(self) -> None:
        try:
            self.folder.join()
            while not (self.run.stopping or self.run.leaving):
                self.work()
                again = True
                while again:  # a round, as LocalDeMo does it
                    if self.folder.is_open:
                        self.folder.apply()
                        self.folder.catch_up()
                    self.tokens.extract()
                    self.folder.apply()
                    self.folder.catch_up()
                    again = self.folder.repeats
        except Crash:
            pass
        except BaseException as error:
            self.error = error
        self.ended()


class InTurns(Worker):
    """It makes one store call per turn, which the test gives."""

    def __init__(self, number: int, store: Faulty, **settings: Any) -> None:
        self.turns: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.waits: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.store = store
        super().__init__(number, store, late=0.0, **settings)
        self.thread.start()
        self.alive = self.waits.get()

    def turn(self, order: str = "go") -> None:
        """Lets it make its next call to the store."""
        if self.alive:
            self.turns.put(order)
            self.alive = self.waits.get()
            self.store.fault = ""

    def wait(self, call: str) -> None:
        self.waits.put(True)
        order = self.turns.get()
        if order == "die":
            raise Crash
        self.store.fault = order
        self.run.late = 1e9 if order == "go" else 0.0

    def ended(self) -> None:
        self.waits.put(False)


def literal(bare: ObjectStore) -> list[list[int]]:
    """The weights after each round, from the log alone."""
    record = log.read_record(bare)
    found: list[list[int]] = [[]]
    while record and (manifest := log.read_manifest(bare, record.identity, len(found) - 1)) is not None:
        tokens: list[int] = []
        for sender in manifest.senders:
            data = bare.get(log.message_name(manifest.round, sender.worker), 1 << 20)
            assert data is not None
            assert log.digest(data) == sender.digest
            body = data.partition(b"\n")[2][HEADER_BYTES:]
            tokens += [token for (token,) in struct.iter_unpack("<i", body) if token]
        found.append(found[-1] + tokens)
    return found


def check(workers: list[InTurns], bare: Faulty, keep_log: bool) -> None:
    told = any("are lost or count twice" in text for worker in workers for text in worker.said)
    for worker in workers:
        if worker.error is not None:  # where what a manifest names is gone, a worker ends, and says so
            assert isinstance(worker.error, ExchangeError), worker.error
            assert "gone" in str(worker.error) and (bare.gone or bare.forks), worker.error  # noqa: PT018
            continue
        applied = worker.tokens.applied
        assert len(set(applied)) == len(applied) or told, "a movement was applied twice"
        covered = worker.folder.is_behind  # its message may be in a checkpoint that it is about to take
        if not covered and (worker.alive or worker.run.leaving or worker.run.stopping):
            made = {1000 * (worker.number + 1) + number + 1 for number in range(worker.made)}
            assert made - set(applied) <= set(worker.tokens.pending) or told, "a movement was lost"
    if keep_log and not bare.gone and not bare.forks:
        expected = literal(bare)
        assert all(worker.tokens.applied == expected[worker.rounds] for worker in workers)
    else:
        those = [worker for worker in workers if worker.alive or not bare.forks]  # the others may be on a lost branch
        furthest = max((worker.tokens.applied for worker in those), key=len, default=[])
        assert all(worker.tokens.applied == furthest[: len(worker.tokens.applied)] for worker in those)


TURNS = st.one_of(st.integers(1, 3), st.integers(1, 30))
ACTIONS = st.one_of(
    st.tuples(st.just("go"), st.integers(0, 5), TURNS),
    st.tuples(st.just("late"), st.integers(0, 5), TURNS),  # it waits for nobody
    st.tuples(st.just("die"), st.integers(0, 5), st.just(1)),
    st.tuples(st.just("join"), st.just(0), st.just(1)),
    st.tuples(st.just("stop"), st.just(0), st.just(1)),
    st.tuples(st.just("leave"), st.integers(0, 5), st.just(1)),
)
FAULTS = st.one_of(
    ACTIONS,
    st.tuples(
        st.sampled_from(["conflict", "no answer", "stale", "slow", "two win"]),
        st.integers(0, 5),
        st.integers(1, 4),
    ),
    st.tuples(st.just("arrive"), st.just(0), st.just(1)),
)


@contextmanager
def schedule(kind: type[W], keep_log: bool = True) -> Iterator[tuple[Faulty, list[W], Callable[[str, int, int], None]]]:
    """Yields a store, its three workers, and a function that carries out an action. Turns are their time."""
    bare, workers = Faulty(), list[W]()

    def carry_out(action: str, who: int, turns: int) -> None:
        living = [worker for worker in workers if worker.alive]
        if action == "join" and len(living) < 6:
            workers.append(kind(len(workers), bare, keep_log=keep_log))
        elif action == "stop":
            put(bare, log.STOP, str(len(workers) + who).encode())
        elif action == "arrive":
            bare.arrive()
        elif action == "lose":
            bare.lose(max((worker.rounds for worker in workers), default=0))
        elif living:
            chosen = living[who % len(living)]
            chosen.run.leaving = chosen.run.leaving or action == "leave"
            for _ in range(turns):
                chosen.turn(action)

    modules, pauses = (exchange_module, inbox_module, weights_module, store_module), store_module._PAUSES
    for module in modules:
        module.time = types.SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: None)
    store_module._PAUSES = 0.0, 0.0
    try:
        for _ in range(3):
            carry_out("join", 0, 1)
        yield bare, workers, carry_out
    finally:
        for worker in workers:
            worker.turn("die")
        for module in modules:
            module.time = time
        store_module._PAUSES = pauses


def play(actions: list[tuple[str, int, int]], keep_log: bool) -> None:
    with schedule(InTurns, keep_log) as (bare, workers, carry_out):
        for action, who, turns in actions:
            carry_out(action, who, turns)
            if action != "leave" and not bare.forks:
                check(workers, bare, keep_log)
        bare.arrive()
        for _ in range(400 if bare.forks else 120):  # all that live get on, and nobody waits for ever
            for worker in workers:
                worker.turn("late")
        check(workers, bare, keep_log)
        rounds = [worker.rounds for worker in workers if worker.alive]
        assert not rounds or max(rounds) > 0


@hypothesis.given(st.lists(ACTIONS, min_size=10, max_size=60), st.booleans())
@hypothesis.settings(max_examples=max(250, hypothesis.settings.default.max_examples))
# The sleeper holds a message of round 0 when all messages of that time are deleted, and does not open the round again.
@hypothesis.example([("late", 0, 40), *[("late", 1, 30)] * 12, ("late", 0, 200), ("late", 1, 60)], False)
# The joiner's checkpoint is deleted before it reads it, so it takes a newer one.
@hypothesis.example([("go", 0, 23), ("go", 1, 3), ("go", 0, 23), ("go", 0, 24)], False)
def test_no_schedule_loses_or_doubles_a_movement(actions: list[Any], keep_log: bool) -> None:
    play(actions, keep_log)


@hypothesis.given(st.lists(FAULTS, min_size=10, max_size=60), st.booleans())
@hypothesis.settings(max_examples=max(40, hypothesis.settings.default.max_examples // 5))
def test_no_schedule_with_faults_of_the_store_loses_or_doubles_a_movement(actions: list[Any], keep_log: bool) -> None:
    """A 409, a done put that is answered 500, reads that lag, a put that arrives late, and one of two that both win."""
    play(actions, keep_log)


@hypothesis.given(st.lists(ACTIONS | st.just(("lose", 0, 1)), min_size=10, max_size=60), st.booleans())
@hypothesis.settings(max_examples=max(20, hypothesis.settings.default.max_examples // 50))
def test_message_that_was_deleted_after_a_manifest_named_it_makes_no_worker_diverge(
    actions: list[Any], keep_log: bool
) -> None:
    play(actions, keep_log)
