"""Turns samples into figures: medians, and ratios of samples from the same round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def paired_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the median of one / other round by round, so that what slows a whole round down cancels out.

    Examples:
        >>> paired_ratio([2.0, 40.0, 6.0], [1.0, 10.0, 3.0])
        2.0
    """
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def summarise(rows: list[Row], bases: Sequence[str]) -> list[Row]:
    """Return each method's row with its median, min and max seconds, and its ratios to the bases.

    Examples:
        >>> both = {"a": [1.0, 3.0], "b": [4.0, 6.0]}
        >>> rows = [{"name": name, "seconds": seconds, "stages": {}} for name, seconds in both.items()]
        >>> [(row["median"], row["ratios"]) for row in summarise(rows, ["a"])]
        [(2.0, {'a': 1.0}), (5.0, {'a': 3.0})]
    """
    seconds = {row["name"]: row["seconds"] for row in rows}
    known = [base for base in bases if base in seconds]
    return [
        {
            **row,
            "median": statistics.median(row["seconds"]),
            "min": min(row["seconds"]),
            "max": max(row["seconds"]),
            "stage_medians": {name: statistics.median(times) for name, times in row["stages"].items()},
            "ratios": {base: paired_ratio(row["seconds"], seconds[base]) for base in known},
        }
        for row in rows
    ]


def with_floors(row: Row, memory_bytes_per_second: float | None, bits_per_second: float | None) -> Row:
    """Return the row with the least time that memory, and the network, allow.

    Examples:
        >>> row = with_floors({"floor_bytes": 100, "received_bytes": 50}, 50.0, 100.0)
        >>> row["floor_seconds"], row["network_floor_seconds"]
        (2.0, 4.0)
    """
    floors: Row = {}
    if memory_bytes_per_second and "floor_bytes" in row:
        floors["floor_seconds"] = row["floor_bytes"] / memory_bytes_per_second
    if bits_per_second and row["received_bytes"] is not None:
        floors["network_floor_seconds"] = 8 * row["received_bytes"] / bits_per_second
    return {**row, **floors}
