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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from demopt.errors import ExchangeError, first_line

ANSWER_SECONDS = 10.0  # time for an answer: a busy machine is slow, but not dead
_POLL_SECONDS = 1.0  # between two polls of the store
_PATIENCE_SECONDS = 3.0  # until a started poll counts as lost: on a slow network it takes a while
_PROBE_SECONDS = 2.0  # to reach another machine
_PROBED_PORT = 9  # any: a machine that refuses a connection is there
_CALLS, _VERDICT = "demopt/calls", "demopt/verdict"
#: How gloo, nccl and torch.distributed call the loss of a peer.
_NETWORK = re.compile(r"gloo|NCCL|ProcessGroup|Connection|Broken pipe|[Tt]imed out|DistNetwork|DistStore")


@dataclass(frozen=True)
class Peer:
    """The host of a rank. `address` is empty if unknown."""

    rank: int
    host: str
    address: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host})" if self.host else f"rank {self.rank}"


@dataclass(frozen=True)
class Answer:
    """A rank's answer to a call: how many exchanges it has begun with these ranks, and whether it waits in one."""

    begun: int
    waiting: bool


class Liveness:
    """This rank's part in roll calls. `find_store` returns the store, or None after the process group has ended."""

    def __init__(self, find_store: Callable[[], Any | None], rank: int) -> None:
        self._find_store = find_store
        self._me = Peer(rank, socket.gethostname())
        self._begun: dict[str, int] = {}  # exchanges by the ranks in them
        self._waiting: dict[str, int] = {}
        self._lock = threading.Lock()
        self._answered = 0
        self._known: dict[int, Peer] = {}
        self._holder = ""  # address of the machine that holds the store
        self._told = False
        self._lost = False  # the store; torch reports each failure of it at length, so it is not asked twice
        self._awaited: set[int] = set()
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(self, ranks: Sequence[int], ours: bool = True) -> Iterator[None]:
        """Around a collective of these global ranks: its failure becomes an ExchangeError that names the lost ones.

        `ours`: all RuntimeErrors are the collective's. Otherwise only those that speak of a network are.
        """
        key = _key_of(ranks)
        with self._lock:
            if self._thread is None and len(ranks) > 1:
                self._thread = self._start()
            self._awaited.update(ranks)
            self._begun[key] = self._begun.get(key, 0) + 1
            self._waiting[key] = self._waiting.get(key, 0) + 1
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

    def suspects(self, ranks: Sequence[int]) -> str:
        """Calls all ranks; returns the verdict. Waits for the slowest permitted answer."""
        found: list[str] = []

        def ask() -> None:
            try:
                found.append(self._ask(ranks))
            except Exception:  # the store is gone, perhaps with its machine
                return

        thread = threading.Thread(target=ask, daemon=True)  # a store on a lost machine blocks for long
        thread.start()
        thread.join(ANSWER_SECONDS + 5 * _POLL_SECONDS)
        if found:
            return found[0]
        others = [self._peer(rank) for rank in ranks if rank != self._me.rank]
        return without_store(self._me, others, self._holder, reaches)

    def answer(self) -> None:
        """Polls the store once: publishes this rank's host, reads the other hosts, answers calls."""
        self._lost = True
        self._poll()
        self._lost = False

    def _poll(self) -> None:
        store = self._find_store()
        if store is None:
            raise RuntimeError("the process group has ended")
        if not self._told:
            self._holder = _holder(store)
            self._me = replace(self._me, address=local_address(self._holder))
            store.set(_place(self._me.rank), json.dumps(asdict(self._me)))
            self._told = True
        with self._lock:
            unknown = [rank for rank in self._awaited if rank not in self._known]
        if unknown and store.check([_place(rank) for rank in unknown]):
            for rank in unknown:
                self._known[rank] = Peer(**json.loads(store.get(_place(rank))))
        if store.check([_CALLS]):
            last = int(store.get(_CALLS))
            with self._lock:
                state = {key: [count, self._waiting[key] > 0] for key, count in self._begun.items()}
            for call in range(self._answered + 1, last + 1):
                store.set(_answer(call, self._me.rank), json.dumps(state))
            self._answered = last

    def _start(self) -> threading.Thread:
        stopped = threading.Event()
        thread = threading.Thread(target=_serve, args=(weakref.ref(self), stopped), daemon=True, name="demopt liveness")
        weakref.finalize(self, _end, stopped, thread)
        thread.start()
        return thread

    def _ask(self, ranks: Sequence[int]) -> str:
        store, key = self._find_store(), _key_of(ranks)
        patience = time.monotonic() + _PATIENCE_SECONDS
        while self._lost and self._thread is not None and self._thread.is_alive() and time.monotonic() < patience:
            time.sleep(0.1)
        if store is None or self._lost:
            raise RuntimeError("no store")
        if store.check([_VERDICT]):
            verdict = json.loads(store.get(_VERDICT))
            if verdict["key"] == key and self._begun[key] <= verdict["begun"]:
                return f"{verdict['text']} (as rank {verdict['by']} found)"
        call = store.add(_CALLS, 1)
        missing, deadline = [rank for rank in ranks if rank != self._me.rank], time.monotonic() + ANSWER_SECONDS
        answers: dict[int, Answer] = {}
        while missing and time.monotonic() < deadline:
            time.sleep(0.1)
            for rank in [rank for rank in missing if store.check([_answer(call, rank)])]:
                state = json.loads(store.get(_answer(call, rank)))
                answers[rank] = Answer(*state.get(key, (0, False)))
                missing.remove(rank)
        answers[self._me.rank] = Answer(self._begun[key], True)
        text = verdict_of({rank: self._peer(rank) for rank in ranks}, answers, self._me)
        verdict = {"text": text, "by": self._me.rank, "key": key, "begun": self._begun[key]}
        store.set(_VERDICT, json.dumps(verdict))
        return text

    def _peer(self, rank: int) -> Peer:
        return self._me if rank == self._me.rank else self._known.get(rank, Peer(rank, ""))


