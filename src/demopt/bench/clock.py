"""Timing: the order of methods, the seconds of some work, and memory bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

REPEATS = 7  # of a copy and of an addition, to measure memory bandwidth


def turn_order(count: int, turn: int) -> list[int]:
    """Return the order of `count` methods in a round: each round starts with another one.

    Examples:
        >>> [turn_order(3, turn) for turn in range(3)]
        [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    """
    return [(place + turn) % count for place in range(count)]


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `work` takes, until the device has finished."""
    _settle(device)
    began = time.perf_counter()
    work()
    _settle(device)
    return time.perf_counter() - began


def memory_bandwidth(size: int, device: torch.device) -> float:
    """Return the bytes a second that memory reads and writes: the faster of a copy and an addition in place (medians).

    A copy often also reads what it overwrites, which is not counted here, so in-place work can be faster.

    Examples:
        >>> memory_bandwidth(1 << 16, torch.device("cpu")) > 0
        True
    """
    source = torch.ones(size // 4, device=device)
    target = torch.ones_like(source)
    copying = [seconds(lambda: target.copy_(source), device) for _ in range(REPEATS)]
    adding = [seconds(lambda: target.add_(source), device) for _ in range(REPEATS)]
    return max(2 * source.nbytes / statistics.median(copying), 3 * source.nbytes / statistics.median(adding))


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
