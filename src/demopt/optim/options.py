"""Options of an optimizer that hold for all parameter groups."""

from dataclasses import dataclass

from demopt.optim.routes.choice import ROUTES


@dataclass(frozen=True)
class Options:
    """The route, steps between fingerprints, buckets sent during backward, and steps that updates are delayed by.

    Example:
        >>> Options(route="auto", fingerprint_every=100, overlap=0, delay=0).check()
    """

    route: str
    fingerprint_every: int
    overlap: int
    delay: int

    @property
    def in_background(self) -> bool:
        """Whether exchanges run in the background while this rank computes."""
        return self.overlap not in (0, False) or self.delay == 1

    def check(self) -> None:
        """Raises ValueError if an option, or a combination of them, is invalid."""
        if self.route not in (*ROUTES, "auto"):
            raise ValueError(f"route is {self.route!r}; choose one of 'auto', {', '.join(map(repr, ROUTES))}")
        if not isinstance(self.fingerprint_every, int) or self.fingerprint_every < 0:
            raise ValueError(f"fingerprint_every is {self.fingerprint_every!r}; give a number of steps, or 0 for never")
        if not isinstance(self.overlap, int) or self.overlap < 0:
            raise ValueError(f"overlap is {self.overlap!r}; give a number of buckets, or 0 for no overlap")
        if not isinstance(self.delay, int) or self.delay not in (0, 1):
            raise ValueError(f"delay is {self.delay!r}; give 0, or 1 for updates that come a step late")
        if self.overlap and self.delay:
            raise ValueError("overlap and delay cannot be had together: with delay=1 the exchange has a step anyway")
        if self.overlap and self.route == "shared":
            raise ValueError("route 'shared' goes through all positions in one order; use it with overlap=0")
