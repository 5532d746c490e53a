"""Random schedules of workers that send, die, sleep and join, against a literal model, with crashes between any calls.

A worker's movement is a set of tokens, one per piece of work. Its message carries the oldest tokens that it has not
seen applied. The weights are the list of tokens applied so far. Each worker is a thread, and each of its calls to the
store waits for its turn, which the test gives; so calls can come in any order, and none depends on speed. In the
manifests that lead to a worker's weights, each of its tokens counts once; else it waits, or was said to be dropped.
"""

import copy
import dataclasses
import json
import queue
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar
from unittest.mock import patch

import hypothesis
import torch
from hypothesis import strategies as st
from stores import STILL, Crash, Through, time_by

from demopt.errors import DemoptError, ExchangeError
from demopt.replicator.rounds import Follower
from demopt.replicator.route import Result
from demopt.runs import log
from demopt.runs.exchange import FolderExchange
from demopt.runs.open_round import tensor_of
from demopt.runs.stop import put_stop
from demopt.runs.store import ObjectStore, Store, StoreError
from demopt.runs.weights import FolderRounds
from demopt.wire.message import HEADER_BYTES, Header

MOST = 8  # tokens in a message
FORKS = "second stays", "first stays"  # two puts of one manifest win, and one of the two is read from then on
DROPPED = "what this worker has not sent is dropped"
W = TypeVar("W", bound="InTurns")


@dataclasses.dataclass(frozen=True)
class Rows:
    """Stands in for decoded messages: a row of tokens each, 0 for none."""

    tokens: torch.Tensor
    samples: tuple[int, ...] = (1,)
    top: None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"tokens": self.tokens}


class Tokens:
    """Stands in for a replicator, its wiring and its route: its weights are the tokens applied so far, in order."""

    groups: ClassVar[list[Any]] = []
    device, widths = torch.device("cpu"), (HEADER_BYTES + 4 * MOST,) * 2
    message_bytes = widths[0]
    in_flight = False

    def __init__(self, run: FolderExchange) -> None:
        self.round_number, self.weights = torch.zeros((), dtype=torch.int64), torch.zeros(8192, dtype=torch.int32)
        self.options = types.SimpleNamespace(config_facts=tuple)
        self.route, self.run, self.round = self, run, None
        self.follower, self.fingerprint = Follower(), lambda: 0
        self.pending: list[int] = []  # done here, and not known to be applied
        self.dropped = set[int]()  # from a state that does not know which were sent, or from before a fork

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
        self.resume_round(message, self.run.attachment(self, self.header(None), None))

    def exchange(self) -> Any:
        now = self.round
        now.outcome = self.run.exchange_round(self, now.header, now.message, now.attached)
        return now.outcome.result

    def apply(self, result: Result) -> None:
        self.apply_missed(result, 0)
        self.mark_applied()

    def mark_applied(self) -> None:
        if self.round.outcome.row is not None:
            sent = tokens_of(self.round.message)
            self.pending = [token for token in self.pending if token not in sent]
        self.round = None

    def rollback(self) -> None:
        self.round = None

    def let_extract(self) -> None:
        """Nothing goes on in the background."""

    def resume_round(self, message: torch.Tensor, attached: Any) -> None:
        known = {"message": message, "attached": attached, "finite": True, "outcome": None, "stage": "left open"}
        self.round = types.SimpleNamespace(header=self.header(None), **known)

    def clear_momentum(self) -> None:
        self.dropped |= {*self.pending}
        self.pending = []

    def apply_missed(self, result: Result, received_bytes: int) -> None:
        rows = result.decoded[0].tokens if result.decoded else torch.empty(0)
        applied = [*self.applied, *(token for token in rows.flatten().tolist() if token)]
        self.weights[: len(applied)] = torch.tensor(applied, dtype=torch.int32)
        self.round_number += 1

    @property
    def is_open(self) -> bool:
        return self.round is not None

    @property
    def applied(self) -> list[int]:
        return self.weights[self.weights != 0].tolist()


def sent(data: bytes) -> list[int]:
    """The tokens in a message as a store holds it."""
    return tokens_of(tensor_of(data.partition(b"\n")[2]))


def tokens_of(message: torch.Tensor) -> list[int]:
    return [token for token in message[HEADER_BYTES:].view(torch.int32).tolist() if token]


