"""Converts bytes to seconds on a link of a given speed."""

from __future__ import annotations

LINKS = {"10 Mbit/s": 1e7, "100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Gbit/s": 1e11}
LINK = "100 Mbit/s"  # the one of the verdict, the terminal table, and the page until its sliders move


def network_seconds(sent_bytes: float, received_bytes: float, bits_per_second: float) -> float:
    """Returns the seconds that a worker's bytes take on its own link, which carries both directions at once.

    A lower bound: it leaves out latency, loss, start-up and other traffic. It assumes no overlap with computation.

    Examples:
        >>> network_seconds(1_250_000, 2_500_000, bits_per_second=1e7)
        2.0
    """
    return 8 * max(sent_bytes, received_bytes) / bits_per_second
