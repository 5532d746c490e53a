"""Rounds: how ranks meet, and exchange and apply a round, between a fixed set of ranks or with varying senders.

Where senders vary, each round has its own list of them. Messages arrive one by one; each is decoded and checked once,
alone, and the round keeps the result. The list, not the message, sets the message's place.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from demopt.errors import MessageError
from demopt.exchange import Meter
from demopt.replicator.route import Result, read_result
from demopt.replicator.wiring import Wiring
from demopt.wire.coefficients import Coefficients
from demopt.wire.message import NONFINITE, Header

if TYPE_CHECKING:
    from demopt.replicator.replicator import Replicator, Round

Moments = dict[str, Tensor]  # state of the inner optimizer, by "NUMBER OF PARAMETER.NAME"
Stage = Literal["begun", "extracted", "sent", "left open", "applied", "skipped", "failed"]  # of a `Round`


class Follower:
    """Weights that follow the replicator's: `LocalWeights` says how; this one, for `DeMo`, has no such weights."""

    def follow(self, current: Round, before: Stage) -> None:
        """A round with this rank's message has left the stage `before`, which is "extracted" or a later one."""

    def moved_by_others(self) -> AbstractContextManager[None]:
        """The context in which all else moves the replicator's weights; local steps since go on from there."""
        return nullcontext()

    def adopt(self) -> None:
        """Inside that context: no round will contain the local steps since the last one."""


@dataclass(frozen=True)
class Outcome:
    """A decided round: this rank's row in its list of senders (None: it is not listed), and their messages, checked."""

    row: int | None
    result: Result | None  # None: it was dropped, after the round


class VaryingExchange(Meter):
    """An exchange with a list of senders for each round; this rank is rank 0 of 1. It counts its bytes itself."""

    @abstractmethod
    def attachment(self, wiring: Wiring, header: Header, fingerprint: int | None) -> Any:
        """Returns all that goes with the next message, frozen as it is now. `fingerprint`: of the weights, if due.

        SettingsError, before any message is made, if the wiring's settings are not those that all share.
        """

    @abstractmethod
    def exchange_round(self, wiring: Wiring, header: Header, message: Tensor, attached: Any) -> Outcome:
        """Sends a message, uint8 [B], and returns the round's outcome."""

    @abstractmethod
    def rounds_of(self, replicator: Replicator, moments: Callable[[], Moments]) -> Rounds:
        """Returns the rounds of a replicator; `moments`: its inner optimizer's, which are lent to workers that join."""


def check_message(wiring: Wiring, header: Header, message: Tensor) -> Result:
    """Decodes and checks one message, uint8 [B]; MessageError, without a rank, if it cannot take part.

    `header`: that of this rank's message; where senders vary, each message comes from rank 0 of 1.
    """
    result = read_result(wiring.route, message.unsqueeze(0).to(wiring.route.device))
    try:
        flags, result.decoded = wiring.route.check(result, header)
    except MessageError as error:
        raise MessageError(error.reason) from None
    if flags & NONFINITE:
        raise MessageError("its gradient was not finite")
    result.checked = True
    return result


def join_results(wiring: Wiring, results: Sequence[Result]) -> Result:
    """Joins checked messages, each a row; without any, the result is a round that changes nothing."""
    if not results:
        empty = torch.empty(0, wiring.route.widths[0], dtype=torch.uint8, device="cpu")
        return Result(empty, empty._version, [], checked=True, skipped=True)
    messages = torch.cat([each.messages for each in results])
    headers = [each.headers[0] for each in results]
    decoded = [Coefficients.cat(parts, dim=0) for parts in zip(*(each.decoded for each in results), strict=True)]
    return Result(messages, messages._version, headers, decoded, checked=True)


class Rounds:
    """The rounds of a fixed set of ranks: a round that fails has failed on all of them."""

    in_folder = False  #: whether senders vary; they may then be at different local steps

    def __init__(self, replicator: Replicator) -> None:
        self.replicator = replicator
        self._is_inside = False  # inside `settled`, where a signal handler may run

    @contextmanager
    def settled(self) -> Iterator[None]:
        """The context in which a step makes or ends a round. If it fails, ranks forget it, a folder leaves it open."""
        before, self._is_inside = self._is_inside, True  # a signal handler may enter while a step is inside
        try:
            yield
        finally:
            self._is_inside = before
            self.settle()

    @property
    def has_joined(self) -> bool:
        """Whether the next local step needs nothing from other ranks first."""
        replicator = self.replicator
        return replicator.in_flight or replicator.session.has_agreed(replicator.wiring())

    def join(self, frozen: int | None = None) -> bool:
        """Meets the other ranks, which may move the parameters; returns whether this rank has joined a run of others.

        If so, `lent_moments` are for its inner optimizer. `frozen`: a hash of the frozen weights, for a run's record.
        """
        del frozen  # ranks that meet compare these weights themselves
        replicator = self.replicator
        with replicator.follower.moved_by_others():
            replicator.session.agree(replicator.wiring(), replicator.header)
        return False

    def lent_moments(self) -> Moments:
        """Returns the moments that a run lends to this rank: none if this rank has its own, or the run has none."""
        return {}

    def entry(self) -> dict[str, Any]:
        """Returns the entry of a state that is about rounds, such as a message whose round is undecided."""
        return {}

    def read_entry(self, entry: Any) -> Any:
        """Reads the result of `entry`, for `restore`; ValueError if it is damaged."""
        if not isinstance(entry, dict):
            raise ValueError("the state's entry 'folder' is damaged")

    def restore(self, saved: Any) -> None:
        """Takes the result of `read_entry`, in another process."""

    def observe(self) -> int:
        """Takes the newest weights of a run in a folder without joining it; returns the number of its rounds."""
        raise RuntimeError("observe is for a run in a folder: process_group=demopt.FolderExchange(ADDRESS)")

    def note_step(self) -> None:
        """Notes a local step: in a folder, a sampler's batch has been trained on."""

    def set_samples(self) -> None:
        """Sets `samples` of the next message, if the trainer of a run in a folder counts what it has trained on."""

    def end_open_round(self) -> bool:
        """Ends the round in flight, or one that an error left open; local steps since are for the next one.

        Returns whether this has ended the run, so that no round follows.
        """
        if self.replicator.is_open:
            self.exchange_and_apply()
        return False

    def exchange_and_apply(self) -> bool:
        """Exchanges the round, unless it is under way, and applies it; returns whether to send its content again now.

        After an error, `settle` follows.
        """
        self.replicator.apply(self.replicator.exchange())
        return False

    def settle(self) -> None:
        """Forgets a round that has failed; what it would have sent stays in the momentum.

        Called at the end of `settled` or, if a second interrupt came then, before the next call. In a folder the round
        is left open, because its message may be in a manifest; also inside `settled`, where a signal handler may save.
        """
        current = self.replicator.round
        has_failed = current is not None and not (self._is_inside or self.replicator.in_flight or current.by_user)
        if has_failed:
            self.replicator.rollback()

    def resync(self, src: int, drop_steps: Callable[[], None]) -> None:
        """Takes the parameters and outer state of rank `src`. Calls `drop_steps` first, unless the call is refused."""
        self.replicator.resync(src, drop_steps)
