"""Turns collectives into time on a link, and parses bandwidths and parameter counts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from demopt.train.config import InputError

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_BANDWIDTH = re.compile(r"([0-9.]+) ?([kmgt]?)(?:bits?(?:/s)?|bps)", re.IGNORECASE)
_COUNT = re.compile(r"([0-9._]+) ?([kmgbt]?)", re.IGNORECASE)

FILLED = 1448 / 1514  # the part of an Ethernet frame that is data
FIRST_WINDOW = 10 * 1448  # bytes that TCP sends at once after a pause
SEGMENT_BYTES = 2**20  # of a long all_reduce, in gloo
HOST_SECONDS = 2e-3  # of gloo and the kernel, for a collective
APART_SECONDS = 2e-3  # by which two ranks may come to a collective
TINY = 1000  # bytes; an all_reduce of less is not cut into segments


@dataclass(frozen=True)
class Call:
    """Collectives of one kind, one after the other; `size` is the length in bytes of a rank's own message.

    Examples:
        >>> Call("all_gather", 1000).messages(4)  # what a rank sends on one connection
        [1000, 1000, 1000]
    """

    kind: str
    size: int
    times: int = 1

    def messages(self, workers: int) -> list[int]:
        """Return the messages that one rank sends on its busiest connection, each after the one before."""
        if self.kind == "all_gather":  # in a ring
            return [self.size] * (workers - 1)
        if self.kind == "all_to_all":  # to all others at the same time
            return [self.size // workers]
        return [-(-self.size // workers)] * (2 * (workers - 1))  # all_reduce, in a ring

    def sent_bytes(self, workers: int) -> int:
        """Return what a rank sends in one of the collectives."""
        own = self.messages(workers)
        return own[0] * (workers - 1) if self.kind == "all_to_all" else sum(own)

    def trips(self, workers: int) -> float:
        """Return how many times in a row a packet must cross the network, as gloo's algorithms were measured to do.

        A message takes three, of which some overlap: ready to send, ready to receive, the data. A long all_reduce goes
        in segments, each of which waits; one of a few bytes needs the data alone.
        """
        if self.kind == "all_gather":
            return 2.5 * (workers - 1)
        if self.kind == "all_to_all":
            return workers
        if self.size < TINY:
            return 2 * (workers - 1)
        return max(6 * (workers - 1) - 2, -(-self.sent_bytes(workers) // SEGMENT_BYTES))


@dataclass(frozen=True)
class Link:
    """Each worker's connection: full duplex, the same bandwidth in both directions, and a round trip to the others.

    A collective takes its bytes over the bandwidth, half a round trip for each trip, and, as TCP begins anew with a
    small window after a pause, a wait for answers until the window covers the link. This was compared with gloo in the
    laboratory (docs/network.md). It knows no loss, no congestion and no connection set-up.

    Examples:
        >>> link = Link(bits_per_second=1e9, latency_seconds=0.02)
        >>> round(link.seconds([Call("all_gather", 8)], workers=4), 3)
        0.077
    """

    bits_per_second: float
    latency_seconds: float

    def seconds(self, calls: Iterable[Call], workers: int) -> float:
        """Return the time that the calls of a step or round take, one after the other."""
        return sum(self._seconds(call, workers) for call in calls)

    def _seconds(self, call: Call, workers: int) -> float:
        wire = 8 * call.sent_bytes(workers) / (self.bits_per_second * FILLED)
        if workers == 2 and call.kind != "all_reduce" and self.latency_seconds < APART_SECONDS:
            wire *= 2  # one sends before the other is ready, whose "ready" then waits behind its own data
        once = wire + call.trips(workers) * self.latency_seconds / 2 + HOST_SECONDS
        return call.times * once + self._slow_start(call.messages(workers))

    def _slow_start(self, messages: list[int]) -> float:
        """Return the waits of a connection that doubles its window in each round trip, from the first window on."""
        window, waited = FIRST_WINDOW, 0.0
        for message in messages:
            left = message - window
            while left > 0:
                idle = self.latency_seconds - 8 * window / self.bits_per_second
                if idle <= 0:
                    return waited
                waited += idle
                window *= 2
                left -= window
            window *= 2
        return waited


def bandwidth(text: str) -> float:
    """Parse a bandwidth, in bits per second.

    Examples:
        >>> bandwidth("100Mbit"), bandwidth("1.5 Gbit/s")
        (100000000.0, 1500000000.0)
    """
    number = _number(_BANDWIDTH, text)
    if number is None:
        raise InputError(f"--bandwidth is {text!r}, wanted bits a second, such as 100Mbit, 1Gbit or 10Gbit")
    return number


def count(text: str) -> int:
    """Parse a number of parameters.

    Examples:
        >>> count("300M"), count("1.2B"), count("124_400_000")
        (300000000, 1200000000, 124400000)
    """
    number = _number(_COUNT, text)
    if number is None or number < 1:
        raise InputError(f"--params is {text!r}, wanted a number of parameters, such as 124400000, 300M or 1.2B")
    return round(number)


def _number(pattern: re.Pattern[str], text: str) -> float | None:
    """Return the number in `text` times its prefix; None if it does not match or is not above zero."""
    found = pattern.fullmatch(text.strip())
    if found is None:
        return None
    try:
        number = float(found[1]) * _PREFIXES[found[2].lower()]
    except ValueError:
        return None
    return number if number > 0 else None
