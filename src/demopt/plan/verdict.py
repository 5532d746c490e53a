"""What a plan comes to: which method to take on a link, how much faster it is than DDP, and where that ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from demopt.plan.costs import RINGS, Plan, ring
from demopt.plan.network import Call, Link

LOSS = Call("all_reduce", 16)  # demopt train's mean of the loss, and whether to stop
MOST_WORKERS = 2**16
SLOWEST, FASTEST = 1e3, 1e13  # bits a second, between which the bandwidth of equal times is looked for
WORTH = 166 / 130  # delay=1 is proposed only where it saves more than its further steps cost (docs/network.md)
DDP, LOCAL, DELAYED, DEMO = "DDP", "LocalDeMo", "LocalDeMo, delay=1", "DeMo"


@dataclass(frozen=True)
class Compute:
    """Seconds of a worker's step without the network, and what demopt's optimizers take more of them than DDP's."""

    step: float = 0.0
    optimizer: float = 0.0


@dataclass(frozen=True)
class Way:
    """A step with one method: seconds of compute, optimizer and network, the last as far as it is waited for."""

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

    `ways` are the methods with the fastest first, `best` the one to take; `equal_bits_per_second` is the bandwidth from
    which DDP is as fast as demopt train's method (None: at no bandwidth), `most_workers` the number up to which that
    method is faster (None: at any number tried, 0: at none).
    """

    workers: int
    route: str
    ways: tuple[Way, ...]
    best: str
    times_ddp: float
    equal_bits_per_second: float | None
    most_workers: int | None

    def sentence(self, sync_every: int) -> str:
        """Return the verdict in one sentence."""
        seconds = {way.name: way.seconds for way in self.ways}
        ddp = f"a step takes DDP {_time(seconds[DDP])}"
        if self.best == DDP:
            rate = self.equal_bits_per_second
            end = f"demopt pays below {_rate(rate)}." if rate else "demopt pays on no bandwidth at this latency."
            return f"Stay with DDP: {ddp} and demopt train {_time(seconds[LOCAL])} with {self.workers} workers; {end}"
        how = f"demopt train (LocalDeMo, a round every {sync_every} steps, route {self.route})"
        if self.best == DELAYED:
            how = how.replace("demopt train", "demopt train --delay 1")
        equal = "at this latency DDP is slower on any bandwidth"
        if self.equal_bits_per_second is not None:
            equal = f"both are equal at {_rate(self.equal_bits_per_second)}"
        most = "any number of" if self.most_workers is None else f"up to {self.most_workers:,}"
        return (
            f"Take {how}, {_times(self.times_ddp)} faster than DDP: {ddp} and demopt {_time(seconds[self.best])} with "
            f"{self.workers} workers; {equal}, and demopt pays with {most} workers."
        )


def judge(plan: Plan, link: Link, compute: Compute, workers: int) -> Verdict:
    """Compare the methods on a link.

    Examples:
        >>> from demopt.plan.costs import make_plan
        >>> from demopt.plan.model import of_count
        >>> plan = make_plan(of_count(124_000_000, chunk=64), {}, workers=[4])
        >>> verdict = judge(plan, Link(1e8, 0.05), Compute(step=2.1), workers=4)
        >>> verdict.best, round(verdict.times_ddp)
        ('LocalDeMo', 31)
    """
    ways = _ways(plan, link, compute, workers)
    seconds = {way.name: way.seconds for way in ways}
    best = min((DDP, LOCAL), key=seconds.__getitem__)
    if seconds[best] > WORTH * seconds[DELAYED]:
        best = DELAYED

    def gain(bits: float, many: int) -> float:
        found = {way.name: way.seconds for way in _ways(plan, replace(link, bits_per_second=bits), compute, many)}
        return found[DDP] - found[best if best != DDP else LOCAL]

    return Verdict(
        workers,
        "gather",
        tuple(sorted(ways, key=lambda way: way.seconds)),
        best,
        seconds[DDP] / seconds[best],
        _last(lambda bits: gain(bits, workers), SLOWEST, FASTEST),
        _last_worker(lambda many: gain(link.bits_per_second, many)),
    )


def _ways(plan: Plan, link: Link, compute: Compute, workers: int) -> list[Way]:
    """Return a step of every method, with the loss's all-reduce."""
    loss = link.seconds([LOSS], workers)
    dense = link.seconds(ring(RINGS["all_reduce_fp32"] * plan.parameters, workers).calls, workers)
    every, message = plan.local.sync_every, plan.local.rows[0].ways["gather"].message_bytes
    round_ = link.seconds([Call("all_gather", message)], workers)
    own = compute.step + compute.optimizer
    hidden = max(0.0, round_ - every * (own + loss))
    # DeMo's cheapest route was chosen for a number of workers that the plan has; gather's message fits any.
    demo = link.seconds([Call("all_gather", plan.rows[0].ways["gather"].message_bytes)], workers)
    return [
        Way(DDP, compute.step, 0.0, dense + loss),
        Way(LOCAL, compute.step, compute.optimizer, round_ / every + loss),
        Way(DELAYED, compute.step, compute.optimizer, hidden / every + loss),
        Way(DEMO, compute.step, compute.optimizer, demo + loss),
    ]


def _last(gain: Callable[[float], float], low: float, high: float) -> float | None:
    """Return where a falling function reaches zero; None if it is below zero everywhere, or above."""
    if gain(low) <= 0 or gain(high) > 0:
        return None
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low


def _last_worker(gain: Callable[[int], float]) -> int | None:
    """Return the largest number of workers with a gain; None if there is one with the most that are tried."""
    if gain(MOST_WORKERS) > 0:
        return None
    low, high = 1, MOST_WORKERS  # a gain at `low`, or none at all; none at `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low if low > 1 else 0


def _time(seconds: float) -> str:
    """Format a time.

    Examples:
        >>> _time(0.0123), _time(2.13), _time(593.0)
        ('12 ms', '2.1 s', '593 s')
    """
    if seconds < 0.0995:
        return f"{1e3 * seconds:.2g} ms" if seconds < 0.00995 else f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.2g} s" if seconds < 99.5 else f"{seconds:,.0f} s"


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio >= 9.5 else f"{ratio:.2g} times"


def _rate(bits: float) -> str:
    """Format a bandwidth.

    Examples:
        >>> _rate(2.34e9), _rate(1.2e7)
        ('2.3 Gbit/s', '12 Mbit/s')
    """
    for size, name in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= size:
            return f"{bits / size:.2g} {name}" if bits < 99.5 * size else f"{bits / size:.0f} {name}"
    return f"{bits / 1e3:.2g} kbit/s"
