"""Seconds of collectives on a link, and the verdict: which method to take there, and where both are equal.

A collective takes 8 x its bytes / bandwidth + its trips x latency / 2. That leaves out loss, congestion, and TCP's slow
start after a pause, for which `demopt doctor` has a remedy. laboratory/records/network.md has the seconds of gloo.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from demopt.plan.costs import Call, Cost, Plan
from demopt.train.config import InputError

_BANDWIDTH = re.compile(r"([0-9.]+) ?([kmgt]?)(?:bits?(?:/s)?|bps)", re.IGNORECASE)
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}

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
        return self.waiting(calls, workers) + 8 * sent_bytes(calls, workers) / self.bits_per_second

    def waiting(self, calls: Sequence[Call], workers: int) -> float:
        """Returns the part of it that does not depend on the bandwidth."""
        return sum(call.times * trips(call, workers) for call in calls) * self.latency_seconds / 2


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
    costs, every = plan.costs[workers], plan.local.sync_every
    ways = [
        Way(DDP, compute, 0.0, link.seconds([*costs[DDP].calls, LOSS], workers)),
        Way(DEMO, compute, optimizer, link.seconds([*costs[DEMO].calls, LOSS], workers)),
        Way(LOCAL, compute, optimizer, link.seconds([*costs[LOCAL].calls, LOSS], workers) / every),
    ]
    equal = _equal(link, costs[DDP], costs[LOCAL], optimizer, every, workers)
    return Verdict(workers, tuple(sorted(ways, key=lambda way: way.seconds)), equal)


def _equal(link: Link, dense: Cost, local: Cost, optimizer: float, every: int, workers: int) -> float | None:
    """Returns the bandwidth at which both take as long: saved bits per step over the seconds that demopt adds to it."""
    dense_calls, local_calls = (*dense.calls, LOSS), (*local.calls, LOSS)
    saved_bytes = sent_bytes(dense_calls, workers) - sent_bytes(local_calls, workers) / every
    added = optimizer + link.waiting(local_calls, workers) / every - link.waiting(dense_calls, workers)
    return 8 * saved_bytes / added if saved_bytes * added > 0 else None


def _time(seconds: float) -> str:
    """Formats a time with two digits."""
    return f"{_two_digits(1e3 * seconds)} ms" if seconds < 0.0995 else f"{_two_digits(seconds)} s"


def _rate(bits: float) -> str:
    """Formats a bandwidth."""
    size, name = next((size, name) for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (0, "k")) if bits >= size)
    return f"{_two_digits(bits / (size or 1e3))} {name}bit/s"


def _two_digits(number: float) -> str:
    return f"{number:.2g}" if number < 99.5 else f"{number:,.0f}"
