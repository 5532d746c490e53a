"""Seconds of a step on a link, and the verdict: which method to take there, and where both are equal.

A collective takes its bytes / bandwidth + its trips x latency / 2, and, as TCP starts with a small window after a
pause, the wait for answers until the window covers the message or the link. Within 25 % of 83 of the 98 collectives
that the laboratory measured with gloo (laboratory/records/network.md). Loss and congestion are left out.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from demopt.plan.costs import Call, Plan, exchanged_bytes, quantity
from demopt.train.config import InputError

DATA_SHARE = 0.96  # of a link's bits; the others are headers
HOST_SECONDS = 0.001  # of gloo, per collective
FIRST_WINDOW = 10 * 1448  # bytes that TCP sends at once after a pause
SEGMENT_BYTES = 2**20  # of a long all_reduce, in gloo
TINY = 1000  # bytes; an all_reduce of less is not cut into segments
WORTH = 1.25  # times faster, at least, to give up DDP's loss
FASTEST = 1e13  # bits per second
LOSS = Call("all_reduce", 16)  # demopt train's mean of the loss, and whether to stop
# Validation loss above the best DDP around Muon, by steps per round: 4 workers, 1,000 steps, in nats per byte. The rows
# are in laboratory/results, the table in docs/results.md; DeMo's text is another one.
LOSS_ABOVE_DDP = {("LocalDeMo", 5): 0.010, ("LocalDeMo", 15): 0.063, ("DeMo", 1): 0.110}


@dataclass(frozen=True)
class Link:
    """Each worker's connection: full duplex, the same bandwidth in both directions, and a round trip to the others."""

    bits_per_second: float
    latency_seconds: float
    backend: str = "gloo"  # of the process group; nccl's trips are those of its rings, and were not measured

    def seconds(self, calls: Sequence[Call], workers: int) -> float:
        """Returns the time that collectives take, one after the other."""
        seconds, gloo = 0.0, self.backend == "gloo"
        for call in calls:
            sent = 8 * exchanged_bytes([call], workers) / (DATA_SHARE * self.bits_per_second)
            if gloo and workers == 2 and call.kind != "all_reduce":
                sent *= 2  # whoever comes first sends, and its "ready to receive" waits behind its own data
            each = trips(call, workers) if gloo else ring_trips(call, workers)
            seconds += sent + call.times * (each * self.latency_seconds / 2 + gloo * HOST_SECONDS)
            seconds += self.slow_start(call, workers)
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


def ring_trips(call: Call, workers: int) -> float:
    """Returns the trips of nccl's algorithms: rings, whose parts follow each other without waiting."""
    return {"all_gather": workers - 1, "all_to_all": 1}.get(call.kind, 2 * (workers - 1))


def bandwidth(text: str) -> float:
    """Parses a bandwidth, in bits per second."""
    bits = quantity(text, r"(?:bits?(?:/s)?|bps)")
    if not bits > 0:
        raise InputError(f"--bandwidth is {text!r}; give bits per second, such as 100Mbit, 1Gbit or 10Gbit")
    return bits


@dataclass(frozen=True)
class Case:
    """A plan on a link. `compute`: seconds of a worker's step without the network; `optimizer`: what demopt adds."""

    plan: Plan
    link: Link
    compute: float
    optimizer: float

    def seconds(self, method: str, workers: int) -> float:
        """Returns the seconds of a step. DDP sends during backward, which is two thirds of computing."""
        calls, steps = self.plan.calls[workers][method], self.plan.steps(method)
        network, loss = (self.link.seconds(each, workers) / steps for each in (calls, [LOSS]))
        if method.startswith("DDP"):
            return max(self.compute, network + self.compute / 3) + loss
        return self.compute + network + loss + self.optimizer

    def at(self, bits_per_second: float, workers: int) -> tuple[float, float]:
        """Returns the seconds of a step at a bandwidth: DDP's with bfloat16 gradients, and LocalDeMo's."""
        there = dataclasses.replace(self, link=dataclasses.replace(self.link, bits_per_second=bits_per_second))
        return there.seconds("DDP bf16", workers), there.seconds("LocalDeMo", workers)


def verdict(case: Case, workers: int) -> str:
    """Returns the method to take, on what that stands, and the bandwidth at which both are equal.

    Without `compute` there is no verdict: the network's seconds only.
    """
    link, round_trip = case.link, f"{digits(1e3 * case.link.latency_seconds)} ms"
    ddp, ours = case.at(link.bits_per_second, workers)
    way = f"{workers} workers, {rate(link.bits_per_second)}, {round_trip}, {link.backend}"
    if not case.compute:
        return (
            f"The network takes {digits(ddp)} s per step with DDP (bfloat16) and {digits(ours)} s with demopt ({way}). "
            "For a verdict give --step-seconds."
        )
    if ours * WORTH > ddp:
        more = f"only {digits(ddp / ours)} times faster, and" if ours < ddp else "slower, and"
        advice = f"Stay with DDP: demopt is {more} costs some loss"
    else:
        advice = f"Take demopt: {digits(ddp / ours)} times faster than DDP"
    equal, (fast_ddp, fast_ours) = equal_bandwidth(case, workers), case.at(FASTEST, workers)
    if equal:
        end = f"Both are equal at {rate(equal)}."
    elif fast_ours >= fast_ddp:
        end = "DDP is ahead at any bandwidth."
    else:
        least = digits(fast_ddp / fast_ours)
        end = f"demopt is ahead at any bandwidth, by at least {least} times, because of the {round_trip}."
    return f"{advice}, {digits(ours)} s per step against {digits(ddp)} s ({way}; DDP bfloat16, during backward). {end}"


def equal_bandwidth(case: Case, workers: int) -> float | None:
    """Returns the bits per second at which DDP in bfloat16 and LocalDeMo take as long; None if one is always faster."""

    def ddp_wins(exponent: int) -> bool:
        ddp, ours = case.at(10 ** (exponent / 5000), workers)
        return ddp <= ours

    exponents = range(15_000, 65_000)  # of 1 kbit/s to FASTEST
    found = bisect.bisect_left(exponents, True, key=ddp_wins)
    return 10 ** (exponents[found] / 5000) if 0 < found < len(exponents) else None


def rate(bits_per_second: float) -> str:
    """Formats a bandwidth.

    Examples:
        >>> rate(195_975e6), rate(2.5e6)
        ('196 Gbit/s', '2.50 Mbit/s')
    """
    for factor, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits_per_second >= factor:
            return f"{digits(bits_per_second / factor)} {unit}"
    return f"{digits(bits_per_second / 1e3)} kbit/s"


def digits(number: float) -> str:
    """Formats with three significant digits, or with all digits before the point.

    Examples:
        >>> digits(1889.5), digits(99.96), digits(42.61), digits(0.04), digits(0.0)
        ('1,890', '100', '42.6', '0.0400', '0')
    """
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:#.3g}".rstrip(".") if number and math.isfinite(number) else "0"