class Faulty(ObjectStore):
    """Objects in memory. A call that is made while there is a `fault` meets it."""

    def __init__(self) -> None:
        super().__init__()
        self.fault, self.forks, self.gone = "", 0, 0
        self.forking = dict[threading.Thread, str]()  # how a worker's next manifest wins as a second one
        self.read = set[tuple[threading.Thread, str]]()  # names that a worker has read
        self.young: list[str] = []  # the last objects that were put
        self.under_way: list[tuple[str, bytes]] = []
        self.ever: dict[str, tuple[str, bytes]] = {}  # all messages and manifests, with their names, by digest

    def get(self, name: str, most: int) -> bytes | None:
        if self.hides(name) or (found := super().get(name, most)) is None:
            return None
        self.read.add((threading.current_thread(), name))
        return found

    def list(self, folder: str) -> set[str]:
        return {name for name in super().list(folder) if not self.hides(f"{folder}/{name}")}

    def hides(self, name: str) -> bool:
        """Whether a read misses this young object: any one, or only a manifest that a second one is to replace."""
        return name in self.young and (self.fault == "stale" or self.splits(name))

    def splits(self, name: str) -> bool:
        """Whether a worker may put a second manifest: it has not read the first."""
        return self.fault in FORKS and "manifest" in name and (threading.current_thread(), name) not in self.read

    def put_if_absent(self, name: str, data: bytes) -> bool:
        self.ever[log.digest(data)] = name, data
        if self.fault == "conflict":
            raise StoreError("409: another put is under way")
        if self.fault == "slow":
            self.under_way.append((name, data))
            raise StoreError("no answer for ten seconds")
        if self.splits(name):
            self.forking.pop(threading.current_thread(), None)
            there = ObjectStore.get(self, name, 1 << 30) is not None
            if there and self.fault == "first stays":
                self.forks += 1
                return True
            if there and name in self.young:  # both at the same time
                self.forks += 1
                self.delete([name])
        won = super().put_if_absent(name, data)
        self.young = [*self.young, name][-4:] if won else self.young
        if self.fault == "no answer":
            raise StoreError("500, after it was done")
        return won

    def arrive(self) -> None:
        """Puts the objects of all slow uploads."""
        for name, data in self.under_way:
            super().put_if_absent(name, data)
        self.under_way.clear()

    def lose(self, number: int) -> None:
        """Deletes a round's messages, which some may have read."""
        names = [log.message_name(number, worker) for worker in sorted(log.look(self, number).messages)]
        self.gone += len(names)
        self.delete(names)


def weights_after(newest: str, ever: Mapping[str, tuple[str, bytes]]) -> list[int]:
    """The weights after a manifest, from the manifests up to it and the messages that they name, gone or not."""
    found: list[int] = []
    while newest:
        manifest = json.loads(ever[newest][1])
        found[:0] = [token for each in manifest["senders"] for token in sent(ever[each["digest"]][1])]
        newest = manifest["before"]
    return found


class Worker:
    """A worker with tokens for weights. It runs in a thread of its own, and calls `wait` before each store call."""

    def __init__(self, number: int, store: Store, again: "Worker | None" = None, **settings: Any) -> None:
        """`again`: the worker whose last state this one goes on from."""
        self.run = FolderExchange(Through(store, self.wait), checkpoint_every=3, **settings)
        turn = 1 if number % 2 else -1  # requests side by side come in any order
        self.run.together = lambda calls: [call() for call in calls[::turn]][::turn]  # in this thread
        self.run.later = self._later
        self.said: list[str] = []
        self.run.worker, self.run.say, self.number = f"w{number:02d}", self.said.append, number
        self.tokens = Tokens(self.run)
        self.folder = FolderRounds(self.tokens, self.run)
        self.made, self.error, self.owner = 0, None, number
        self.state = None  # from which it can go on
        self.unsure = set[int]()  # tokens that were made after such a state
        if again is not None:
            self.state, self.owner, self.made = again.state, again.owner, again.made
            made, of_tokens, of_folder = copy.deepcopy(self.state)
            vars(self.tokens).update(of_tokens)
            self.folder.restore(self.folder.read_entry(of_folder))
            self.unsure = again.unsure | {1000 * (self.owner + 1) + each for each in range(made + 1, self.made + 1)}
            self.tokens.dropped = again.tokens.dropped
            self.said += again.said
        self.thread = threading.Thread(target=self._main, daemon=True)

    @property
    def rounds(self) -> int:
        return int(self.tokens.round_number)

    def wait(self, call: str) -> None:
        raise NotImplementedError

    def ended(self) -> None:
        """It makes no more calls."""
        raise NotImplementedError

    def rested(self) -> None:
        """It is between two rounds."""

    def work(self) -> None:
        """Does a piece of work."""
        self.made += 1
        self.tokens.pending.append(1000 * (self.owner + 1) + self.made)

    def save(self) -> None:
        of_tokens = {name: getattr(self.tokens, name) for name in ("pending", "weights", "round_number")}
        self.state = copy.deepcopy((self.made, of_tokens, self.folder.entry()))

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
                    self.folder.end_open_round()
                    self.tokens.extract()
                    again = self.folder.exchange_and_apply()
                    self.rested()
        except Crash:
            pass
        except BaseException as error:
            self.error = error
            if self.run.joined:
                self.save()
        self.ended()


