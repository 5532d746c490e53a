"""FolderExchange: the exchange of LocalDeMo through a folder or bucket, between workers that come and go."""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import re
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from demopt.errors import DemoptError, ExchangeError, MessageError, SettingsError
from demopt.exchange import SingleRank
from demopt.exchange.background import Background, Daemons
from demopt.replicator.rounds import Moments, VaryingExchange, check_message, join_results
from demopt.replicator.route import Result
from demopt.replicator.wiring import Wiring
from demopt.runs import log
from demopt.runs.key import Keyed
from demopt.runs.log import Envelope, Manifest, Record
from demopt.runs.open_round import (
    LONGEST,
    POLL,
    TOLD_AFTER,
    Attached,
    CoveredError,
    FolderOutcome,
    OpenRound,
    renamed,
    tensor_of,
)
from demopt.runs.reading import Sequences
from demopt.runs.stop import StopWish
from demopt.runs.store import MOST_JSON, RECORD, Patient, Store, open_store
from demopt.runs.weights import FolderRounds, Role
from demopt.validation import check_count, check_number, check_yes_or_no
from demopt.version import __version__
from demopt.wire.message import Header

if TYPE_CHECKING:
    from demopt.replicator.replicator import Replicator

T = TypeVar("T")
_AT_ONCE = 8  # requests
_LAG = 60.0  # seconds, at most, until a read shows what was written: NFS caches names for so long
_REMEDY = (  # for a manifest that is gone or damaged
    "restore it; if it is the newest and no worker runs, delete it and the checkpoints after it: then its round is "
    "decided again"
)
_NOT_JOINED = "this worker has not joined the run yet; the first step, or join(), does"


