"""Seconds of collectives on a link, and the verdict: which method to take there, and where that ends."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from demopt.plan.costs import Call, Plan, ring
from demopt.train.config import InputError
from demopt.train.method import FLOAT32_BYTES

_BANDWIDTH = re.compile(r"([0-9.]+) ?([kmgt]?)(?:bits?(?:/s)?|bps)", re.IGNORECASE)
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}

FILLED = 1448 / 1514  # the part of an Ethernet frame that is data
FIRST_WINDOW = 10 * 1448  # bytes that TCP sends at once after a pause
SEGMENT_BYTES = 2**20  # of a long all_reduce, in gloo
HOST_SECONDS = 2e-3  # of gloo and the kernel, for a collective
APART_SECONDS = 2e-3  # by which two ranks may come to a collective
TINY = 1000  # bytes; an all_reduce of less is not cut into segments

LOSS = Call("all_reduce", 16)  # demopt train's mean of the loss, and whether to stop
MOST_WORKERS = 2**16
SLOWEST, FASTEST = 1e3, 1e13  # bits per second, between which the bandwidth of equal times is looked for
WORTH = 166 / 130  # delay=1 must save more than its additional steps cost (laboratory/records/network.md)
DDP, LOCAL, DELAYED, DEMO = "DDP", "LocalDeMo", "LocalDeMo, delay=1", "DeMo"


@dataclass(frozen=True)
class Link:
    """Each worker's connection: full duplex, the same bandwidth in both directions, and a round trip to the others.

    A collective takes its bytes over the bandwidth, half a round trip for each trip, and, as TCP restarts with a
    small window after a pause, a wait for answers until the window covers the link. This was compared with gloo in the
    laboratory (laboratory/records/network.md). It knows no loss, no congestion and no connection set-up.
    """

    bits_per_second: float
    latency_seconds: float

    def seconds(self, calls: Iterable[Call], workers: int) -> float:
        """Returns the time that the calls of a step or round take, one after the other."""
        return sum(self._seconds(call, workers) for call in calls)

    def _seconds(self, call: Call, workers: int) -> float:
        size, count = messages(call, workers)
        sent = size * (workers - 1) if call.kind == "all_to_all" else size * count
        wire = 8 * sent / (self.bits_per_second * FILLED)
        if workers == 2 and call.kind != "all_reduce" and self.latency_seconds < APART_SECONDS:
            wire *= 2  # one sends before the other is ready, whose "ready" then waits behind its own data
        once = wire + trips(call, workers, sent) * self.latency_seconds / 2 + HOST_SECONDS
        return call.times * once + self._slow_start(size, count)

    def _slow_start(self, size: int, count: int) -> float:
        """Returns the waits of a connection that doubles its window in each round trip, from the first window on."""
        window, waited = FIRST_WINDOW, 0.0
        for _ in range(count):
            if window >= size:
                break
            left = size - window
            while left > 0:
                idle = self.latency_seconds - 8 * window / self.bits_per_second
                if idle <= 0:
                    return waited
                waited += idle
                window *= 2
                left -= window
            window *= 2
        return waited


def messages(call: Call, workers: int) -> tuple[int, int]:
    """Returns size and number of the messages that one rank sends on its busiest connection, each after the other.

    Examples:
        >>> messages(Call("all_gather", 1000), workers=4), messages(Call("all_reduce", 1000), workers=4)
        ((1000, 3), (250, 6))
    """
    if call.kind == "all_gather":  # in a ring
        return call.size, workers - 1
    if call.kind == "all_to_all":  # to all others at the same time
        return call.size // workers, 1
    return -(-call.size // workers), 2 * (workers - 1)  # all_reduce, in a ring


def trips(call: Call, workers: int, sent_bytes: int) -> float:
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
    return max(6 * (workers - 1) - 2, -(-sent_bytes // SEGMENT_BYTES))


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

    `ways`: the methods, the fastest first. `best`: the one to take. `equal_bits_per_second`: the bandwidth from which
    DDP is as fast (None: at no bandwidth). `most_workers`: the number up to which demopt is faster (None: at any number
    tried; 0: at none).
    """

    workers: int
    ways: tuple[Way, ...]
    best: str
    times_ddp: float
    equal_bits_per_second: float | None
    most_workers: int | None

    def sentence(self, sync_every: int) -> str:
        """Returns the verdict in one sentence."""
        seconds = {way.name: way.seconds for way in self.ways}
        rate, ddp = self.equal_bits_per_second, f"a step takes {_time(seconds[DDP])} with DDP"
        if self.best == DDP:
            end = f"demopt pays below {_rate(rate)}." if rate else "demopt pays on no bandwidth at this latency."
            return f"Stay with DDP: {ddp} and {_time(seconds[LOCAL])} with demopt, for {self.workers} workers; {end}"
        how = f"demopt train{' --delay 1' * (self.best == DELAYED)} (LocalDeMo, a round every {sync_every} steps)"
        equal = f"both are equal at {_rate(rate)}" if rate else "at this latency DDP is slower on any bandwidth"
        most = "any number of" if self.most_workers is None else f"up to {self.most_workers:,}"
        times, step = _two_digits(self.times_ddp), _time(seconds[self.best])
        return (
            f"Take {how}, {times} times faster than DDP: {ddp} and {step} with demopt, for {self.workers} workers; "
            f"{equal}, and demopt pays with {most} workers."
        )