class InTurns(Worker):
    """It makes one store call per turn, which the test gives."""

    def __init__(self, number: int, store: Faulty, **settings: Any) -> None:
        self.store, self.turns, self.waits = store, queue.SimpleQueue[str](), queue.SimpleQueue[bool]()
        super().__init__(number, store, late=0.0, **settings)
        again = settings.get("again")
        self.heard = again.heard if again else 0  # texts in `said` that were looked at
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
        if order in ("die", "kill"):
            raise Crash
        if order == "break":
            raise ExchangeError("broken")
        if order in FORKS:
            self.store.forking[self.thread] = order
        self.store.fault = self.store.forking.get(self.thread, order)
        self.run.late = 1e9 if order == "go" else 0.0

    def ended(self) -> None:
        self.waits.put(False)

    def rested(self) -> None:
        """Its weights follow from its manifests; each of its tokens counts once, waits, or was said to be dropped."""
        applied = self.tokens.applied
        assert applied == weights_after(log.digest_of(self.run.decided), self.store.ever)
        made = {1000 * (self.owner + 1) + number + 1 for number in range(self.made)}
        if any(DROPPED in text for text in self.said[self.heard :]):  # also tokens that only lost manifests list
            self.tokens.dropped |= made
        self.heard = len(self.said)
        times = Counter(applied + self.tokens.pending)
        assert all(times[token] < 2 for token in made), "a movement counts twice"
        assert not {token for token in made if not times[token]} - self.unsure - self.tokens.dropped, "one was lost"
        self.save()


def check(workers: list[InTurns], bare: Faulty, forked: bool = False) -> None:
    """All workers that ended said why; all weights are of one history, unless `forked`, with each token once."""
    for worker in workers:
        if worker.error is not None and str(worker.error) != "broken":  # an object that a manifest names may be gone
            is_gone = isinstance(worker.error, ExchangeError) and "gone" in str(worker.error)
            assert (is_gone and (bare.gone or bare.forks)) or "holds no run" in str(worker.error), worker.error
    those = [] if forked else [each.tokens.applied for each in workers if each.alive or not bare.forks]
    furthest = max(those, key=len, default=[])
    assert all(applied == furthest[: len(applied)] for applied in those)
    assert all(times == 1 for times in Counter(furthest).values())


TURNS = st.one_of(st.integers(1, 3), st.integers(1, 30))
ACTIONS = st.one_of(
    st.tuples(st.just("go"), st.integers(0, 5), TURNS),
    st.tuples(st.just("late"), st.integers(0, 5), TURNS),  # it waits for nobody
    st.tuples(st.just("die"), st.integers(0, 5), st.just(1)),
    st.tuples(st.just("join"), st.just(0), st.just(1)),
    st.tuples(st.just("stop"), st.just(0), st.just(1)),
    st.tuples(st.just("leave"), st.integers(0, 5), st.just(1)),
)
# Killed, or ended by an error; it goes on from its last state, as another process.
RESTARTS = st.tuples(st.sampled_from(["kill", "break"]), st.integers(0, 5), st.just(1))
FAULTS = st.one_of(
    ACTIONS | RESTARTS,
    st.tuples(st.sampled_from(["conflict", "no answer", "stale", "slow"]), st.integers(0, 5), st.integers(1, 4)),
    st.tuples(st.sampled_from(FORKS), st.integers(0, 5), st.just(1)),
    st.tuples(st.sampled_from(["arrive", "lose"]), st.just(0), st.just(1)),
)
GHOSTS = ACTIONS | RESTARTS | st.just(("ghost", 0, 1))


def actions_of(text: str) -> list[tuple[str, int, int]]:
    return [(action, int(who), int(turns)) for action, who, turns in (a.rsplit(" ", 2) for a in text.split(", "))]


