"""Timing: who goes when, what a clock reads, and how fast memory is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

COPIES = 7  # timed copies


def turn_order(count: int, turn: int) -> list[int]:
    """The order of `count` methods in a round: each round starts with another one.

    Example:
        >>> [turn_order(3, turn) for turn in range(3)]
        [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    """
    return [(place + turn) % count for place in range(count)]


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """What `work` takes, until the device is done with it."""
    _settle(device)
    began = time.perf_counter()
    work()
    _settle(device)
    return time.perf_counter() - began


def copy_bandwidth(size: int, device: torch.device) -> float:
    """Bytes a second that a plain copy of `size` bytes reads and writes: the median of a few.

    Example:
        >>> copy_bandwidth(1 << 16, torch.device("cpu")) > 0
        True
    """
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # pages are mapped at the first write
    times = [seconds(lambda: target.copy_(source), device) for _ in range(COPIES)]
    return 2 * size / statistics.median(times)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
