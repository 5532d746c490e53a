"""The private names of torchft's Manager that demopt needs, used here and nowhere else (torchft 0.2.0)."""

from __future__ import annotations

from typing import Any

from demopt.errors import ExchangeError, first_line
from demopt.integrations.torchft.exchange import QuorumExchange


class Quorum:
    """The manager's quorum: the workers of the next round."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._number: int | None = None  # of the quorum whose workers have met

    @property
    def met(self) -> bool:
        """Whether the workers of the current quorum have met."""
        return bool(self._number == self._manager._quorum_id)

    def now_met(self) -> None:
        """Notes that they have."""
        self._number = self._manager._quorum_id

    def form(self) -> None:
        """Waits for a quorum. Raises ExchangeError if there is none, or if its workers cannot be reached."""
        manager = self._manager
        try:
            manager.start_quorum(allow_heal=False)  # weights travel between the workers, without pickles
            manager.wait_quorum()
        except Exception as error:  # the coordinator's errors are of several classes
            manager._quorum_future = None  # otherwise the next call would only raise this error again
            self._number = None
            raise ExchangeError(f"no quorum: {first_line(error)}") from error
        failed = manager.errored()
        if failed is not None:
            raise ExchangeError(f"the workers of the quorum were not reached: {first_line(failed.original_exception)}")

    def exchange(self, seconds: float | None = None) -> QuorumExchange:
        """Returns an exchange between the workers. `seconds`: as in `QuorumExchange`."""
        try:
            return QuorumExchange(self._manager._pg, seconds)
        except AssertionError:
            raise ExchangeError("the workers of the quorum were not reached") from None

    def vote(self) -> bool:
        """Whether the round is to be applied; True moves the manager's step on."""
        try:
            agreed: bool = self._manager.should_commit()
        except Exception as error:
            raise ExchangeError(f"no vote: {first_line(error)}") from error
        return agreed

    def refuse(self, error: Exception) -> None:
        """Votes no, so that the manager asks for a quorum with new connections."""
        self._manager.report_error(error)
        self.vote()

    def close(self) -> None:
        """Closes the connections to all workers, so that none waits for this one."""
        self._manager._pg.abort()
        self._number = None