def judge(plan: Plan, link: Link, compute: float, optimizer: float, workers: int) -> Verdict:
    """Compares the methods on a link. `compute`: a worker's step without the network; `optimizer`: demopt's more."""
    ways = _ways(plan, link, compute, optimizer, workers)
    seconds = {way.name: way.seconds for way in ways}
    best = min((DDP, LOCAL), key=seconds.__getitem__)
    if seconds[best] > WORTH * seconds[DELAYED]:
        best = DELAYED

    def gain(bits: float, many: int) -> float:
        there = _ways(plan, replace(link, bits_per_second=bits), compute, optimizer, many)
        found = {way.name: way.seconds for way in there}
        return found[DDP] - found[best if best != DDP else LOCAL]

    equal = _last(lambda bits: gain(bits, workers))
    most = _last_worker(lambda many: gain(link.bits_per_second, many))
    return Verdict(
        workers, tuple(sorted(ways, key=lambda way: way.seconds)), best, seconds[DDP] / seconds[best], equal, most
    )


def _ways(plan: Plan, link: Link, compute: float, optimizer: float, workers: int) -> list[Way]:
    """Returns a step of every method, with the loss's all-reduce."""
    known = next(iter(plan.costs.values()))
    loss = link.seconds([LOSS], workers)
    dense = link.seconds(ring(FLOAT32_BYTES * plan.model.parameters, workers).calls, workers)
    demo = link.seconds(known["DeMo gather"].calls, workers)  # a message by gather fits any number of workers
    round_ = link.seconds(plan.round_calls(workers), workers)
    every = plan.local.sync_every
    hidden = max(0.0, round_ - every * (compute + optimizer + loss))
    return [
        Way(DDP, compute, 0.0, dense + loss),
        Way(LOCAL, compute, optimizer, round_ / every + loss),
        Way(DELAYED, compute, optimizer, hidden / every + loss),
        Way(DEMO, compute, optimizer, demo + loss),
    ]


def _last(gain: Callable[[float], float]) -> float | None:
    """Returns the bandwidth where a falling function reaches zero; None if it is below zero everywhere, or above."""
    low, high = SLOWEST, FASTEST
    if gain(low) <= 0 or gain(high) > 0:
        return None
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low


def _last_worker(gain: Callable[[int], float]) -> int | None:
    """Returns the largest number of workers with a gain; None if there is one with the most that are tried."""
    if gain(MOST_WORKERS) > 0:
        return None
    low, high = 1, MOST_WORKERS  # a gain at `low`, or none at all; none at `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low if low > 1 else 0


def _time(seconds: float) -> str:
    """Formats a time with two digits."""
    return f"{_two_digits(1e3 * seconds)} ms" if seconds < 0.0995 else f"{_two_digits(seconds)} s"


def _rate(bits: float) -> str:
    """Formats a bandwidth."""
    size, name = next((size, name) for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (0, "k")) if bits >= size)
    return f"{_two_digits(bits / (size or 1e3))} {name}bit/s"


def _two_digits(number: float) -> str:
    return f"{number:.2g}" if number < 99.5 else f"{number:,.0f}"
