"""Failure detection: after a failed exchange, finds the lost ranks and their machines.

Each rank has a thread that polls the store of torch.distributed once per second and answers calls there. A rank whose
exchange fails calls; ranks without an answer are dead, frozen, or cut off in at least one direction. The store keeps
the first verdict, because dying ranks take others with them, which would then be blamed.
"""

import json
import re
import socket
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from demopt.errors import ExchangeError, first_line
from demopt.exchange.background import in_thread
from demopt.interrupts import uninterrupted

ANSWER_SECONDS = 10.0  # time for an answer: a busy machine is slow, but not dead
_POLL_SECONDS = 1.0  # between two polls of the store
_ASK_SECONDS = 3.0  # between two calls of a rank that waits for the others to come to one place
_CALLS, _VERDICT = "demopt/calls", "demopt/verdict"
#: The words of gloo, nccl and torch.distributed for the loss of a peer.
_NETWORK = re.compile(r"gloo|NCCL|ProcessGroup|Connection|Broken pipe|[Tt]imed out|DistNetwork|DistStore")


class Answer(NamedTuple):
    """A rank's answer to a call: how many exchanges it has begun with these ranks, and whether it waits in one."""

    begun: int
    waiting: bool


class Liveness:
    """This rank's part in roll calls. `store` returns the store; RuntimeError after the process group has ended."""

    def __init__(self, store: Callable[[], Any], rank: int) -> None:
        self._store = store
        self._rank = rank
        self._begun: Counter[str] = Counter()  # exchanges by the ranks in them
        self._waiting: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._came: Counter[str] = Counter()  # calls of `await_all` by place
        self._answered = 0
        self._hosts: dict[int, str] = {}  # that are known, by rank
        self._awaited = {0}  # the ranks whose hosts are to be known; rank 0's machine holds the store
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(self, ranks: Sequence[int], ours: bool = True) -> Iterator[None]:
        """Turns a failed collective into an ExchangeError that names lost ranks; if not `ours`, only network errors."""
        key = _key_of(ranks)
        self._ensure_thread(ranks)
        with self._lock:
            self._begun[key] += 1
            self._waiting[key] += 1
        begun = time.monotonic()
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if not ours and not _NETWORK.search(f"{type(error).__name__} {error}"):
                raise
            waited = time.monotonic() - begun
            raise ExchangeError(f"{self.suspects(ranks)} after {waited:.1f} s ({first_line(error)})") from error
        finally:
            with self._lock:
                self._waiting[key] -= 1

    def await_all(self, ranks: Sequence[int], call: str, seconds: float, group: str = "") -> None:
        """Waits until all ranks have come to this call, before it sends anything. `group`: which group of these ranks.

        A rank that takes another path, as under `if rank == 0:`, waits in its next exchange for this one. gloo ends the
        process when collectives differ; here it is an ExchangeError. The call itself finds a rank that does not answer.
        """
        self._ensure_thread(ranks)
        place = f"demopt/await/{_key_of(ranks)}{group}/{call}"
        came = self._came[place]
        try:
            with uninterrupted():  # so that the store and this rank count the same calls
                try:
                    store = self._store()
                    come = store.add(place, 1)
                except Exception:  # no store: the exchange itself fails
                    return
                self._came[place] += 1
            self._wait(ranks, call, seconds, store, place, come)
        except BaseException:  # refused, or interrupted, as by Ctrl-C: for the others this rank has not come
            if self._came[place] > came:
                self._withdraw(ranks, store, place)
            raise

    def _wait(self, ranks: Sequence[int], call: str, seconds: float, store: Any, place: str, come: int) -> None:
        """Waits until the store counts as many calls of each rank as this one has made."""
        started = asked = time.monotonic()
        while come < self._came[place] * len(ranks):
            if time.monotonic() > asked + _ASK_SECONDS:
                answers, asked = self._answers(ranks), time.monotonic()
                begun = answers[self._rank].begun
                elsewhere = [rank for rank, each in answers.items() if each.waiting and each.begun > begun]
                come = store.add(place, 0)  # a rank may have come since, and gone on to its next exchange
                if len(answers) < len(ranks) or come >= self._came[place] * len(ranks):
                    return
                if elsewhere or asked > started + seconds:
                    raise ExchangeError(self._refusal(ranks, call, elsewhere))
            time.sleep(0.02)
            come = store.add(place, 0)

    @uninterrupted()
    def _withdraw(self, ranks: Sequence[int], store: Any, place: str) -> None:
        """Takes back that this rank has come, unless all have: then the others have gone on."""
        if store.add(place, -1) + 1 < self._came[place] * len(ranks):
            self._came[place] -= 1
        else:
            store.add(place, 1)

    def _refusal(self, ranks: Sequence[int], call: str, elsewhere: Sequence[int]) -> str:
        """Returns the verdict that not all ranks came to a call, and leaves it for the others."""
        absent = ", ".join(map(self._named, elsewhere)) or "not all"
        others = f"{absent} of {len(ranks)} went on without, perhaps after a Ctrl-C on one rank only: call it on all "
        others += "ranks, not under `if rank == 0:`"
        text = f"{self._named(self._rank)} called {call}, and {others}"
        key = _key_of(ranks)
        verdict = {"text": text, "by": self._rank, "key": key, "begun": self._begun[key] + 1}
        self._store().set(_VERDICT, json.dumps(verdict))
        return text

    def suspects(self, ranks: Sequence[int]) -> str:
        """Calls all ranks; returns the verdict. Waits for the slowest permitted answer."""
        with suppress(Exception):  # the store is gone, perhaps with its machine: then it may block for long
            return in_thread(lambda: self._ask(ranks)).result(ANSWER_SECONDS + 5 * _POLL_SECONDS)
        first = f"no answer from {self._named(0)} of {len(ranks)}, whose machine holds the store"
        if self._hosts.get(0) == socket.gethostname():  # a process has ended, not a machine
            return first
        return f"{first} (or the network of {self._named(self._rank)} is down)"

    def answer(self) -> None:
        """Polls the store once: publishes this rank's host, reads the other hosts, answers calls."""
        store = self._store()
        if self._rank not in self._hosts:
            self._hosts[self._rank] = socket.gethostname()
            store.set(f"demopt/host/{self._rank}", self._hosts[self._rank])
        with self._lock:
            unknown = {rank: f"demopt/host/{rank}" for rank in self._awaited if rank not in self._hosts}
        if unknown and store.check([*unknown.values()]):
            self._hosts |= {rank: store.get(place).decode() for rank, place in unknown.items()}
        if store.check([_CALLS]):
            last = int(store.get(_CALLS))
            with self._lock:
                state = {key: [count, self._waiting[key] > 0] for key, count in self._begun.items()}
            for call in range(self._answered + 1, last + 1):
                store.set(f"demopt/answer/{call}/{self._rank}", json.dumps(state))
            self._answered = last

    def _ensure_thread(self, ranks: Sequence[int]) -> None:
        with self._lock:
            self._awaited.update(ranks)
            if self._thread is not None or len(ranks) < 2:
                return
            stopped, name = threading.Event(), "demopt liveness"
            thread = threading.Thread(target=_serve, args=(weakref.ref(self), stopped), daemon=True, name=name)
            weakref.finalize(self, _end, stopped, thread)
            thread.start()
            self._thread = thread

    def _ask(self, ranks: Sequence[int]) -> str:
        if self._thread is not None and not self._thread.is_alive():  # store lost; torch would report at length again
            raise RuntimeError("no store")
        store, key = self._store(), _key_of(ranks)
        if store.check([_VERDICT]):
            verdict = json.loads(store.get(_VERDICT))
            if verdict["key"] == key and self._begun[key] <= verdict["begun"]:
                return f"{verdict['text']} (as rank {verdict['by']} found)"
        text = verdict_of({rank: self._named(rank) for rank in ranks}, self._answers(ranks), self._rank)
        verdict = {"text": text, "by": self._rank, "key": key, "begun": self._begun[key]}
        store.set(_VERDICT, json.dumps(verdict))
        return text

    def _answers(self, ranks: Sequence[int]) -> dict[int, Answer]:
        """Calls all ranks, and returns the answers that come in time, by rank; this rank counts as waiting."""
        store, key = self._store(), _key_of(ranks)
        call = store.add(_CALLS, 1)
        missing, deadline = [rank for rank in ranks if rank != self._rank], time.monotonic() + ANSWER_SECONDS
        answers = {self._rank: Answer(self._begun[key], True)}
        while missing and time.monotonic() < deadline:
            time.sleep(0.1)
            for rank in missing.copy():
                if store.check([place := f"demopt/answer/{call}/{rank}"]):
                    answers[rank] = Answer(*json.loads(store.get(place)).get(key, (0, False)))
                    missing.remove(rank)
        return answers

    def _named(self, rank: int) -> str:
        return f"rank {rank} (host {self._hosts[rank]})" if rank in self._hosts else f"rank {rank}"


