"""FolderExchange: the exchange of LocalDeMo through a folder or bucket, between workers that come and go."""

import ctypes
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from demopt.errors import DemoptError, DriftError, ExchangeError, MessageError, SettingsError
from demopt.exchange import Meter, SingleRank
from demopt.runs import log
from demopt.runs.key import Keyed
from demopt.runs.log import Manifest, Message, Record, Seen
from demopt.runs.store import Patient, Store, open_store
from demopt.version import __version__

T = TypeVar("T")
Refusal = Callable[[Tensor], str]
_POLL = (0.004, 0.25)  # seconds between looks at an open round: the shortest, and the longest
_AT_ONCE = 8  # requests


class CoveredError(DemoptError):
    """A round's messages are gone, because a checkpoint covers it: this worker was away for long."""


class FolderExchange(Meter):
    """A run in a folder, for `process_group` of `LocalDeMo`. The first worker starts the run, others join it.

    Args:
        address: a path, or s3://bucket/name, gs:// or az://; or a `Store`.
        late: seconds that a round waits for expected workers, after this one has sent.
        patience: seconds of storage outage after which a request raises ExchangeError.
        key: 32 bytes that all workers share. Objects written without it are refused.
        checkpoint_every: rounds from one checkpoint to the next.
        keep_log: never delete messages, so that `demopt replay` can compute the weights again from the first round.
        settings: values of JSON types for workers that join; `demopt train` puts its settings here.

    `note` and `leaving` go with this worker's next message: anything of JSON's types, and whether it is the last one.
    `decided` is the manifest of the last round. If the run has an end, set `rounds`: a late worker then adds none.

    Examples:
        >>> from demopt.runs.store import ObjectStore
        >>> import demopt
        >>> model = torch.nn.Linear(8, 2)
        >>> run = FolderExchange(ObjectStore())
        >>> optimizer = demopt.LocalDeMo(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=1, process_group=run)
        >>> model(torch.ones(4, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> [sender.worker == run.worker for sender in run.decided.senders]
        [True]
    """

    varies = True

    def __init__(
        self,
        address: str | os.PathLike[str] | Store,
        *,
        late: float = 10.0,
        patience: float = 600.0,
        key: bytes | None = None,
        checkpoint_every: int = 20,
        keep_log: bool = False,
        settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(SingleRank())
        store = address if isinstance(address, Store) else open_store(os.fspath(address))
        self.say: Callable[[str], None] = logging.getLogger("demopt").warning
        self._patient = Patient(store, patience, lambda text: self.say(text))
        self.heard: Callable[[], bool] = lambda: False  # whether the user wants to stop: ends a wait for the store
        self._patient.stopping = lambda: self.heard()
        self.store: Store = self._patient if key is None else Keyed(self._patient, key)
        host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname())[:40] or "worker"
        self.worker = f"{host}-{os.urandom(4).hex()}"
        self.late = late
        self.leaving = False
        self.rounds: int | None = None  # of the whole run, if it has an end: a late worker adds none
        self.note: Any = None
        self.record: Record | None = None
        self.joined = False  # it has the run's weights
        self.decided: Manifest | None = None
        self.row: int | None = None  # of this worker's message in the last round; None: it was left out
        self.left_out = 0  # rounds in a row
        self.behind = False  # rounds may have been decided since the last one that this worker applied
        self.stopping = False  # the run was stopped
        self.sent: Message | None = None  # this worker's last one
        self.trips = 0  # round trips to the store in all rounds: requests side by side count as one
        self.waited = 0.0  # seconds, in the last round
        self.waited_for: list[str] = []  # the workers that came last in it, or were given up
        self._wanted: dict[str, Any] = {"checkpoint_every": checkpoint_every, "keep_log": keep_log}
        self._wanted["settings"] = settings or {}
        self._stop_before: bytes | None = None  # a wish to stop that is older than this worker
        self._stopping = False  # there is a newer one, and the next message says so
        self._later: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="demopt-store")

    @property
    def run(self) -> Record:
        """The run, once this worker has joined."""
        if self.record is None:
            raise RuntimeError("this worker has not joined the run yet; the first step, or resync(), does")
        return self.record

    @property
    def requests(self) -> int:
        """The requests that the store has been sent so far."""
        return self._patient.requests

    # Joining

    def meet(self, facts: dict[str, str], config_facts: Any, groups: list[dict[str, Any]], start: bytes) -> bool:
        """Starts the run with `start`, the first weights, or joins the one that is there; whether it has started it.

        SettingsError if this worker has other facts or another version than the run.
        """
        record, mine = log.read_record(self.store), ""
        if record is None:
            mine = os.urandom(8).hex()
            pairs = [list(each) for each in config_facts]
            wanted = Record(mine, __version__, facts, pairs, groups, **self._wanted)
            self.store.put_if_absent(log.checkpoint_name(wanted, 0), start)
            record = log.put_record(self.store, wanted)
            if record.run != mine:  # another worker was first
                self.store.delete([log.checkpoint_name(wanted, 0)])
        check_facts(record, facts, self.store.address)
        self._stop_before = self.store.get(log.STOP, log.MOST_ENVELOPE)
        self.record = record
        return record.run == mine

    def hello(self, number: int) -> None:
        """Asks the others to wait for this worker from round `number` on."""
        self.decided = log.read_manifest(self.store, self.run.run, number - 1) if number else None
        if number and self.decided is None:
            raise SettingsError(f"this worker is at round {number}, and the run in {self.store.address} is not so far")
        self.store.put_if_absent(f"{log.folder_of(number)}/{self.worker}.hello", b"\n")

    # A round

    def exchange_round(
        self, number: int, body: Tensor, refusal: Refusal, weights: int | None = None, samples: int = 1
    ) -> Tensor:
        """Sends this worker's message, and returns those of the round's manifest in its order, uint8 [senders, B].

        `refusal` returns the reason why a message may not take part, or an empty text. `weights`: a fingerprint of
        weights and outer state before the round, if it is due; DriftError if the author's differs. `samples`: for the
        manifest.
        """
        began, size = time.monotonic(), body.numel()
        raw, stopping = bytes_of(body), self._stopping
        mine = Message(self.run.run, number, self.worker, samples, self.leaving, stopping, weights, self.note, raw)
        if self.sent and self.sent.round == number and self.sent.body == raw:  # again, after an error
            mine = self.sent
        packed = mine.packed()
        self.row, self.behind, self.sent = None, False, mine
        look = partial(log.look, self.store, number)
        wish = partial(self.store.get, log.STOP, log.MOST_ENVELOPE)
        put = partial(self.store.put_if_absent, log.message_name(number, self.worker), packed)
        seen, stop, _ = self._all([look, wish, put])
        self._stopping = stop not in (None, self._stop_before)
        self.sent_bytes += len(packed)
        self.calls += 1
        mark = log.digest(packed)
        taken = _Inbox(self, number, size, mine, mark, refusal)
        sent = time.monotonic()
        while not seen.decided:
            taken.fetch(seen)
            missing = sorted(log.expected(self.decided, seen) - taken.workers)
            self.waited, self.waited_for = time.monotonic() - sent, missing or self.waited_for
            if not missing or self.waited >= self.late:
                author = replace(mine, stop=self._stopping)
                manifest = self._propose(log.decide(author, self.decided, seen, taken.valid, taken.refused))
                break
            time.sleep(min(_POLL[1], _POLL[0] + self.waited / 10))
            (seen,) = self._all([look])
        else:
            (manifest,) = taken.fetch(seen, partial(self._manifest, number))
        marks = [sender.digest for sender in manifest.senders]  # they hold the worker's name
        self.row = marks.index(mark) if mark in marks else None
        self.left_out = 0 if self.row is not None else self.left_out + 1
        try:
            rows = self.rows(manifest, size, body, taken.bodies)
        except CoveredError:
            self.behind = True
            raise
        if weights is not None and manifest.weights not in (None, weights):
            raise DriftError(number, [], f"the weights of worker {self.worker} differ from those of {manifest.author}")
        self.behind = self.row is None
        if self.worker in manifest.refused:
            self.say(f"round {number + 1}: this worker's message was refused: {manifest.refused[self.worker]}")
        self.decided, self.waited = manifest, time.monotonic() - began
        self.stopping = self.stopping or manifest.stop
        return rows

    def rows(self, manifest: Manifest, size: int, like: Tensor, known: dict[str, bytes] | None = None) -> Tensor:
        """Returns the bodies of a manifest's messages, each of `size` bytes, as rows on the device of `like`.

        `known` holds bodies that were read already, by digest. CoveredError if messages are gone.
        """
        found = dict(known or {})
        todo = [sender for sender in manifest.senders if sender.digest not in found]

        def read(sender: log.Sender) -> None:
            name = log.message_name(manifest.round, sender.worker)
            data = self.store.get(name, size + log.MOST_ENVELOPE)
            if data is None:
                raise CoveredError(f"round {manifest.round} is covered by a checkpoint: {name} is gone")
            self.received_bytes += len(data)
            if log.digest(data) != sender.digest:
                raise MessageError(f"{name} is not the object that the manifest of its round names")
            body = log.read_message(name, data, self.run.run, manifest.round, sender.worker).body
            if len(body) != size:
                raise MessageError(f"{name} has {len(body):,} bytes, this layout's have {size:,}")
            found[sender.digest] = body

        self._all([partial(read, sender) for sender in todo])
        bodies = [found[sender.digest] for sender in manifest.senders]
        return tensor_of(b"".join(bodies)).view(len(bodies), size).to(like.device)

    def later(self, call: Callable[[], None]) -> None:
        """Makes requests in the background, such as writing a checkpoint; an error is reported, and nothing waits."""

        def run() -> None:
            try:
                call()
            except DemoptError as error:
                self.say(f"a checkpoint was not written, training goes on: {error}")

        self._later.append(self._pool.submit(run))

    def settle(self) -> None:
        """Waits for the tasks that `later` has begun."""
        while self._later:
            self._later.pop().result()

    def close(self) -> None:
        """Gives up requests that still wait for the store, so that the process can end."""
        self._patient.patience = 0.0

    def _propose(self, manifest: Manifest) -> Manifest:
        """Returns the manifest that the round has, this one or another; reads at once, in case it is another."""
        number = manifest.round
        read = partial(log.read_manifest, self.store, manifest.run, number)
        mine, found = self._all([partial(log.propose, self.store, manifest), read])
        return mine or found or self._manifest(number)

    def _manifest(self, number: int) -> Manifest:
        found = log.read_manifest(self.store, self.run.run, number)
        if found is None:
            raise ExchangeError(f"the manifest of round {number} was there and is gone from {self.store.address}")
        return found

    def _all(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Makes requests side by side."""
        self.trips += bool(calls)
        if len(calls) < 2:
            return [call() for call in calls]
        return [future.result() for future in [self._pool.submit(call) for call in calls]]


class _Inbox:
    """The messages of an open round that have been read: valid ones, and refused ones with reasons."""

    def __init__(self, run: FolderExchange, number: int, size: int, mine: Message, mark: str, refusal: Refusal) -> None:
        self._run, self._number, self._size, self._refusal, self._weights = run, number, size, refusal, mine.weights
        self.valid: dict[str, tuple[Message, str]] = {}
        self.refused: dict[str, str] = {}
        self.bodies: dict[str, bytes] = {}
        self._take(mine, mark)

    @property
    def workers(self) -> set[str]:
        """Whose messages were read."""
        return {*self.valid, *self.refused}

    def fetch(self, seen: Seen, *also: Callable[[], Any]) -> list[Any]:
        """Reads the messages that are new; makes other requests beside them, and returns their results."""
        new = sorted(seen.messages - self.workers)
        found = self._run._all([*(partial(self._read, worker) for worker in new), *also])
        for worker, data in zip(new, found, strict=False):
            if isinstance(data, str):
                self.refused[worker] = data
            elif data is not None:  # deleted since it was listed
                self._run.received_bytes += len(data)
                name = log.message_name(self._number, worker)
                try:
                    message = log.read_message(name, data, self._run.run.run, self._number, worker)
                except MessageError as error:
                    self.refused[worker] = str(error)
                else:
                    self._take(message, log.digest(data))
        return found[len(new) :]

    def _read(self, worker: str) -> bytes | str | None:
        """Returns a message, or the reason to refuse it; None if it is gone."""
        try:
            return self._run.store.get(log.message_name(self._number, worker), self._size + log.MOST_ENVELOPE)
        except MessageError as error:
            return str(error)

    def _take(self, message: Message, mark: str) -> None:
        if len(message.body) != self._size:
            reason = f"it has {len(message.body):,} bytes, this layout's have {self._size:,}: truncated, or another one"
        elif None not in (self._weights, message.weights) and message.weights != self._weights:
            reason = "its weights before the round differ"
        else:
            reason = self._refusal(tensor_of(message.body))
        if reason:
            self.refused[message.worker] = reason
        else:
            self.valid[message.worker] = message, mark
            self.bodies[mark] = message.body


def check_facts(record: Record, facts: dict[str, str], address: str) -> None:
    """Raises SettingsError, naming one, if facts or version differ from those of the run."""
    if record.version != __version__:
        raise SettingsError(
            f"the run in {address} was started by demopt {record.version}, this is {__version__}; install that"
        )
    for name in {**record.facts, **facts}:
        there, here = record.facts.get(name, "nothing"), facts.get(name, "nothing")
        if there != here:
            raise SettingsError(f"this worker has {name} = {here} where the run in {address} has {there}")


def bytes_of(tensor: Tensor) -> bytes:
    """Returns the bytes of a tensor."""
    held = tensor.detach().cpu().contiguous()
    return ctypes.string_at(held.data_ptr(), held.nbytes) if held.nbytes else b""


def tensor_of(data: bytes) -> Tensor:
    """Returns bytes as a tensor, uint8 [n].

    Examples:
        >>> bytes_of(tensor_of(b"ab"))
        b'ab'
    """
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
