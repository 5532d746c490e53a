"""The rounds of `LocalDeMo`: how ranks meet, and how a round is exchanged and applied."""

from collections.abc import Callable
from typing import Any

from demopt.replicator.replicator import Replicator
from demopt.replicator.varying import Moments, VaryingExchange


class Rounds:
    """The rounds of a fixed set of ranks: a round that fails has failed on all of them."""

    in_step = True  #: whether all ranks are at the same local step
    is_behind = False  #: whether rounds may have been decided without this rank

    def __init__(self, replicator: Replicator) -> None:
        self.replicator = replicator

    @property
    def is_open(self) -> bool:
        """Whether this rank does not know the outcome of a round for which it may have sent a message."""
        return False

    @property
    def repeats(self) -> bool:
        """Whether to send what is left at once."""
        return False

    @property
    def have_met(self) -> bool:
        """Whether the next local step needs nothing of other ranks before it."""
        replicator = self.replicator
        return replicator.in_flight or replicator.session.agreed is replicator.wiring().route

    def meet(self) -> Moments | None:
        """Makes this rank one of the others; it may move the parameters. Returns moments if it took a run's weights."""
        self.replicator.agree()
        return None

    def observe(self) -> int:
        """Takes the newest weights of a run in a folder without joining it; returns the number of its rounds."""
        raise RuntimeError("observe is for a run in a folder: process_group=demopt.FolderExchange(ADDRESS)")

    def apply(self) -> None:
        """Exchanges the replicator's round, if it is not under way, and applies it."""
        self.replicator.apply(self.replicator.exchange())

    def reopen(self) -> bool:
        """Returns whether there is a round to apply first: one in flight, or one that an error left open."""
        return self.replicator.in_flight

    def abandon(self) -> None:
        """After an error: forgets the round, unless its message is still under way."""
        if not self.replicator.in_flight:
            self.replicator.rollback()

    def rollback(self) -> None:
        """Forgets the round; waits for an exchange under way."""
        self.replicator.rollback()

    def catch_up(self) -> None:
        """Applies the rounds that were decided without this rank."""

    def resync(self, src: int) -> None:
        """Takes the parameters and outer state of rank `src`."""
        self.replicator.resync(src)


def rounds_of(process_group: Any, replicator: Replicator, moments: Callable[[], Moments]) -> Rounds:
    """Returns the rounds of a replicator between the ranks of a process group."""
    if isinstance(process_group, VaryingExchange):
        return process_group.rounds_of(replicator, moments)
    return Rounds(replicator)
