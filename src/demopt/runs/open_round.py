"""An open round in a folder: its messages as they come, the wait for them, the manifest; and its outcome."""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from demopt.errors import DemoptError, MessageError
from demopt.replicator.rounds import Outcome, check_message, join_results
from demopt.replicator.route import Result
from demopt.replicator.wiring import Wiring
from demopt.runs import log
from demopt.runs.log import Envelope, Manifest, Seen
from demopt.wire.message import Header

if TYPE_CHECKING:
    from demopt.runs.exchange import FolderExchange

SLACK = 1.5  # times the seconds that a worker says it needs
LONGEST = 600.0  # seconds that a worker may ask for, and be waited for
POLL = (0.004, 0.25)  # seconds between looks at what others write: the shortest, and the longest
TOLD_AFTER = 2.0  # seconds until the user hears of a wait, which a wish to stop may end from then on
_MOST_HELLOS = 64  # that are read at one look: a stranger may put many
_ASLEEP = 1.0  # seconds by which a pause must overrun to show that the process slept, and others may wait for it
_EARLY = 0.8  # of the time until a message is due: then it is first looked for
_STILL_THERE = 10.0  # seconds of a round for which the manifest before is assumed to be still there
_SEEN = 1.0  # seconds after which all must have listed a message that is there
_ODD = 5.0  # seconds, at least, for which a worker with other weights than most leaves the decision to them
_LONG = 10.0  # seconds of waiting for messages until the user hears for whom

_OTHER_WEIGHTS = "its weights before the round differ"

Ending = Literal["complete", "covered", "drifted"]


class CoveredError(DemoptError):
    """A round's messages are gone, because a checkpoint covers it: this worker was away for long."""


class ForkedError(DemoptError):
    """The round before, as the store has it, is not the one that this worker has applied."""


@dataclass(frozen=True)
class Attached:
    """An envelope without the message, and what its worker knows of the run, as they were when the message was made."""

    envelope: Envelope
    previous: Manifest | None  # of the round before: `FolderExchange.decided` at that time
    round_began: float  # the time (monotonic) from which this worker's seconds for the round count
    from_steps: int = 0  # sequences in the message, from local steps
    from_error: int = 0  # and from the error
    is_resumed: bool = False  # from before a restart


@dataclass(frozen=True, kw_only=True)
class FolderOutcome(Outcome):
    """A round's outcome and manifest, with this worker's own message and times.

    What was sent leaves the error only if the message is listed, whatever moves the weights.
    """

    ended: Ending  # "complete": all messages are there; none if too few had sent, so that it moves nothing
    manifest: Manifest
    envelope: Envelope  # with this worker's own message
    was_left_out: bool  # this message is neither listed nor refused: it was late, or too few had sent
    needed: float  # seconds from the round before until the message was put, or the round found to be over
    waited: float  # seconds in `decide`, without those in which this process slept
    slept: float  # seconds, as after SIGSTOP, while it waited for the last workers
    waited_for: tuple[str, ...]  # the last workers; none if it mostly waited for one request
    overlooked: bool  # the author left out this worker's message, although it had been there for a second
    known_at: float  # the time (monotonic) when this worker had read the manifest


