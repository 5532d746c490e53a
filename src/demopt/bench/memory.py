"""Measures exactly what some work allocates, from the allocator's own events, not from the process's size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Allocated:
    """Bytes beyond those held before: the peak, and what is still held at the end."""

    peak_bytes: int
    kept_bytes: int


def measure(work: Callable[[], object], device: torch.device) -> Allocated:
    """Run `work` and return what it allocates on its device.

    On the CPU this uses torch's profiler and sees the calling thread only; it is far too slow to be timed.

    Examples:
        >>> measure(lambda: torch.zeros(1000) + torch.zeros(1000), torch.device("cpu")).peak_bytes
        12000
    """
    if device.type == "cuda":
        return _on_cuda(work, device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiler:
        result = work()
    found = profiler.profiler.kineto_results.events()
    steps = sorted((event.start_ns(), place, event.nbytes()) for place, event in enumerate(found) if _is_memory(event))
    del result
    return running([size for _, _, size in steps])


def running(sizes: Sequence[int]) -> Allocated:
    """Return the peak and the end of the running sum of allocations (frees are negative).

    Examples:
        >>> running([4, 8, -4, 2])
        Allocated(peak_bytes=12, kept_bytes=10)
    """
    sums = list(itertools.accumulate(sizes, initial=0))
    return Allocated(max(sums), sums[-1])


def _is_memory(event: Any) -> bool:
    return bool(event.name() == "[memory]")


def _on_cuda(work: Callable[[], object], device: torch.device) -> Allocated:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = work()
    torch.cuda.synchronize(device)
    peak, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    del result
    return Allocated(peak - before, after - before)
