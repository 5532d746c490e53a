"""Seconds of collectives, by size and link, after a pause as long as a step: one rank of a scenario with stages."""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from demopt.exchange import Collective


def main() -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", timeout=limit)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries is no answer
    for line in sys.stdin:
        stage = json.loads(line)
        group = dist.new_group(timeout=limit)  # new connections for each link
        found = [
            {"call": call, "bytes": size, "seconds": _timed(group, call, size, stage["repeats"], stage["pause"])}
            for call, sizes in stage["sizes"].items()
            for size in sizes
        ]
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    os._exit(0)  # destructors of process groups wait for peers


def _timed(group: Any, call: str, size: int, repeats: int, pause: float) -> list[float]:
    """Returns the seconds on the slowest rank of each repeat; the first call, which connects, is not counted."""
    run = _call(group, call, size)
    run()
    mine = []
    for _ in range(repeats):
        dist.all_reduce(torch.zeros(1), group=group)
        time.sleep(pause)
        began = time.perf_counter()
        run()
        mine.append(time.perf_counter() - began)
    slowest = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [round(seconds, 6) for seconds in slowest.tolist()]


def _call(group: Any, call: str, size: int) -> Callable[[], Any]:
    """Returns the collective, of a message of `size` bytes a rank."""
    exchange = Collective(group)
    if call == "all_gather":
        message = torch.zeros(size, dtype=torch.uint8)
        return lambda: exchange.all_gather(message)
    if call == "all_to_all":
        parts = torch.zeros(exchange.world_size, size // exchange.world_size, dtype=torch.uint8)
        return lambda: exchange.all_to_all(parts)
    values = torch.zeros(max(1, size // 4))
    return lambda: dist.all_reduce(values, group=group)


if __name__ == "__main__":
    main()