def verdict_of(names: dict[int, str], answers: dict[int, Answer], me: int) -> str:
    """Names the missing ranks, or those that the others wait for, from the answers to a call."""
    missing = [name for rank, name in names.items() if rank not in answers]
    if missing and len(missing) == len(names) - 1 > 1:
        return f"no rank answers {names[me]}: the network of this machine is down, or all {len(missing)} others ended"
    if missing:
        return f"no answer from {', '.join(missing)} of {len(names)}"
    newest = max(answer.begun for answer in answers.values())
    late = [names[rank] for rank, answer in answers.items() if answer.begun < newest and not answer.waiting]
    if late:
        verbs = "is alive, but has" if len(late) == 1 else "are alive, but have"
        return f"{', '.join(late)} of {len(names)} {verbs} not come to this exchange"
    return f"exchange among {len(names)} ranks failed, and all of them answer: a connection between two of them broke"


def _serve(owner: "weakref.ref[Liveness]", stopped: threading.Event) -> None:
    while not stopped.wait(_POLL_SECONDS):
        liveness = owner()
        if liveness is None:
            return
        try:
            liveness.answer()
        except Exception:  # the store has ended, and with it all calls
            return
        del liveness


def _end(stopped: threading.Event, thread: threading.Thread) -> None:
    """Ends the thread: one that is inside torch while the interpreter ends would bring the process down."""
    stopped.set()
    if thread is not threading.current_thread():
        thread.join(ANSWER_SECONDS)  # a store that is slow, on a busy machine or far away, answers within that


def _key_of(ranks: Sequence[int]) -> str:
    return str(zlib.crc32(repr(list(ranks)).encode()))
