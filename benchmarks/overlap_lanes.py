"""Turns a profiler trace into lanes of intervals: what the rank computed, and when its exchange was in flight."""

import gzip
import json
from pathlib import Path
from typing import Any

Interval = tuple[float, float]
Lanes = dict[str, list[Interval]]

COMPUTE = {"forward": "forward", "backward": "backward", "demopt.extract": "extract", "demopt.apply": "apply"}
EXCHANGE = ("demopt.exchange", "gloo:all_reduce")


def read(trace: Path) -> Lanes:
    """Returns the intervals of each lane, in seconds from the first step's start; a wait lies over what waits."""
    with gzip.open(trace, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    main = next(event["tid"] for event in events if event["name"] == "forward")
    begun = min(event["ts"] for event in events if event["name"] == "forward")
    ended = max(event["ts"] + event["dur"] for event in events if event["name"] == "step")

    def found(*names: str, anywhere: bool = False) -> list[Interval]:
        wanted = [event for event in events if event["name"] in names and (anywhere or event["tid"] == main)]
        both = [(max(e["ts"], begun), min(e["ts"] + e["dur"], ended)) for e in wanted]
        return sorted(((a - begun) / 1e6, (b - begun) / 1e6) for a, b in both if a < b)

    lanes: Lanes = {lane: found(name) for name, lane in COMPUTE.items()}
    lanes["exchange"] = merged(found(*EXCHANGE, anywhere=True))
    ddp = found("c10d::allreduce_")
    if ddp:  # DistributedDataParallel waits at the end of backward; its update is the whole step
        lanes["apply"] = found("step")
        lanes["wait"] = [(max(a for a, _ in ddp if a < end), end) for _, end in lanes["backward"]]
    else:
        lanes["wait"] = found("demopt.wait", "demopt.exchange")
    lanes["step"] = [(start, end) for (start, _), (_, end) in zip(lanes["forward"], found("step"), strict=True)]
    return lanes


def merged(intervals: list[Interval]) -> list[Interval]:
    """Merges overlapping intervals.

    Example:
        >>> merged([(0, 2), (1, 3), (5, 6)])
        [(0, 3), (5, 6)]
    """
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def figures(lanes: Lanes) -> dict[str, Any]:
    """Returns seconds a step of the exchange and of the wait for it, and the hidden share of the exchange."""
    steps = len(lanes["step"])
    exchange, wait = (sum(end - start for start, end in lanes[name]) / steps for name in ("exchange", "wait"))
    return {"exchange_seconds": exchange, "wait_seconds": wait, "hidden": max(0.0, 1 - wait / exchange)}
