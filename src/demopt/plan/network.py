"""Seconds of a step on a link, and the verdict: which method to take there, and where both are equal.

A collective takes 8 x its bytes / bandwidth + its trips x latency / 2, and, as TCP starts with a small window after a
pause, the wait for answers until the window covers the message or the link. Compared with gloo in
laboratory/records/network.md. Loss and congestion are left out.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from demopt.plan.costs import Call, Plan, exchanged_bytes, quantity
from demopt.train.config import InputError

FIRST_WINDOW = 10 * 1448  # bytes that TCP sends at once after a pause
SEGMENT_BYTES = 2**20  # of a long all_reduce, in gloo
TINY = 1000  # bytes; an all_reduce of less is not cut into segments
LOSS = Call("all_reduce", 16)  # demopt train's mean of the loss, and whether to stop


@dataclass(frozen=True)
class Link:
    """Each worker's connection: full duplex, the same bandwidth in both directions, and a round trip to the others."""

    bits_per_second: float
    latency_seconds: float

    def seconds(self, calls: Sequence[Call], workers: int) -> float:
        """Returns the time that collectives take, one after the other."""
        seconds = 8 * exchanged_bytes(calls, workers) / self.bits_per_second
        for call in calls:
            seconds += call.times * trips(call, workers) * self.latency_seconds / 2 + self.slow_start(call, workers)
        return seconds

    def slow_start(self, call: Call, workers: int) -> float:
        """Returns the wait while TCP doubles its window in each round trip, less the time in which it sends then."""
        size = call.size if call.kind == "all_gather" else call.size / workers  # of a message
        round_trips = math.ceil(math.log2(size / FIRST_WINDOW + 1)) - 1 if size else 0
        return max(round_trips * self.latency_seconds - 8 * size / self.bits_per_second, 0.0)


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
    return max(6 * (workers - 1) - 2, math.ceil(exchanged_bytes([call], workers) / call.times / SEGMENT_BYTES))


def bandwidth(text: str) -> float:
    """Parses a bandwidth, in bits per second."""
    bits = quantity(text, r"(?:bits?(?:/s)?|bps)")
    if not bits > 0:
        raise InputError(f"--bandwidth is {text!r}; give bits per second, such as 100Mbit, 1Gbit or 10Gbit")
    return bits


def step_seconds(plan: Plan, link: Link, compute: float, optimizer: float, method: str, workers: int) -> float:
    """Returns the seconds of a step: `compute`, with demopt also `optimizer`, and the network's."""
    network = link.seconds([*plan.calls[workers][method], LOSS], workers) / plan.steps(method)
    return compute + network + (0.0 if method.startswith("DDP") else optimizer)


def verdict(plan: Plan, link: Link, compute: float, optimizer: float, workers: int) -> str:
    """Returns the method to take, and the bandwidth at which both are equal, in one sentence."""
    ddp, ours = (step_seconds(plan, link, compute, optimizer, method, workers) for method in ("DDP", "LocalDeMo"))
    equal = equal_bandwidth(plan, link.latency_seconds, optimizer, workers)
    advice = f"Take demopt train, {digits(ddp / ours)} times faster than DDP" if ours < ddp else "Stay with DDP"
    end = f"both are equal at {digits(equal / 1e6)} Mbit/s" if equal else "that holds at any bandwidth"
    times = f"for {workers} workers a step takes {digits(ddp)} s with DDP and {digits(ours)} s with demopt"
    return f"{advice}: {times}; {end}."


def equal_bandwidth(plan: Plan, latency_seconds: float, optimizer: float, workers: int) -> float | None:
    """Returns the bits per second at which DDP and LocalDeMo take as long; None if one is faster at any.

    `optimizer`: the seconds per step that LocalDeMo and its inner optimizers add.
    """

    def ddp_wins(exponent: int) -> bool:
        link = Link(10 ** (exponent / 5000), latency_seconds)
        ddp, ours = (step_seconds(plan, link, 0.0, optimizer, method, workers) for method in ("DDP", "LocalDeMo"))
        return ddp <= ours

    exponents = range(15_000, 65_000)  # of 1 kbit/s to 10 Tbit/s
    found = bisect.bisect_left(exponents, True, key=ddp_wins)
    return 10 ** (exponents[found] / 5000) if 0 < found < len(exponents) else None


def digits(number: float) -> str:
    """Formats with three significant digits, or with all digits before the point.

    Examples:
        >>> digits(1889.5), digits(99.96), digits(42.61), digits(0.04), digits(0.0)
        ('1,890', '100', '42.6', '0.0400', '0')
    """
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:#.3g}".rstrip(".") if number and math.isfinite(number) else "0"