@contextmanager
def schedule(kind: type[W], keep_log: bool = True) -> Iterator[tuple[Faulty, list[W], Callable[[str, int, int], None]]]:
    """Yields a store, its three workers, and a function that carries out an action. Turns are their only clock."""
    bare, workers = Faulty(), list[W]()

    def carry_out(action: str, who: int, turns: int) -> None:
        living = [worker for worker in workers if worker.alive]
        if action == "join" and len(living) < 6:
            workers.append(kind(len(workers), bare, keep_log=keep_log))
        elif action == "stop":
            if record := log.read_record(bare):
                put_stop(bare, max((worker.rounds for worker in workers), default=0), record.identity)
        elif action == "arrive":
            bare.arrive()
        elif action == "ghost":  # somebody asks the others to wait ten minutes, and never comes
            if record := log.read_record(bare):
                log.put_hello(bare, max(worker.rounds for worker in workers), record.identity, "ghost", 600.0)
        elif action == "lose":
            bare.lose(max((worker.rounds for worker in workers), default=0))
        elif living:
            chosen = living[who % len(living)]
            chosen.run.leaving = chosen.run.leaving or action == "leave"
            for _ in range(turns):
                chosen.turn(action)
            if action in ("break", "kill") and chosen.state is not None and not chosen.alive:
                workers.append(kind(len(workers), bare, again=chosen, keep_log=keep_log))

    with time_by(STILL, "store"), patch("demopt.runs.store._PAUSES", (0.0, 0.0)):
        try:
            for _ in range(3):
                carry_out("join", 0, 1)
            yield bare, workers, carry_out
        finally:
            for worker in workers:
                worker.turn("die")


def play(actions: list[tuple[str, int, int]], keep_log: bool, stops: bool = False) -> None:
    with schedule(InTurns, keep_log) as (bare, workers, carry_out):
        for action, who, turns in actions:
            carry_out(action, who, turns)
            check(workers, bare, forked=bare.forks > 0)
        bare.arrive()
        begun, bare.forking = [(worker, worker.rounds) for worker in workers], {}
        # Living workers get on, or end if an object they need is gone. Six obey a wish within 8 rounds of 10 turns.
        are_six = stops and sum(worker.alive for worker in workers) == 6
        for turn in range(400 if bare.forks else 180 if are_six else 120):
            if stops and turn in (0, 60):  # workers that join after a wish do not obey it
                carry_out("stop", 0, 1)
            for worker in workers:
                worker.run._patient.patience = 0.0 if turn > 60 else 600.0
                worker.turn("late")
        check(workers, bare)
        assert all(worker.rounds > number for worker, number in begun if worker.alive), "one waits for ever"
        assert not stops or not any(worker.alive for worker in workers), "one does not hear the wish to stop"


@hypothesis.given(st.lists(ACTIONS | RESTARTS, min_size=10, max_size=60), st.booleans())
@hypothesis.settings(max_examples=max(250, hypothesis.settings.default.max_examples))
# The sleeper holds a message of round 0 when all messages of that time are deleted, and does not open the round again.
@hypothesis.example([("late", 0, 40), *[("late", 1, 30)] * 12, ("late", 0, 200), ("late", 1, 60)], False)
# The joiner's checkpoint is deleted before it reads it, so it takes a newer one.
@hypothesis.example([("go", 0, 23), ("go", 1, 3), ("go", 0, 23), ("go", 0, 24)], False)
def test_no_schedule_loses_or_doubles_a_movement(actions, keep_log):
    play(actions, keep_log)


@hypothesis.given(st.lists(FAULTS, min_size=10, max_size=60), st.booleans())
@hypothesis.settings(max_examples=max(40, hypothesis.settings.default.max_examples // 5))
# A worker forgets its round, because the manifest before it is another one; but the next manifest lists its message.
@hypothesis.example(  # three manifests of one round win
    actions_of(
        "late 4 15, stale 3 1, go 0 20, stale 3 2, late 0 21, go 2 3, go 2 16, go 0 19, break 5 1, go 5 23, go 0 2, "
        "second stays 0 1, go 0 25, second stays 2 1, late 1 20, slow 1 4, go 1 2, go 3 19, slow 1 4, late 4 2, go 5 23"
    ),
    False,
)
def test_no_schedule_with_faults_of_the_store_loses_or_doubles_a_movement(actions, keep_log):
    """A 409, a 500 for a put that was done, late reads and puts, two puts that both win, deleted messages."""
    play(actions, keep_log)


@hypothesis.given(st.lists(GHOSTS, min_size=10, max_size=60), st.booleans())
@hypothesis.settings(max_examples=max(40, hypothesis.settings.default.max_examples // 5))
@hypothesis.example(actions_of("late 0 40, late 1 40, ghost 0 1, late 0 40, late 1 40"), False)
@hypothesis.example(actions_of("kill 3 1, go 2 1, die 0 1, join 0 1, join 0 1, go 0 6, join 0 1, join 0 1"), False)
def test_all_hear_a_wish_to_stop_while_they_wait_for_one_that_never_comes(actions, keep_log):
    at_once = (patch(f"demopt.runs.{module}.TOLD_AFTER", -1.0) for module in ("exchange", "open_round"))
    with next(at_once), next(at_once):  # time stands still
        play(actions, keep_log, stops=True)
