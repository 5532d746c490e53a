"""Seconds of collectives on a link, and the verdict: which method to take there, and where both are equal.

A collective takes 8 x its bytes / bandwidth + its trips x latency / 2, and, as TCP starts with a small window after a
pause, the wait for answers until the window covers the message or the link. Compared with gloo in
laboratory/records/network.md. Loss and congestion are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from demopt.plan.costs import Call, Plan
from demopt.train.config import InputError

_BANDWIDTH = re.compile(r"([0-9.]+) ?([kmgt]?)(?:bits?(?:/s)?|bps)", re.IGNORECASE)
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}

SLOWEST, FASTEST = 1e3, 1e13  # bits per second, between which equal times are looked for
FIRST_WINDOW = 10 * 1448  # bytes that TCP sends at once after a pause
SEGMENT_BYTES = 2**20  # of a long all_reduce, in gloo
TINY = 1000  # bytes; an all_reduce of less is not cut into segments
LOSS = Call("all_reduce", 16)  # demopt train's mean of the loss, and whether to stop
DDP, LOCAL, DEMO = "DDP", "LocalDeMo", "DeMo"


@dataclass(frozen=True)
class Link:
    """Each worker's connection: full duplex, the same bandwidth in both directions, and a round trip to the others."""

    bits_per_second: float
    latency_seconds: float

    def seconds(self, calls: Sequence[Call], workers: int) -> float:
        """Returns the time that collectives take, one after the other."""
        seconds = 8 * sent_bytes(calls, workers) / self.bits_per_second
        for call in calls:
            seconds += call.times * trips(call, workers) * self.latency_seconds / 2 + self.slow_start(call, workers)
        return seconds

    def slow_start(self, call: Call, workers: int) -> float:
        """Returns the wait while TCP doubles its window in each round trip, less the time in which it sends then."""
        size = call.size if call.kind == "all_gather" else call.size / workers  # of a message
        round_trips = math.ceil(math.log2(size / FIRST_WINDOW + 1)) - 1 if size else 0
        return max(round_trips * self.latency_seconds - 8 * size / self.bits_per_second, 0.0)


def sent_bytes(calls: Sequence[Call], workers: int) -> float:
    """Returns the bytes that a rank sends in collectives: all_gather and all_reduce go in a ring.

    Examples:
        >>> [sent_bytes([Call(kind, 1000)], workers=4) for kind in ("all_gather", "all_to_all", "all_reduce")]
        [3000.0, 750.0, 1500.0]
    """
    parts = {"all_gather": workers, "all_to_all": 1, "all_reduce": 2}
    return (workers - 1) / workers * sum(call.times * call.size * parts[call.kind] for call in calls)


def trips(call: Call, workers: int) -> float:
    """Returns how many times in a row a packet must cross the network, as gloo's algorithms were measured to do.

    A message takes three, of which some overlap: ready to send, ready to receive, the data. A long all_reduce goes in
    segments, each of which waits; one of a few bytes needs the data alone.
    """
    if call.kind == "all_gather":
        return 2.5 * (workers - 1)
    if call.kind == "all_to_all":
        return workers
    if call.size < TINY:
        return 2 * (workers - 1)
    return max(6 * (workers - 1) - 2, math.ceil(sent_bytes([call], workers) / call.times / SEGMENT_BYTES))


def bandwidth(text: str) -> float:
    """Parses a bandwidth, in bits per second."""
    found = _BANDWIDTH.fullmatch(text.strip())
    try:
        bits = float(found[1]) * _FACTORS[found[2].lower()] if found else 0.0
    except ValueError:
        bits = 0.0
    if not bits > 0:
        raise InputError(f"--bandwidth is {text!r}; give bits per second, such as 100Mbit, 1Gbit or 10Gbit")
    return bits


# The verdict


@dataclass(frozen=True)
class Way:
    """A step with one method, in seconds: compute, the part that demopt's optimizer adds, and the network's."""

    name: str
    compute: float
    optimizer: float
    network: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.optimizer + self.network


@dataclass(frozen=True)
class Verdict:
    """The answer for one number of workers.

    `ways`: the methods, the fastest first. `equal`: bits per second at which DDP and LocalDeMo take as long.
    """

    workers: int
    ways: tuple[Way, ...]
    equal: float | None

    def sentence(self) -> str:
        """Returns the verdict in one sentence."""
        seconds = {way.name: way.seconds for way in self.ways}
        if seconds[LOCAL] < seconds[DDP]:
            advice = f"Take demopt train, {_two_digits(seconds[DDP] / seconds[LOCAL])} times faster than DDP"
        else:
            advice = "Stay with DDP"
        end = f"both are equal at {_rate(self.equal)}" if self.equal else "that holds at any bandwidth"
        return (
            f"{advice}: for {self.workers} workers a step takes {_time(seconds[DDP])} with DDP and "
            f"{_time(seconds[LOCAL])} with demopt; {end}."
        )


def judge(plan: Plan, link: Link, compute: float, optimizer: float, workers: int) -> Verdict:
    """Compares the methods on a link. `compute`: a worker's step without the network; `optimizer`: demopt's more."""
    per_step = {DDP: 1, DEMO: 1, LOCAL: 1 / plan.local.sync_every}

    def network(name: str, link: Link) -> float:
        return link.seconds([*plan.costs[workers][name].calls, LOSS], workers) * per_step[name]

    def gain(bits_per_second: float) -> float:
        there = replace(link, bits_per_second=bits_per_second)
        return network(DDP, there) - network(LOCAL, there) - optimizer

    ways = [Way(name, compute, 0.0 if name == DDP else optimizer, network(name, link)) for name in per_step]
    return Verdict(workers, tuple(sorted(ways, key=lambda way: way.seconds)), _equal(gain))


def _equal(gain: Callable[[float], float]) -> float | None:
    """Returns the bandwidth at which `gain` becomes negative, by bisection; None if its sign is the same at any."""
    low, high = SLOWEST, FASTEST
    if (gain(low) > 0) == (gain(high) > 0):
        return None
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (gain(middle) > 0) == (gain(low) > 0) else (low, middle)
    return low


def _time(seconds: float) -> str:
    """Formats a time with two digits."""
    return f"{_two_digits(1e3 * seconds)} ms" if seconds < 0.0995 else f"{_two_digits(seconds)} s"


def _rate(bits: float) -> str:
    """Formats a bandwidth."""
    size, name = next((size, name) for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (0, "k")) if bits >= size)
    return f"{_two_digits(bits / (size or 1e3))} {name}bit/s"


def _two_digits(number: float) -> str:
    return f"{number:.2g}" if number < 99.5 else f"{number:,.0f}"