class OpenRound:
    """An open round as this worker sees it: its own message, the objects there, and those that it has read.

    Valid messages are decoded; refused ones have reasons. Times are of `time.monotonic`.
    """

    def __init__(
        self, run: "FolderExchange", wiring: Wiring, header: Header, message: Tensor, attached: Attached
    ) -> None:
        self._run, self._wiring, self._header, self._attached = run, wiring, header, attached
        self.mine = envelope_of(attached, message)  # once it is put, as it is in the store
        self.put_at: float | None = None  # None: it was not put, because the round was over
        self.seen = Seen(set(), set(), False)  # at the last look
        self.seen_open_at = 0.0  # the time of the last look that found no manifest
        self.known_at = 0.0  # when the manifest was read
        self.waited_for = tuple[str, ...]()  # the workers, last
        self.slept = 0.0  # seconds in which this process did not look for them
        self._longest_request = 0.0  # seconds of requests made together: due to the store, or to this process's sleep
        self._absent_messages = set[str]()  # workers whose message was listed, and not there to be read
        self._absent_hellos = set[str]()  # and those whose hello was
        self.valid: dict[str, tuple[Envelope, str]] = {}  # each with the digest of its object
        self.refused: dict[str, str] = {}
        self.results: dict[str, Result] = {}  # of valid ones, by digest
        self.hellos: dict[str, tuple[float, float]] = {}  # the seconds that workers need, and when that was read
        self._false_hellos: set[str] = set()  # workers whose hello is not valid

    def decide(self) -> FolderOutcome:
        """Sends this worker's message, and waits for the round's manifest or proposes it; returns the outcome."""
        run, number, previous, began = self._run, self._header.round_number, self._attached.previous, time.monotonic()
        manifest = self._send()
        ready_at = self.put_at or time.monotonic()
        self._longest_request = time.monotonic() - began
        if manifest is None:
            self.add(self.mine, log.digest(self.mine.packed()))
            self.read_new()  # those that the look beside the put has listed: the last worker needs no other look
            manifest = self._wait()
        if manifest.before != log.digest_of(previous):
            raise ForkedError(f"round {number + 1} follows another round {number} than this worker has applied")
        row, sent = as_listed(self.mine, replace(self._attached.envelope, body=self.mine.body), manifest)
        ended: Ending = "complete"
        try:
            result = run.results_of(manifest, self._wiring, self._header, self.results)
        except CoveredError:
            result, ended = join_results(self._wiring, []), "covered"  # the checkpoint comes instead
        if sent.weights is not None and manifest.weights not in (None, sent.weights):
            ended = "drifted"
        was_left_out = row is None and sent.worker not in manifest.refused
        if row is None and not was_left_out:
            run.say(f"round {number + 1}: this worker's message was refused: {manifest.refused[sent.worker]}")
        overlooked = was_left_out and self._was_seen and bool(manifest.senders)
        waited = time.monotonic() - began - self.slept
        for_a_request = 2 * self._longest_request > waited  # for the most part
        return FolderOutcome(
            row, result, ended=ended, manifest=manifest, envelope=sent, was_left_out=was_left_out,
            needed=ready_at - self._attached.round_began,
            waited=waited, waited_for=() if for_a_request else self.waited_for, slept=self.slept,
            overlooked=overlooked, known_at=self.known_at,
        )  # fmt: skip

    def _send(self) -> Manifest | None:
        """Looks at the round, and puts this worker's message, unless it is late and the round over.

        Returns the manifest, if it is there already.
        """
        run, mine, previous = self._run, self.mine, self._attached.previous
        if not self._attached.is_resumed:  # otherwise `sent_from` is from the state, as is this message
            run.sent_from = mine.round + 1
        elapsed = time.monotonic() - self._attached.round_began
        members = sorted(previous.members if previous else ())
        looks: list[Callable[[], Any]] = [self.look, self._require_round_before]
        # Members take turns at reading the wish to stop, and tell the others by their message.
        if mine.worker not in members or members[mine.round % len(members)] == mine.worker:
            looks.append(run.wish.hear)
        # Early in a round, the put goes beside the look. Later it follows the look: the round may be over, which spares
        # a long upload, or the manifest before may be gone, and then nothing is put.
        if elapsed < min(SLACK * mine.seconds + run.late, _STILL_THERE) and not self._attached.is_resumed:
            *_, self.mine = run.together([*looks, partial(run.put, mine)])
            self.put_at = time.monotonic()
            return self.read_manifest()
        run.together(looks)
        manifest = self.read_manifest()
        if manifest is None:
            (self.mine,) = self.read_new(partial(run.put, mine))
            self.put_at = time.monotonic()
        return manifest

    def _require_round_before(self) -> None:
        """Waits for the manifest before, without which nothing is put. ForkedError if the store has another one."""
        run, previous = self._run, self._attached.previous
        if previous is None:
            run.require_run()
            return
        read, name = partial(run.manifest, previous.round), log.manifest_name(previous.round)
        if run.wait_while_away(read, f"{name} of the run").digest != previous.digest:
            raise ForkedError(
                f"round {previous.round + 1} is another one in {run.store.address} than this worker has applied"
            )

    def _wait(self) -> Manifest:
        """After this worker's put: waits for the expected messages, then proposes; returns the round's manifest.

        After a wish to stop it waits for nobody longer than `late`. A worker with other weights than most waits longer,
        so that one of those proposes.
        """
        run, put_at = self._run, self.put_at
        assert put_at is not None
        while True:
            missing, now = self.missing(), time.monotonic()
            until = max([put_at, *map(self.needs_until, missing)])
            if run.wish.is_heard:
                until = min(until, max(put_at, run.wish.heard_at))
            odd = self._is_odd_one
            if (missing or odd) and now < until + (max(_ODD, 2 * run.late) if odd else run.late):
                if missing and now - put_at > _LONG:
                    run.say_once(f"round {self.mine.round + 1}: waiting for {', '.join(missing)}")
                due = max([now, *(self.needs_until(each, slack=1.0) for each in missing)])
                self._sleep(min(POLL[1], max(POLL[0] + (now - put_at) / 10, _EARLY * (due - now))))
                looked_at = time.monotonic()
                self.read_new(self.look, *([run.wish.hear] if now - put_at > TOLD_AFTER else []))
                self._longest_request = max(self._longest_request, time.monotonic() - looked_at)
                self.waited_for = missing or self.waited_for
            elif self.untried_messages or self.untried_hellos:
                awaited = log.expected(self._attached.previous, self.hellos)
                # Looks again only if expected workers' messages are unread: a stranger may put more for ever.
                self.read_new(*([self.look] if awaited.intersection(self.untried_messages) else []), again=False)
            else:
                author = replace(self.mine, stop=run.wish.is_heard)
                if now - put_at > TOLD_AFTER:  # a new run may have begun at the address, or an older copy come there
                    run.together([run.require_run, self._require_round_before])
                self.waited_for = missing or self.waited_for
                hellos = {worker: seconds for worker, (seconds, _) in self.hellos.items()}
                proposed = run.propose(log.draft(author, self._attached.previous, self.valid, self.refused, hellos))
                self.known_at = time.monotonic()
                return proposed
            if (manifest := self.read_manifest()) is not None:
                return manifest

    @property
    def _is_odd_one(self) -> bool:
        """Whether more workers have weights unlike this one's than like them: then one of those decides instead."""
        return sum(reason == _OTHER_WEIGHTS for reason in self.refused.values()) > len(self.valid)

    @property
    def _was_seen(self) -> bool:
        """Whether this worker's message was there long enough, while the round was open, for all to have listed it."""
        return self.put_at is not None and self.seen_open_at - self.put_at > _SEEN

    def _sleep(self, seconds: float) -> None:
        """Sleeps, and notes it if that took much longer: then the whole process was asleep."""
        began = time.monotonic()
        time.sleep(seconds)
        more = time.monotonic() - began - seconds
        self.slept += more if more > _ASLEEP else 0.0

    def missing(self) -> tuple[str, ...]:
        """Returns the expected workers whose messages are not there."""
        expected = log.expected(self._attached.previous, self.hellos)
        return tuple(sorted(expected - {*self.valid, *self.refused, *self._there}))

    def needs_until(self, worker: str, slack: float = SLACK) -> float:
        """Returns the time (monotonic) at which a worker's message is due, by the seconds that it says it needs."""
        previous = self._attached.previous
        began = self._attached.round_began
        seconds, since = self.hellos.get(worker, (0.0, began))
        # Later hellos prolong no wait: a worker that dies as it starts, again and again, has a new name each time.
        since = min(since, (self.put_at or since) + self._run.late)
        claimed = previous.seconds.get(worker, 0.0) if previous else 0.0
        return max(since + min(slack * seconds, LONGEST), began + min(slack * claimed, LONGEST))

    def look(self) -> None:
        now, self.seen = time.monotonic(), log.look(self._run.store, self._header.round_number)
        self.seen_open_at = self.seen_open_at if self.seen.has_manifest else now

    def read_manifest(self) -> Manifest | None:
        """Reads the round's manifest if there is one, and new messages beside it. A stranger's does not count."""
        if not self.seen.has_manifest:
            return None
        found: Manifest | None
        ((found, read_at),) = self.read_new(lambda: (self._run.manifest(self._header.round_number), time.monotonic()))
        self.known_at = read_at if found else 0.0
        return found

    def read_new(self, *also: Callable[[], Any], again: bool = True) -> list[Any]:
        """Reads objects that the last look found new; beside that makes the requests `also`, and returns their results.

        `again`: also those tried in vain before, because listings may run ahead of reads. Strangers' may be very many.
        """
        if again:
            self._absent_messages.clear()
            self._absent_hellos.clear()
        new = self.untried_messages
        reads: list[Callable[[], Any]] = [partial(self._read, worker) for worker in new]
        reads += [partial(self._read_hello, worker) for worker in self.untried_hellos]
        found = self._run.together([*reads, *also])
        self._run.received_bytes += sum(found[: len(new)])
        return found[len(reads) :]

    @property
    def untried_messages(self) -> list[str]:
        """The workers whose messages were there at the last look, and were not read, nor tried in vain since."""
        return sorted(self._there - {*self.valid, *self.refused})

    @property
    def untried_hellos(self) -> list[str]:
        """The same for hellos, at most `_MOST_HELLOS` at a time, while the round is open."""
        seen = self.seen
        known = self._false_hellos | self._absent_hellos | {*self.hellos, self._attached.envelope.worker}
        return sorted(seen.hellos - seen.messages - known)[:_MOST_HELLOS] if not seen.has_manifest else []

    @property
    def _there(self) -> set[str]:
        """The workers whose messages were listed, and could be read if that was tried."""
        return self.seen.messages - self._absent_messages

    def _read(self, worker: str) -> int:
        """Reads a message, if it is there as listed; returns its number of bytes."""
        run, number = self._run, self._header.round_number
        name, data = log.message_name(number, worker), None
        try:
            if (data := run.store.get(name, self._wiring.route.widths[0] + log.MOST_ENVELOPE)) is None:
                self._absent_messages.add(worker)
            else:
                self.add(log.read_message(name, data, run.record.identity, number, worker), log.digest(data))
        except MessageError as error:
            self.refused[worker] = str(error)
        return len(data or b"")

    def _read_hello(self, worker: str) -> None:
        try:
            seconds = log.read_hello(self._run.store, self._header.round_number, self._run.record.identity, worker)
        except MessageError:
            self._false_hellos.add(worker)
        else:
            if seconds is None:
                self._absent_hellos.add(worker)
            else:
                self.hellos[worker] = seconds, time.monotonic()

    def add(self, sent: Envelope, digest: str) -> None:
        """Decodes a message, and refuses it if it cannot take part. `digest`: of its object."""
        size = self._wiring.route.widths[0]
        try:
            if len(sent.body) != size:
                raise MessageError(
                    f"it has {len(sent.body):,} bytes, this layout's have {size:,}: truncated, or another one"
                )
            if sent.before != log.digest_of(self._attached.previous):
                self._run.say_that_copies_part()
                raise MessageError("it follows another manifest of the round before")
            if None not in (self.mine.weights, sent.weights) and sent.weights != self.mine.weights:
                raise MessageError(_OTHER_WEIGHTS)
            self.results[digest] = check_message(self._wiring, self._header, tensor_of(sent.body))
        except MessageError as error:
            self.refused[sent.worker] = error.reason
        else:
            self.valid[sent.worker] = sent, digest


