"""Turns bytes and rounds into time on a link, and parses bandwidths and parameter counts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from demopt.train.config import InputError

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_BANDWIDTH = re.compile(r"([0-9.]+) ?([kmgt]?)(?:bits?(?:/s)?|bps)", re.IGNORECASE)
_COUNT = re.compile(r"([0-9._]+) ?([kmgbt]?)", re.IGNORECASE)


@dataclass(frozen=True)
class Link:
    """Each worker's connection: full duplex, with the same bandwidth in both directions, and a latency per round.

    A step takes received bytes / bandwidth + rounds x latency. A round is a message that must wait for another one to
    arrive: one for an all_gather or all_to_all, in which all pairs of ranks send directly and at the same time;
    2 (W - 1) for a ring all_reduce. This is a lower bound: no loss, no congestion, no connection set-up.

    Example:
        >>> Link(bits_per_second=1e9, latency_seconds=0.01).seconds(received_bytes=125_000_000, rounds=2)
        1.02
    """

    bits_per_second: float
    latency_seconds: float

    def seconds(self, received_bytes: int, rounds: int) -> float:
        """Return the time in the network."""
        return 8 * received_bytes / self.bits_per_second + rounds * self.latency_seconds


def bandwidth(text: str) -> float:
    """Parse a bandwidth, in bits per second.

    Example:
        >>> bandwidth("100Mbit"), bandwidth("1.5 Gbit/s")
        (100000000.0, 1500000000.0)
    """
    number = _number(_BANDWIDTH, text)
    if number is None:
        raise InputError(f"--bandwidth is {text!r}, wanted bits a second, such as 100Mbit, 1Gbit or 10Gbit")
    return number


def count(text: str) -> int:
    """Parse a number of parameters.

    Example:
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
