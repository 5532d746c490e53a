"""The weights of a run: how a worker joins, takes rounds, catches up and leaves a fork.

All of a run's weights follow from the first ones, the manifests and the messages that they name, bit for bit: decoding
is exact, and everybody applies the same list in the same order.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from demopt.errors import RESYNC_RUN, DemoptError, DriftError, MessageError, SettingsError
from demopt.exchange.dtensor import to_local
from demopt.interrupts import uninterrupted
from demopt.replicator.replicator import Replicator, Round
from demopt.replicator.rounds import Moments, Rounds
from demopt.replicator.session import check_order, marks_of, names_of
from demopt.runs import log
from demopt.runs.checkpoints import (
    Checkpoint,
    checkpoint_of,
    newest_checkpoint,
    packed_shapes,
    read_moments,
    save_checkpoint,
)
from demopt.runs.log import Manifest
from demopt.runs.open_round import (
    Attached,
    CoveredError,
    FolderOutcome,
    ForkedError,
    bytes_of,
    envelope_of,
    tensor_of,
)
from demopt.wire.message import MOST_SAMPLES

if TYPE_CHECKING:
    from demopt.runs.exchange import FolderExchange

_QUIET = 10.0  # seconds of catching up until the user hears of it
_TOLD_EACH = 60.0  # and how often from then on

# A worker's role in the run. "outside": its weights are its own; "observer": they are the run's, and it has sent
# nothing; "joining": it has loaded a state, and `join` has yet to find out what it has sent since; "joined"
Role = Literal["outside", "observer", "joining", "joined"]


@dataclass(frozen=True)
class SavedWorker:
    """A worker of a run, as the entry "folder" of an optimizer's state has it.

    A worker that dies between its put and the round's manifest does not know whether its message counts; the manifest
    tells. So a state has the message, which is put again, to the byte, until its round is decided. A state from before
    the message cannot tell which of its steps the message has: if that counts, all that was unsent is dropped.
    """

    run: str
    worker: str
    before: str  # digest of the manifest of the round before these weights
    message: log.Envelope | None  # whose round may be undecided
    read: list[int]  # numbers of sequences that no manifest has as read
    sent_from: int  # the first round in which this worker may have sent something that the state does not know of
    unsent: int  # sequences in its error and local steps
    in_message: int  # those in the message
    in_error: int = 0  # those in the error, which has the message's content, too

    @staticmethod
    def of(entry: Any) -> SavedWorker | None:
        """Reads the entry; None if it is empty, as where no run was joined. ValueError if it is damaged."""
        if entry == {}:
            return None
        try:
            packed, run = entry["message"], entry["run"]
            message = None if packed is None else log.read_message("the saved message", bytes_of(packed), run)
            found = SavedWorker(**{**entry, "message": message})
            found = replace(found, in_error=max(found.in_error, found.in_message))  # early states lack the message's
            in_steps = found.unsent - found.in_error
            counts = found.sent_from, found.unsent, in_steps, found.in_message, found.in_error, *found.read
            named = log.NAME.fullmatch(run) and log.NAME.fullmatch(found.worker) and isinstance(found.before, str)
            if not (named and all(type(each) is int and 0 <= each < 1 << 62 for each in counts)):
                raise TypeError
            return found
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, MessageError):
            raise ValueError("the state's entry 'folder' is damaged") from None

    def entry(self) -> dict[str, Any]:
        """Writes the entry."""
        return {**vars(self), "message": self.message and tensor_of(self.message.packed())}


class FolderRounds(Rounds):
    """A worker of a run: its rounds move the replicator's parameters, which are the global weights.

    How a worker joins depends on what it brings:

    | it has | role | it |
    |---|---|---|
    | the first weights | outside | starts the run |
    | no state | outside | takes the newest checkpoint, then applies the rounds since |
    | the weights of `observe` | observer | applies the rounds since |
    | a state | joining | goes on from there, and applies the rounds since |
    | a state with a message | joining | ends the message's round first: the manifest decides whether it counts |
    | a state older than its worker's last message | joining | drops what that state had not sent |

    Then it has joined, until it loads a state, which `restore` keeps as `_restored` until the weights move: `_move_to`.

    Later it is *behind* after a round that it was left out of, or whose messages are gone: `_catch_up`. It is on a
    *fork* if the store let two manifests of one round win, and the run went on from the other one: `_leave_fork`.

    `run` is the `FolderExchange`, which is the session's exchange, too. `moments`: see `VaryingExchange.rounds_of`.
    """

    in_folder = True

    def __init__(self, replicator: Replicator, run: FolderExchange, moments: Callable[[], Moments] = dict) -> None:
        super().__init__(replicator)
        self.run, self.moments = run, moments
        self._restored: SavedWorker | None = None  # the loaded state whose weights these are
        self._may_be_behind = False  # rounds may have been decided without this worker, and not be applied

    @property
    def _number(self) -> int:
        return int(self.replicator.round_number)

    # Joining

    @property
    def has_joined(self) -> bool:
        return self.run.joined

    def join(self, frozen: int | None = None) -> bool:
        """Starts the run with this worker's weights, or takes the run's, by the table; returns True for the latter."""
        replicator, run = self.replicator, self.run
        groups = [
            {
                **{name: value for name, value in group.items() if name != "params"},
                "parameters": packed_shapes(group["params"]),
                "param_names": names_of([group]),
                "marks": marks_of([*map(to_local, group["params"])]),
                "frozen": frozen,
            }
            for group in replicator.groups
        ]
        of_run = None if self._restored is None else self._restored.run
        started, decided = run.find_or_start(
            self._number, of_run, replicator.wiring().facts(), replicator.options.config_facts(), groups,
            first=lambda: checkpoint_of(replicator),
        )  # fmt: skip
        if started:
            run.sequences.read.clear()  # from a state of another run; the content of its message is in the error
            self._restored, run.sent_from = None, 0
        else:
            self._check_order(groups)
            with replicator.follower.moved_by_others():
                self._enter(decided)
                self._follow_run()
                if run.role == "joining":
                    self._drop_if_sent_since()
        run.stopping = run.has_stopped(run.decided)  # not by rounds from before it came, which it has just applied
        self._may_be_behind = False
        if run.stopping:
            run.take_back_hellos(self._number)
        else:
            run.hello(self._number)
        run.role = "joined"
        return not started

    def _check_order(self, groups: list[dict[str, Any]]) -> None:
        """Raises SettingsError if parameters are in another order than those of the run; says if frozen ones differ."""
        there = f"the run in {self.run.store.address}"
        frozen, first = ([group.get("frozen") for group in each[:1]] for each in (groups, self.run.record.groups))
        if None not in [*frozen, *first] and frozen != first:
            self.run.say(
                f"the frozen parameters of {self.run.worker} differ from those that {there} began with: load "
                "the same base model, because rounds move only what trains"
            )
        for kind in ("param_names", "marks"):
            mine = [each for group in groups for each in group[kind]]
            given = [group.get(kind) for group in self.run.record.groups]
            theirs = [each for of_group in given if isinstance(of_group, list) for each in of_group]
            if len(theirs) == len(mine) and all(isinstance(each, int | str) for each in theirs):
                check_order(f"{self.run.worker} has", there, theirs, mine)

    def _enter(self, decided: Manifest | None) -> None:
        """Takes the run's weights, or goes on from a state, after the round of `decided`; ends its message's round."""
        run = self.run
        match run.role:  # an "observer", or a worker whose join ended in an error, already has the run's weights
            case "outside":
                if self._number > 0:
                    raise SettingsError(
                        f"{run.worker} is at round {self._number} of another training than the run in "
                        f"{run.store.address}; join with a new optimizer, or one that has loaded its state of this run"
                    )
                self._take_first()
            case "joining" if (saved := self._restored) is not None:
                run.worker = saved.worker
                if saved.before != log.digest_of(decided):
                    other = f"round {self._number} is another one in {run.store.address} than in the state"
                    self._leave_fork(ForkedError(other), saved.before)
                else:
                    if saved.message is not None:
                        self._resume_round(saved.message, decided, saved.in_message)
                    self._move_to(decided)
        if self.replicator.is_open:
            try:
                self._exchange_and_end(run.is_over)
            except DriftError as error:  # the state's weights had drifted before they were saved
                run.say(f"{error.reason}; it takes the run's newest weights")
                self.take(self._newest_checkpoint(least=0))

    def _take_first(self) -> None:
        """Replaces this worker's weights by the run's newest."""
        newest = self._newest_checkpoint(least=0)
        with uninterrupted():
            self.take(newest)
            self.replicator.follower.adopt()
            self.run.sequences.drop_steps()
            self.run.role = "observer"

    def _resume_round(self, message: log.Envelope, decided: Manifest | None, in_message: int) -> None:
        """Goes on with the round of a message that was made before a restart."""
        if message.round != self._number:
            raise MessageError(f"the saved message is of round {message.round}, the state of round {self._number}")
        envelope = replace(message, body=b"")
        attached = Attached(envelope, decided, round_began=time.monotonic(), from_error=in_message, is_resumed=True)
        self.replicator.resume_round(tensor_of(message.body), attached)

    def _drop_if_sent_since(self) -> None:
        """Drops what a state had not sent if this worker has sent it since, in a message of round `sent_from` or later.

        If it has a message in the open round, this worker's next one goes beside it, under a second name.
        """
        run, sent_from = self.run, self.run.sent_from
        reads = [partial(run.manifest, number) for number in range(sent_from, self._number)]
        sent = {(each.round, sender.worker) for each in run.together(reads) if each for sender in each.senders}
        # A wish to stop may have ended the catch-up at a round whose message this worker knows.
        if self._number >= sent_from:
            sent |= {(self._number, worker) for worker in log.look(run.store, self._number).messages}
        # The first message under a second name proves it: from the next one on, it is this worker's first name.
        first = {worker: number for number, worker in sorted(sent, reverse=True)}
        if run.worker in first or any(self._is_own(number, worker) for worker, number in first.items()):
            run.say(
                "the run has a message of this worker that its state does not know; what that has unsent is dropped"
            )
            self._drop_unsent()
            run.sent_from = self._number + 1  # so that an error in the join below does not get later steps dropped

    def _is_own(self, number: int, worker: str) -> bool:
        """Whether the message of round `number` is this worker's under a second name, or is gone and may be."""
        run = self.run
        if not re.fullmatch(re.escape(log.second_name(run.worker, "")) + "[0-9a-f]{8}", worker):
            return False
        before = run.manifest(number - 1) if number else None
        if before is not None and worker in before.members:  # a second name is new
            return False
        name, most = log.message_name(number, worker), self.replicator.wiring().route.widths[0] + log.MOST_ENVELOPE
        parse = partial(log.read_message, name, run=run.record.identity, number=number, worker=worker)
        try:
            sent = log.read(run.store, name, most, parse)
        except MessageError:  # it may be a stranger's
            return False
        return sent is None or log.has_second_name(sent, run.worker)

    @uninterrupted()
    def _drop_unsent(self) -> None:
        self.replicator.rollback()  # what this gives back is dropped with the rest
        self.replicator.clear_momentum()
        self.replicator.follower.adopt()
        run = self.run
        if self._restored is not None:  # with its message, `join` would take that from the momentum
            self._restored = replace(self._restored, message=None, read=[], unsent=0, in_message=0, in_error=0)
        run.sequences.drop()  # whoever holds them reads them again
        run.left_out = 0  # nothing is left to be sent again

    def observe(self) -> int:
        """Takes the run's newest weights without joining it: nothing is written. Returns the number of its rounds."""
        run = self.run
        if run.role not in ("outside", "observer"):
            raise RuntimeError("this worker, or its state, is in the run: join() goes on; observe with a new optimizer")
        log.check_facts(run.find_run(), self.replicator.wiring().facts(), run.store.address, run.worker)
        with self.replicator.follower.moved_by_others():
            self._take_first()
            self._follow_run(asks=False)
        return self._number

    def resync(self, src: int, drop_steps: Callable[[], None]) -> None:
        """Takes the newest weights of the run; no rank is special."""
        del src
        drop_steps()
        if not self.has_joined:
            self.join()
        self.run.sequences.drop_steps()  # only now, because a state's message may have come first
        self._may_be_behind = True  # also after an error, which may leave the weights of an older round
        with self.replicator.follower.moved_by_others():
            self.take(self._newest_checkpoint(least=0))
        self._catch_up(self.run.is_over)

    # A round

    def end_open_round(self) -> bool:
        may_end = not self.run.is_over  # a trainer may go on after the end
        if self.replicator.is_open:
            self.exchange_and_apply()
        elif self._may_be_behind:  # an error has ended the catch-up
            self._catch_up(self.run.is_over)
        return may_end and self.run.is_over

    def note_step(self) -> None:
        self.run.sequences.note_step()

    def set_samples(self) -> None:
        sequences = self.run.sequences
        if sequences.weigh:
            # Counted anew each time: an unlisted message's sequences are in the next one, too.
            self.replicator.samples = min(max(1, sequences.unsent), MOST_SAMPLES)

    def exchange_and_apply(self) -> bool:
        """Exchanges the round and ends it; then catches up, if the run went on without this worker.

        After an error the round may stay open, to be tried again: its message may be in the store by then, and count.
        Returns whether to send its content again at once: otherwise a worker that is always late would be in no round.
        """
        was_over = self.run.is_over  # before this round: only rounds that end the run write its last checkpoint
        current = self._exchange_and_end(was_over)
        if self._may_be_behind:
            self._catch_up(was_over)
        return self.run.late_again > 0 and self.run.wants_next_round and current.finite  # left out twice in a row

    def _exchange_and_end(self, was_over: bool) -> Round:
        """The same without the catch-up: `join`, which also calls this, catches up anyway. Returns the round."""
        current = self.replicator.round
        assert current is not None
        try:
            messages = self.replicator.exchange()
        except ForkedError as error:  # `_leave_fork` drops what was sent
            self._may_be_behind = True  # also if another error keeps it on the fork
            with self.replicator.follower.moved_by_others():
                self._leave_fork(error, log.digest_of(self.run.decided))
        else:
            self._end(current, messages)
        if not self.run.wants_next_round:
            self.run.take_back_hellos(self._number)
        if not self._may_be_behind:
            self._save_if_due(was_over)
        return current

    def _end(self, current: Round, messages: Tensor) -> None:
        """Ends a round whose outcome is known; DriftError if these weights are not the run's."""
        replicator, outcome = self.replicator, current.outcome
        assert isinstance(outcome, FolderOutcome)
        run, is_listed = self.run, outcome.row is not None
        with uninterrupted():  # so that `decided` is the manifest of the weights
            if outcome.ended == "complete":  # also one without senders, which is skipped
                try:
                    replicator.apply(messages)
                except DriftError:  # what was sent has left the momentum
                    run.sequences.end(current, is_listed)
                    raise
                self._may_be_behind = not is_listed  # later rounds may be decided already
            else:
                replicator.mark_applied()  # the weights that include it come by `_catch_up` or `resync`
                self._may_be_behind = outcome.ended == "covered"  # after a drift the user calls `resync`
            run.sequences.end(current, is_listed)
            run.note_outcome(outcome)
        if outcome.ended == "drifted":
            told = f"the weights of worker {run.worker} differ from those of {outcome.manifest.author}"
            raise DriftError(outcome.manifest.round, [], told, RESYNC_RUN)

    def _save_if_due(self, was_over: bool) -> None:
        """Writes a checkpoint in this worker's turn, or before it leaves or the run ends: those who stay need one.

        `was_over`: whether the run was over before the rounds since the last call: a trainer may go on after its end.

        The senders of a round take turns, after that round. If one dies in its turn, the next checkpoint covers more.
        Before an end the first sender writes one, as does a worker that was left out, because it may be the last.
        """
        run, last = self.run, self.run.last
        if last is None:
            return
        ends = last.envelope.leaves or run.stopping or (run.is_over and not was_over)
        if ends and last.row in (None, 0) and run.manifest(self._number) is None:
            self.save()  # no others have gone on
            return
        turn, rest = divmod(self._number, run.record.checkpoint_every)
        row, is_newest = turn % max(1, len(last.manifest.senders)), last.manifest.round + 1 == self._number
        if rest or last.row != row or not is_newest:
            return
        if run.is_uploading:  # uploads that queue would slow all rounds down
            run.say_once(
                "checkpoints are left out while the one before is not uploaded yet (the run's --checkpoint-every "
                "is small for this link)"
            )
        else:
            self.save()

    def _catch_up(self, was_over: bool = False) -> None:
        """After a round without this worker: applies those decided since, and asks to be waited for, if it stays."""
        with self.replicator.follower.moved_by_others():
            self._follow_run()
        if self.run.wants_next_round:
            self.run.hello(self._number)
        else:
            self.run.take_back_hellos(self._number)  # hellos ahead
        self._may_be_behind = False
        self._save_if_due(was_over)

    @uninterrupted()
    def settle(self) -> None:
        """Leaves an extracted round open, at once and anywhere: its message may be in a manifest."""
        current = self.replicator.round
        if current is not None and current.stage == "extracted":
            self.replicator.enter_stage(current, "left open")  # and it is tried again

    # Rounds that were decided without this worker

    def _follow_run(self, asks: bool = True) -> None:
        """Applies all rounds that were decided without this worker, or takes the newest checkpoint if they are gone.

        Others may decide rounds faster than this worker reads them: if it `asks`, it says hello ahead, and they wait
        there. Otherwise the newest checkpoint will do.
        """
        run, since, rounds, load_seconds = self.run, time.monotonic(), 0, 0.0
        told = since + _QUIET - _TOLD_EACH
        while not run.asked_to_stop() and (manifest := self.next_manifest()) is not None:
            if time.monotonic() - told > _TOLD_EACH:
                told = time.monotonic()
                run.say(f"catching up: at round {manifest.round + 1}")
            try:
                if manifest.before != log.digest_of(run.decided):
                    raise ForkedError(f"round {manifest.round + 1} follows another round than this worker has applied")
                self.apply_manifest(manifest)
            except CoveredError:
                if not asks:
                    return
                if load_seconds and run.wants_next_round:  # while the last one loaded, the messages after it went
                    run.say_once(
                        f"the weights take {load_seconds:.0f} s to come, and the messages after them are gone by then: "
                        "the others are asked to wait (the run's --checkpoint-every is small for this link)"
                    )
                    run.hello_ahead(self._number, 0.0, load_seconds)
                loading = time.monotonic()
                self.take(self._newest_checkpoint(least=manifest.round + 1))
                since, rounds = time.monotonic(), 0  # of the mean below
                load_seconds = since - loading
            except ForkedError as error:
                self._leave_fork(error, log.digest_of(run.decided))
            else:
                rounds += 1
                if asks and rounds > 3 and not rounds & (rounds - 1) and run.wants_next_round:
                    run.hello_ahead(self._number, (time.monotonic() - since) / rounds)

    def next_manifest(self) -> Manifest | None:
        """Returns the manifest of the round that these weights are at; None if that round, and so the next, is open."""
        number = self._number
        if (found := self.run.manifest(number)) is None and self.run.manifest(number + 1) is not None:
            found = self.run.known_manifest(number)
        return found

    def apply_manifest(self, manifest: Manifest) -> None:
        """Applies a round that was decided without this worker. CoveredError if its messages are gone."""
        wiring = self.replicator.wiring()
        received = self.run.received_bytes
        result = self.run.results_of(manifest, wiring, self.replicator.header(wiring))
        with uninterrupted():
            self.replicator.apply_missed(result, self.run.received_bytes - received)
            self._move_to(manifest, manifest.stop)

    # Forks

    def _leave_fork(self, error: ForkedError, mine_before: str) -> None:
        """Returns to the newest checkpoint that the run's manifests lead to. The rounds since are then caught up with.

        A store that let two manifests of one round win has made two runs, which part here. The manifest that is there
        now counts, unless a later one follows the other. It may list messages of this worker that the other does not;
        the error is dropped, so that none counts twice. `mine_before`: the digest of the manifest before this round, as
        these weights have it.
        """
        run, number = self.run, self._number
        if number == 0:
            raise MessageError("the manifest of round 0 is damaged: it follows another one") from error
        self._drop_unsent()
        run.say(f"{error}; what this worker has not sent is dropped")
        run.say_that_copies_part()
        # `there`: the manifest before this round, as the store has it now; `chosen`: the digest of that from which the
        # run went on, if it did.
        there, after = self.run.known_manifest(number - 1), self.run.manifest(number)
        chosen = after.before if after else there.digest
        is_mine, is_there = chosen == mine_before, chosen == there.digest
        if is_mine and after is not None:  # only a worker that applied the lost one can apply what follows it
            with suppress(CoveredError):
                self.apply_manifest(after)
                return
        self.take(self._newest_checkpoint(least=0 if is_there else number + 1))

    # Checkpoints

    def save(self) -> None:
        """Writes a checkpoint of the weights as they are now."""
        save_checkpoint(self.run, self.replicator, self.moments())

    def _newest_checkpoint(self, least: int) -> Checkpoint:
        return newest_checkpoint(self.run, self.replicator.wiring().replicated_tensors(), least)

    @torch.no_grad()
    def take(self, checkpoint: Checkpoint) -> None:
        """Takes a checkpoint's weights; local ones follow at the end of `moved_by_others`."""
        stops = self.has_joined and self.run.has_stopped(checkpoint.decided)
        with uninterrupted():
            for tensor, value in zip(self.replicator.wiring().replicated_tensors(), checkpoint.tensors, strict=True):
                tensor.copy_(value)
            self.replicator.round_number.fill_(checkpoint.number)
            self._move_to(checkpoint.decided, stops)

    def _move_to(self, decided: Manifest | None, stops: bool = False) -> None:
        """Notes the place of the weights, as `note_outcome` does after own rounds; a loaded state then has served."""
        self._restored = None
        self.run.move_to(decided, stops)

    def lent_moments(self) -> Moments:
        if self.moments():
            return {}
        try:
            return read_moments(self.run, self.replicator.wiring().replicated_tensors(), self._number)
        except DemoptError as error:  # it has joined already, and does not join again
            self.run.say(f"{error}; the inner optimizer starts with empty state")
            return {}

    # This worker's state

    def entry(self) -> dict[str, Any]:
        run = self.run
        sequences = run.sequences
        if run.role == "outside":
            return {}
        if self._restored is not None:
            # Not joined yet: the state's round and message still hold. Sequences may have come, by local steps since.
            return replace(self._restored, unsent=sequences.unsent, read=sorted(sequences.read)).entry()
        self.replicator.let_extract()
        current, before = self.replicator.round, log.digest_of(run.decided)
        in_steps, in_error = sequences.in_steps, sequences.in_error
        message, in_message = None, 0
        if current is not None:  # its message may stay unlisted
            in_steps, in_error = sequences.after(current, is_listed=False)
            if current.finite and current.message is not None:
                # `after` counts the message's sequences in `in_error`, where they are if it stays unlisted.
                message, in_message = envelope_of(current.attached, current.message), in_error
        # `read_first`, which the next message counts, goes by the manifest of these weights. Where rounds may have been
        # decided since, a later one tells what this worker holds: until then all that it has read is kept.
        numbers = sequences.read if self._may_be_behind else sequences.read_first
        sent_from = run.sent_from  # its weights may be older than the messages that it has sent, as after a fork
        if run.role != "joining":  # otherwise `join` has yet to look for messages that it has sent since the state
            sent_from = max(sent_from, self._number if current is None else self._number + 1)  # this round's is below
        return SavedWorker(
            run=run.record.identity, worker=run.worker, before=before, message=message, read=sorted(numbers),
            sent_from=sent_from, unsent=in_steps + in_error, in_message=in_message, in_error=in_error,
        ).entry()  # fmt: skip

    def read_entry(self, entry: Any) -> SavedWorker | None:
        return SavedWorker.of(entry)  # at `join` the message shows whether it is of this layout

    def restore(self, saved: SavedWorker | None) -> None:
        """Takes the result of `read_entry`. The worker joins the run again."""
        run, self._may_be_behind = self.run, False
        self._move_to(None)  # unknown until `join` has read the state's manifest; forgets an earlier `_restored`
        run.sequences.drop()
        run.role, self._restored, run.left_out = "outside", saved, 0
        if saved is not None:
            run.role, run.sent_from = "joining", saved.sent_from
            run.sequences.read = {*saved.read}
            run.sequences.in_error, run.sequences.in_steps = saved.in_error, saved.unsent - saved.in_error