def renamed(sent: Envelope) -> Envelope:
    """Returns a message under its worker's second name, for a worker whose first one is another's, too."""
    return replace(sent, worker=log.second_name(sent.worker, log.digest(sent.packed())))


def as_listed(sent: Envelope, first: Envelope, manifest: Manifest) -> tuple[int | None, Envelope]:
    """Returns the row of a worker's own message in a manifest, or None; and the message under its name there.

    `first`: the message under the name that it had first. Under that, too, an earlier attempt may have put it, or the
    process before this one; either may have gone on to the second name.
    """
    # By its bytes, because another may have its name. They may be many, so they are hashed only for names like its own.
    alike = {each.digest: row for row, each in enumerate(manifest.senders) if each.worker.startswith(first.worker[:50])}
    for each in (sent, renamed(sent), first, renamed(first)) if alike else ():
        if (row := alike.get(log.digest(each.packed()))) is not None:
            return row, each
    return None, sent


def envelope_of(attached: Attached, message: Tensor) -> Envelope:
    """Returns a round's own message as it is sent."""
    return replace(attached.envelope, body=bytes_of(message))


def bytes_of(tensor: Tensor) -> bytes:
    held = tensor.detach().cpu().contiguous()
    return (ctypes.c_char * held.nbytes).from_address(held.data_ptr()).raw  # `string_at` takes less than 2 GiB


def tensor_of(data: bytes) -> Tensor:
    """Returns bytes as a tensor, uint8 [n]."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