class FolderExchange(VaryingExchange):
    """A run in a folder, for `process_group` of one `LocalDeMo`. The first worker starts the run, others join it.

    Args:
        address: a path, or s3://bucket/name, gs:// or az://; or a `Store`.
        late: seconds that a round waits for expected workers, after this one has sent, beyond the time that they need,
            which workers measure and announce.
        patience: seconds of storage outage after which a request raises ExchangeError.
        key: 32 bytes that all workers share. Objects written without it are refused.
        checkpoint_every: rounds from one checkpoint to the next, at most 10**8.
        keep_log: never delete messages, so that `demopt replay` can compute the weights again from the first round.
        settings: values of JSON types for workers that join; `demopt train` puts its settings here.

    Raises:
        ValueError, TypeError: an invalid argument, before anything is sent. ExchangeError: the disk does not answer.

    `note` and `leaving` go with this worker's next message. `note`: any value of JSON types, up to 3,072 bytes, or a
    function that returns one per message; `leaving`: whether it is the last message. `last` is the outcome of the last
    round that this worker sent a message for, `row` the message's place in it, and `decided` the manifest of the last
    round that was applied. If the run has an end, set `rounds`: a late worker then adds none.

    Examples:
        >>> from demopt.runs.store import ObjectStore
        >>> import demopt, torch
        >>> model = torch.nn.Linear(8, 2)
        >>> run = FolderExchange(ObjectStore())
        >>> optimizer = demopt.LocalDeMo(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=1, process_group=run)
        >>> model(torch.ones(4, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> [sender.worker == run.worker for sender in run.decided.senders]
        [True]
    """

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
        self.late = late
        every = check_count("checkpoint_every", checkpoint_every, high=log.MOST_ROUNDS)  # joining workers refuse more
        if not isinstance(settings, dict | None):
            raise TypeError(f"settings is {settings!r}; give a dict")
        keep_log = check_yes_or_no("keep_log", keep_log)
        self._new_run: dict[str, Any] = {"checkpoint_every": every, "keep_log": keep_log, "settings": settings or {}}
        _as_json("settings", self._new_run, MOST_JSON // 2)
        patience = check_number("patience", patience)
        if not isinstance(address, str | bytes | os.PathLike | Store):
            raise TypeError(f"address is {address!r}; give a path, or s3://bucket/name, gs:// or az://")
        store = address if isinstance(address, Store) else open_store(os.fsdecode(address))
        self._patient = Patient(store, patience, lambda text: self.say(text))
        self._patient.asked_to_stop = lambda: self.asked_to_stop()
        self.store: Store = self._patient if key is None else Keyed(self._patient, key)
        self.unrepeated: Store = store if key is None else Keyed(store, key)  # the same, where a request may fail
        self._away = "" if "://" in store.address else "; is its disk mounted?"  # what may be wrong where a run is gone
        # Set by the trainer:
        self.say: Callable[[str], None] = logging.getLogger("demopt").warning
        self.asked_to_stop: Callable[[], bool] = lambda: False  # by the user: ends waits for objects, and catching up
        self.note: Any = None
        self.leaving = False
        self.rounds = None
        self.sequences = Sequences(self)  # that this worker holds, reads and trains on
        host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname())[:40]
        self.worker = f"{host}-{os.urandom(4).hex()}"
        # The place of this worker's weights in the run, which `move_to` sets:
        self.decided: Manifest | None = None  # of the round before these weights
        self.round_began = time.monotonic()  # when its seconds for the next round began: that manifest, or a hello
        self.stopping = False  # the run was stopped after this worker joined
        # The rounds that this worker sent a message for, which `note_outcome` notes:
        self.last: FolderOutcome | None = None  # of the last one
        self.left_out = 0  # how many in a row have left it out, also those that moved nothing
        # Private to it and its rounds:
        self.role: Role = "outside"
        self._record: Record | None = None
        self._replicator: Replicator | None = None  # the one that it belongs to
        self.sent_from = 0  # as in `SavedWorker`; `OpenRound` notes it
        self._needed: tuple[float, ...] = ()  # seconds for its last two rounds, as `FolderOutcome.needed`
        self._was_taken = False  # whether something else had this worker's name in the last round
        self._overlooked_rounds = 0  # in a row, in which a manifest lacked a message that was there
        self._greeted = dict[int, str]()  # its hellos, by the round in which others wait for it
        self._said = set[str]()  # texts that are said only once
        self.wish = StopWish(self.store, self.say_once)
        self.cleared = 0  # before this round, `checkpoints._delete_old` has deleted all that it may
        self._upload: Future[None] | None = None  # the newest; they come one after the other
        self._uploads, self._pool = Background(), Daemons(_AT_ONCE)
        self._process = 0  # the process with their threads: it made the first requests

    @property
    def worker(self) -> str:
        """This worker's name in the run."""
        return self._worker

    @worker.setter
    def worker(self, name: str) -> None:
        if not (isinstance(name, str) and log.NAME.fullmatch(name)):  # others would read none of its objects
            raise ValueError(f"worker is {name!r}; give 1 to 64 letters of A to Z, digits and dashes")
        self._worker = name

    @property
    def late(self) -> float:
        """The seconds that a round waits for expected workers, beyond the time that they need."""
        return self._late

    @late.setter
    def late(self, seconds: float) -> None:
        self._late = check_number("late", seconds)

    @property
    def rounds(self) -> int | None:
        """The rounds of the whole run, if it has an end: a late worker adds none."""
        return self._rounds

    @rounds.setter
    def rounds(self, rounds: int | None) -> None:
        self._rounds = None if rounds is None else check_count("rounds", rounds)

    @property
    def record(self) -> Record:
        """The run's identity and settings, once this worker has joined."""
        if self._record is None:
            raise RuntimeError(_NOT_JOINED)
        return self._record

    @property
    def joined(self) -> bool:
        """Whether this worker is in the run."""
        return self.role == "joined"

    @property
    def row(self) -> int | None:
        """The row of this worker's last message in its round; None: it is not listed."""
        return None if self.last is None else self.last.row

    def rounds_of(self, replicator: Replicator, moments: Callable[[], Moments]) -> FolderRounds:
        """Returns the rounds of a replicator; ValueError if this exchange has another one already, or for owners."""
        if self._replicator not in (None, replicator):
            raise ValueError("this FolderExchange belongs to another optimizer; give each optimizer one of its own")
        replicator.require_gather()
        self._replicator = replicator
        return FolderRounds(replicator, self, moments)

    # Joining

    def find_run(self) -> Record:
        """Reads the record; ExchangeError if there is none. A worker that found a run joins only that one."""
        record = self.read_record()
        if record is None:
            raise ExchangeError(f"{self.store.address} holds no run")
        self.wish.begin(record.identity)
        self._record = record  # only now: after an error, the next attempt also begins with the wish
        return record

    def read_record(self) -> Record | None:
        """Returns the record of the run in the store, or None. ExchangeError if a run's rounds are there without it."""
        record = log.read_record(self.store)
        if record is None and self._has_rounds():  # it has just begun, or is gone
            gone = f"{self.store.address} has rounds of a run whose object {RECORD} is gone"
            record = self.wait_for(partial(log.read_record, self.store), gone)
        return record

    def _has_rounds(self) -> bool:
        """Whether there are manifests: of the first round or, where a rule has deleted what is old, of a checkpoint."""
        ends = (max(0, number - 1) for number in log.checkpoints(self.store))
        return any(log.look(self.store, number).has_manifest for number in ends)

    def find_or_start(
        self, number: int, of_run: str | None, facts: dict[str, str], config_facts: Any, groups: list[Any],
        first: Callable[[], bytes],
    ) -> tuple[bool, Manifest | None]:  # fmt: skip
        """Starts the run, or finds it; returns whether it has started it, and the manifest before round `number` there.

        `of_run`: the run of a loaded state, if there is one; only if there is no run here may it be another.
        `first`, called only to start it, serialises the weights. SettingsError, before anything is sent, if this
        worker has other facts or another version than the run, or is at round `number` of a run that is not there.
        """
        record, mine = self.read_record() if self._record is None else self.require_run(), ""
        if record is None:
            if number:
                raise SettingsError(
                    f"{self.worker} is at round {number}, and {self.store.address} holds no run{self._away or '.'} "
                    "A new run starts from a new optimizer"
                )
            mine = os.urandom(8).hex()
            wanted = Record(mine, __version__, facts, [*map(list, config_facts)], groups, **self._new_run)
            log.check_races(self.store, wanted, self.together)
            start = log.checkpoint_name(wanted, 0)
            weights, gone = first(), f"{start} can be neither written nor read"
            if self.wait_for(partial(self._placed, start, weights), gone) != weights:
                raise ExchangeError(f"{start} is damaged in {self.store.address}; try again")
            log.put_record(self.store, wanted)
            record = self.wait_while_away(partial(log.read_record, self.store))
            if record.identity != mine:  # another worker was first
                with suppress(ExchangeError):  # without the right to delete, it stays
                    self.store.delete([start])
        if of_run is not None and record.identity not in (mine, of_run):
            raise SettingsError(f"the state is of another run than {self.store.address} holds")
        log.check_facts(record, facts, self.store.address, self.worker)
        read = partial(log.read_manifest, self.store, record.identity, number - 1)
        later = (
            f"{self.worker} is at round {number}, the run in {self.store.address} is not so far: it is an older copy; "
            "restore the newer one, or go on from this one without the worker's state (delete state.pt in --out)"
        )
        before = self.wait_for(read, later) if number else None
        if self._record is None or self.stopping:  # otherwise a wish since it has found the run is for it, too
            self.wish.begin(record.identity)
        self._record = record
        return record.identity == mine, before

    def hello(self, number: int, ahead: int | None = None, seconds: float = 0.0) -> None:
        """Asks the others to wait for this worker, which is at round `number`: in that round, or some rounds ahead.

        A round that ends before they see the hello is missed. So after two misses a worker says hello some rounds
        ahead, twice as many each time, and the others wait there. `seconds`: those it needs in addition to a round's.
        """
        self.round_began = time.monotonic()
        if ahead is None:
            ahead = 2 ** min(self.late_again - 1, 9) if self.late_again else 0
        seconds = min(seconds + self.seconds_needed, LONGEST)
        if seconds == LONGEST:
            self.say_once(f"this worker needs more than {LONGEST:.0f} s to be there, and no other waits longer")
        log.put_hello(self.store, number + ahead, self.record.identity, self.worker, seconds)
        self._greeted[number + ahead] = log.hello_name(number + ahead, self.worker)

    def hello_ahead(self, number: int, seconds: float, more: float = 0.0) -> None:
        """Asks the others to wait in a round that they have not reached, until this worker is there.

        `seconds`: those it takes per missed round; `more`: those it takes before these rounds.
        """
        ahead = 4
        while self.manifest(number + ahead) is not None:
            ahead *= 2
        self.hello(number, ahead, seconds * ahead + more)

    def take_back_hellos(self, number: int) -> None:
        """Deletes the hellos for round `number` and later ones: nobody should wait for a worker that has left."""
        with suppress(DemoptError, OSError):  # without the right to delete, they wait
            self.store.delete(name for each, name in self._greeted.items() if each >= number)

    # A round

    def attachment(self, wiring: Wiring, header: Header, fingerprint: int | None) -> Attached:
        """Returns note, leaving and the manifest before, as they are now; ValueError if the note is no JSON or long."""
        if not self.joined:  # it may know the record: `observe` has read it, or it had joined before it loaded a state
            raise RuntimeError(_NOT_JOINED)
        log.check_facts(self.record, wiring.facts(), self.store.address, self.worker)  # changed since it joined?
        note = _as_json("note", self.note() if callable(self.note) else self.note, log.MOST_NOTE)
        envelope = Envelope(
            run=self.record.identity, round=header.round_number, worker=self.worker, samples=header.samples,
            leaves=bool(self.leaving), stop=self.wish.is_heard, weights=fingerprint, note=note,
            before=log.digest_of(self.decided), seconds=self.seconds_needed, reads=self.sequences.reads(),
        )  # fmt: skip
        steps, error = self.sequences.in_steps, self.sequences.in_error
        return Attached(envelope, self.decided, self.round_began, from_steps=steps, from_error=error)

    @property
    def late_again(self) -> int:
        """The rounds in a row that left this worker out, less one: after the first, `_needed` has its lateness."""
        return max(self.left_out - 1, 0)

    @property
    def seconds_needed(self) -> float:
        """The seconds that this worker says it needs for a round: twice as many each time it is `late_again`."""
        needed = max(self._needed, default=0.0) * 2.0 ** min(self.late_again, 64)
        return round(min(needed, LONGEST), 3)

    def exchange_round(self, wiring: Wiring, header: Header, message: Tensor, attached: Attached) -> FolderOutcome:
        """Sends this worker's message; returns the messages of the round's manifest, in its order.

        It changes nothing that a trainer reads except counters, because it may run in the background.
        """
        return OpenRound(self, wiring, header, message, attached).decide()

    def require_run(self) -> Record:
        """Waits until the run is in the store; SettingsError if the store has another run."""
        found = self.wait_while_away(partial(log.read_record, self.store))
        if found.identity != self.record.identity:
            raise SettingsError(f"{self.store.address} holds another run than this worker's")
        return found

    def put(self, mine: Envelope) -> Envelope:
        """Puts this worker's message; returns it as it is in the store, under a new name if the old one is taken."""
        while True:
            name, packed = log.message_name(mine.round, mine.worker), mine.packed()
            there = self.wait_for(partial(self._placed, name, packed), f"{name} can be neither written nor read")
            if there == packed:
                self.sent_bytes += len(packed)
                return mine
            other = renamed(mine)  # each time another name, because the digest in it covers the old name
            self.say(
                f"{name} is another worker's, or an earlier message of this one, which is {other.worker} from now on"
            )
            mine = other

    def _placed(self, name: str, packed: bytes) -> bytes | None:
        """Returns the object that has a name after a put; None if there is none, which a busy server may answer.

        One that differs is read again before it counts as another's. If it were this message, of which a cache has half
        or which cannot be read for a moment, it would count twice under a second name.
        """
        if self.store.put_if_absent(name, packed):
            return packed

        def own(data: bytes) -> bytes:
            if data != packed:
                raise MessageError(f"{name} is another's")
            return data

        try:
            return log.read(self.store, name, len(packed) + log.MOST_ENVELOPE, own)
        except MessageError:
            return b""

    def propose(self, manifest: Manifest) -> Manifest:
        """Proposes a manifest; returns the one that the round then has, this one or another."""
        number, put = manifest.round, partial(log.propose, self.store, manifest)
        read = partial(self.manifest, number)
        gone = f"{log.manifest_name(number)} can be neither written nor read in {self.store.address}"
        return put() or self.wait_for(lambda: read() or put(), gone)

    def results_of(
        self, manifest: Manifest, wiring: Wiring, header: Header, known: dict[str, Result] | None = None
    ) -> Result:
        """Returns a manifest's messages, decoded and checked. `known` holds those that were read already, by digest.

        CoveredError if messages are gone.
        """
        found = dict(known or {})

        def read(sender: log.Sender) -> int:
            name, most = log.message_name(manifest.round, sender.worker), wiring.route.widths[0] + log.MOST_ENVELOPE

            def checked(data: bytes) -> bytes:
                if log.digest(data) != sender.digest:
                    raise MessageError(f"{name} is not the object that the manifest of its round names")
                return data

            def get() -> bytes | None:
                if data := log.read(self.store, name, most, checked):
                    return data
                if log.newest(self.store, manifest.run)[0] > manifest.round:
                    raise CoveredError(f"{name} is gone, and a checkpoint has its round")
                return None

            data = self.wait_for(get, f"{name} is gone from {self.store.address}, and no checkpoint has its round")
            body = log.read_message(name, data, self.record.identity, manifest.round, sender.worker).body
            found[sender.digest] = check_message(wiring, header, tensor_of(body))
            return len(data)

        unread = [partial(read, sender) for sender in manifest.senders if sender.digest not in found]
        self.received_bytes += sum(self.together(unread))
        return join_results(wiring, [found[sender.digest] for sender in manifest.senders])

    def manifest(self, number: int) -> Manifest | None:
        """Reads the manifest of a round; None if there is none. ExchangeError if it is damaged."""
        try:
            return log.read_manifest(self.store, self.record.identity, number)
        except MessageError as error:  # no earlier checkpoint helps: the run's later weights need it
            raise ExchangeError(f"{error}; {_REMEDY}") from None

    def known_manifest(self, number: int) -> Manifest:
        """Reads a manifest that must be there, because a later one is; ExchangeError if it is gone."""
        gone = f"{log.manifest_name(number)} is gone from {self.store.address}; {_REMEDY}"
        return self.wait_for(partial(self.manifest, number), gone)

    def note_outcome(self, outcome: FolderOutcome) -> None:
        """Notes the end of a round for which this worker sent a message."""
        manifest, self.last = outcome.manifest, replace(outcome, result=None)  # messages may be large
        self.left_out = self.left_out + 1 if outcome.was_left_out else 0
        # Its name may be taken in one round only. Under a name that no manifest has, nobody knows what it has read.
        was_taken, self._was_taken = self._was_taken, outcome.envelope.worker != self.worker
        if outcome.row is not None or (was_taken and self._was_taken):
            self.worker, self._was_taken = outcome.envelope.worker, False
        self._needed = (*self._needed[-1:], outcome.needed)
        self._overlooked_rounds = self._overlooked_rounds + 1 if outcome.overlooked else 0
        if outcome.ended == "complete":
            self.move_to(manifest, manifest.stop, outcome.known_at)
        if self._overlooked_rounds == 2:
            self.say(
                f"round {manifest.round + 1}: for the second time in a row a manifest, now {manifest.author}'s, lacks "
                "this worker's message, which was there before; its work is sent again"
            )
        if not (manifest.senders or manifest.refused):  # refusals, too, may leave no senders
            fate = "is lost, because no round follows" if self.is_complete else "counts later"
            self.say(
                f"round {manifest.round + 1}: fewer than half of its members have sent a message, so it moves nothing; "
                f"what they have sent {fate}"
            )

    def move_to(self, decided: Manifest | None, stops: bool, known_at: float | None = None) -> None:
        """Notes the place that the weights have moved to: after the round of a manifest.

        `decided` is None before the first round, and while a loaded state has not been joined with.

        `stops`: a round on the way has ended the run. `known_at`: the time (monotonic) when it was known; None: now.
        """
        self.decided = decided
        self.round_began = time.monotonic() if known_at is None else known_at
        # A member that leaves out all others hides the wish to stop from them; who has heard it obeys after ten rounds.
        self.stopping = self.stopping or stops or (self.wish.is_heard and self.left_out > 9)
        if stops:  # a trainer that goes on no longer sends it
            self.wish.heard_at = math.inf

    # Its end. `leaving` and `asked_to_stop` are about this worker: its next message is its last one. The others are
    # about the run: somebody wishes it to stop (`wish.is_heard`), a manifest has ended it (`stopping`), or all is done.

    @property
    def is_complete(self) -> bool:
        """Whether these weights have all rounds of the run: all its sequences are read, or `rounds` is reached."""
        if self.sequences.total:
            return self.sequences.are_all_read
        return self.rounds is not None and self.decided is not None and self.decided.round + 1 >= self.rounds

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, by all that this worker knows."""
        return self.stopping or self.is_complete

    @property
    def wants_next_round(self) -> bool:
        """Whether this worker wants a next round, as it is now; its last message may have said otherwise."""
        return not (self.leaving or self.asked_to_stop() or self.is_over)

    def has_stopped(self, decided: Manifest | None) -> bool:
        """Whether a round up to `decided`, maybe in a checkpoint, has ended the run since this worker came."""
        if decided is None or (asked_in := self.wish.asked_in(not self.joined)) is None:
            return False
        found = map(self.manifest, range(asked_in, decided.round + 1))
        return any(manifest is not None and manifest.stop for manifest in found)

    # Requests

    def wait_for(self, read: Callable[[], T | None], gone: str, limit: float = _LAG) -> T:
        """Repeats a read until it finds something, because reads may lag; ExchangeError after `limit` seconds."""
        began, told = time.monotonic(), False
        while (found := read()) is None:
            away = time.monotonic() - began
            if away >= min(limit, self._patient.patience) or (away > TOLD_AFTER and self.asked_to_stop()):
                raise ExchangeError(gone)
            if away > TOLD_AFTER and self.wish.hear():
                limit = min(limit, max(began, self.wish.heard_at) + self.late - began)
            if away > TOLD_AFTER and not told:
                told = True
                self.say(f"{gone}; waiting up to {min(limit, self._patient.patience):.0f} s")
            time.sleep(min(POLL[1], POLL[0] + away / 10))
        return found

    def wait_while_away(self, read: Callable[[], T | None], what: str = "the run") -> T:
        """As `wait_for`, for an object that the run has had: its disk may be away."""
        return self.wait_for(read, f"{what} is gone from {self.store.address}{self._away}", self._patient.patience)

    def together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Makes requests side by side. RuntimeError in a forked process, which has none of the threads for them."""
        self._process = self._process or os.getpid()
        if os.getpid() != self._process:
            raise RuntimeError("this process was forked from the worker's: build the optimizer in the one that trains")
        if len(calls) < 2:
            return [call() for call in calls]
        return [future.result() for future in [self._pool.submit(call) for call in calls]]

    def later(self, call: Callable[[], None]) -> None:
        """Runs an upload, such as a checkpoint's, in the background, after earlier ones; an error is reported."""
        earlier = self._upload

        def run() -> None:
            try:
                call()
            except DemoptError as error:
                self.say(f"a checkpoint was not written, training goes on: {error}")
            if earlier is not None:
                earlier.result()  # an error of another kind, for `wait_for_uploads`

        self._upload = self._uploads.submit(run)
        if earlier is None:  # after the thread's own function: the last one registered runs first
            atexit.register(_wait_for_uploads, weakref.ref(self))

    @property
    def is_uploading(self) -> bool:
        """Whether an upload in the background is under way."""
        return self._upload is not None and not self._upload.done()

    def wait_for_uploads(self) -> None:
        """Waits for all uploads in the background."""
        if self._upload is not None:
            if wait([self._upload], TOLD_AFTER).not_done:
                self.say("waiting until the newest checkpoint is uploaded")
            self._upload.result()

    def close(self) -> None:
        """Gives up requests that still wait for the store, so that the process can end."""
        self._patient.patience = 0.0

    def say_once(self, text: str) -> None:
        """Tells the user something that may be found again and again."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def say_that_copies_part(self) -> None:
        """Tells the user, once, why workers of a run may follow different manifests."""
        self.say_once(
            f"workers follow different manifests; {self.store.address} may be one of several copies that a program "
            "keeps alike (Syncthing, Dropbox): a run needs one folder for all"
        )


def _wait_for_uploads(run: weakref.ref[FolderExchange]) -> None:
    """Waits for uploads at exit, where Ctrl-C ends the wait: the process itself waits for no thread of a run."""
    if (exchange := run()) is not None and exchange._process == os.getpid():  # not in a forked one
        exchange.wait_for_uploads()


def _as_json(name: str, value: Any, most: int) -> Any:
    """Returns a copy of a value; ValueError if it is not of JSON's types, or takes more than `most` bytes."""
    try:
        text = json.dumps(value, allow_nan=False)  # of finite numbers, as `json_of` reads it
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be written as JSON: {error}") from None
    if len(text.encode()) > most:
        raise ValueError(f"{name} takes {len(text.encode()):,} bytes as JSON; give at most {most:,}")
    if log.is_deeper(copied := json.loads(text), log.NOTE_DEPTH):
        raise ValueError(f"{name} is nested more than {log.NOTE_DEPTH} deep")
    return copied