def verdict_of(peers: dict[int, Peer], answers: dict[int, Answer], me: Peer) -> str:
    """Names the missing ranks, or those that the others wait for, from the answers to a call."""
    missing = [peers[rank] for rank in peers if rank not in answers]
    if missing and len(missing) == len(peers) - 1 > 1:
        return f"no rank answers {me}: the network of this machine is down, or all {len(missing)} others have ended"
    if missing:
        return f"no answer from {', '.join(map(str, missing))} of {len(peers)}"
    newest = max(answer.begun for answer in answers.values())
    late = [peers[rank] for rank, answer in answers.items() if answer.begun < newest and not answer.waiting]
    if late:
        verbs = "is alive, but has" if len(late) == 1 else "are alive, but have"
        return f"{', '.join(map(str, late))} of {len(peers)} {verbs} not come to this exchange"
    return f"exchange among {len(peers)} ranks failed, and all of them answer: a connection between two of them broke"


def without_store(me: Peer, others: list[Peer], holder: str, reached: Callable[[str], bool]) -> str:
    """Names the missing ranks when the store does not answer, from the machines that this one still reaches."""
    count = len(others) + 1
    at_store = [peer for peer in others if peer.address and peer.address == holder]
    if not at_store:
        return f"exchange among {count} ranks failed"
    if me.address == holder:  # a process has ended, not a machine: the first rank's
        at_store = at_store[:1]
    named = f"no answer from {', '.join(map(str, at_store))} of {count}, whose machine holds the store"
    elsewhere = {peer.address for peer in others} - {holder, me.address, ""}
    if me.address == holder or any(map(reached, sorted(elsewhere))):
        return named
    if elsewhere and not reached(holder):
        return f"{me} reaches no other machine: its own network is down"
    return named if reached(holder) else f"{named} (or the network of {me} is down)"


def reaches(address: str) -> bool:
    """Whether a machine answers at all: it takes or refuses a connection."""
    try:
        socket.create_connection((address, _PROBED_PORT), _PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


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
        thread.join(_POLL_SECONDS)


def _holder(store: Any) -> str:
    """Returns the address of the machine that holds the store; empty if it is not one of the network."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", "")
    try:
        return socket.gethostbyname(host) if host else ""
    except OSError:
        return ""


def local_address(towards: str) -> str:
    """Returns the address that this machine has on the way to another one. Nothing is sent."""
    if not towards:
        return ""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, _PROBED_PORT))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _key_of(ranks: Sequence[int]) -> str:
    return str(zlib.crc32(repr(list(ranks)).encode()))


def _place(rank: int) -> str:
    return f"demopt/peer/{rank}"


def _answer(call: int, rank: int) -> str:
    return f"demopt/answer/{call}/{rank}"
