"""Rounds with their own lists of senders: the interface of exchanges that have them, and their decoded messages.

Messages arrive one by one. Each is decoded and checked once, alone; the round keeps the result. Its place in the list
is the list's, not the message's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from demopt.errors import DemoptError, MessageError
from demopt.exchange import Meter
from demopt.replicator.route import Result, read
from demopt.replicator.wiring import Wiring
from demopt.wire import message as wire
from demopt.wire.message import Header

if TYPE_CHECKING:
    from demopt.replicator.replicator import Replicator
    from demopt.replicator.rounds import Rounds

Moments = dict[str, Tensor]  # state of the inner optimizer, by "NUMBER OF PARAMETER.NAME"


@dataclass(frozen=True)
class Outcome:
    """A decided round: this rank's row in its list of senders (None: it was left out), and their messages, checked.

    `error`: why it cannot be applied; the row is known all the same.
    """

    row: int | None
    result: Result | None
    error: DemoptError | None = None


class VaryingExchange(Meter):
    """An exchange with a list of senders for each round; this rank is rank 0 of 1."""

    @abstractmethod
    def attachment(self, wiring: Wiring, weights: int | None) -> Any:
        """Returns all that goes with the next message, frozen as it is now. `weights`: a fingerprint, if it is due.

        SettingsError, before any message is made, if the wiring's settings are not those that all share.
        """

    @abstractmethod
    def exchange_round(self, wiring: Wiring, header: Header, message: Tensor, attached: Any) -> Outcome:
        """Sends a message, uint8 [B], and returns the round's outcome."""

    @abstractmethod
    def rounds_of(self, replicator: Replicator, moments: Callable[[], Moments]) -> Rounds:
        """Returns the rounds of a replicator. `moments` returns its inner optimizer's state, for workers that join."""


def checked(wiring: Wiring, header: Header, message: Tensor) -> Result:
    """Decodes and checks one message, uint8 [B]; MessageError, without a rank, if it cannot take part."""
    result = read(wiring.route, message.unsqueeze(0).to(wiring.route.device))
    try:
        flags, result.decoded = wiring.route.check(result, replace(header, rank=0, world_size=1))
    except MessageError as error:
        raise MessageError(error.reason) from None
    if flags & wire.NONFINITE:
        raise MessageError("its gradient was not finite")
    result.skipped = False
    return result


def joined(wiring: Wiring, results: Sequence[Result]) -> Result:
    """Joins checked messages, each a row; of none, a round that changes nothing."""
    if not results:
        empty = torch.empty(0, wiring.route.widths[0], dtype=torch.uint8, device="cpu")
        return Result(empty, empty._version, [], skipped=True)
    messages = torch.cat([each.messages for each in results])
    headers = [each.headers[0]._replace(rank=row, world_size=len(results)) for row, each in enumerate(results)]
    decoded = [type(parts[0]).of_ranks(parts) for parts in zip(*(each.decoded for each in results), strict=True)]
    return Result(messages, messages._version, headers, decoded, skipped=False)
