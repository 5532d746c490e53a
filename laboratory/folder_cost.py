"""Measures what a round costs through a folder, beside gloo: seconds, and requests and bytes of one worker.

    python -m laboratory.folder_cost [--workers 4] [--parameters 10000000] [--rounds 20] [--run ADDRESS]

Each worker is a process with LocalDeMo around SGD, one local step per round on made-up gradients, so that a round is
nearly all of a step. The seconds are the median over rounds of the slowest worker; the trips, requests in a row, those
of the worker that comes last in a round, and so does not wait. Run it on an idle machine.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

import demopt

context = multiprocessing.get_context("spawn")


def work(rank: int, given: argparse.Namespace, place: str, address: str, barrier: Any, answers: Any) -> None:
    """Runs one worker: `address` of a folder, or nothing for gloo."""
    torch.set_num_threads(1)
    run: demopt.FolderExchange | None = None
    if address:
        run = demopt.FolderExchange(address, late=600.0, checkpoint_every=10**9)
    else:
        dist.init_process_group("gloo", f"file://{place}/gloo", rank=rank, world_size=given.workers)
    torch.manual_seed(0)
    side = int((given.parameters / 10) ** 0.5)
    parameters = [torch.nn.Parameter(torch.randn(side, side)) for _ in range(10)]
    optimizer = demopt.LocalDeMo(torch.optim.SGD(parameters, lr=0.01), sync_every=1, process_group=run)
    optimizer.join()
    torch.manual_seed(rank)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    rounds, costs = [], []
    for _ in range(given.rounds + 3):  # the first ones warm up
        barrier.wait()
        began, before = time.perf_counter(), (run.requests, run.trips) if run else (0, 0)
        optimizer.step()
        rounds.append(time.perf_counter() - began)
        stats = optimizer.stats
        after = (run.requests, run.trips) if run else (0, 0)
        costs.append((after[0] - before[0], stats.sent_bytes, stats.received_bytes, after[1] - before[1]))
    answers.put((rounds[3:], costs[3:], optimizer.fingerprint()))
    answers.close()
    answers.join_thread()
    os._exit(0)  # process groups could keep the interpreter from exiting


def measure(given: argparse.Namespace, address: str) -> dict[str, Any]:
    """Runs all workers once; returns medians over the rounds."""
    with tempfile.TemporaryDirectory() as place:
        barrier, answers = context.Barrier(given.workers), context.Queue()
        arguments = [(rank, given, place, address, barrier, answers) for rank in range(given.workers)]
        workers = [context.Process(target=work, args=each) for each in arguments]
        for worker in workers:
            worker.start()
        found = [answers.get() for _ in workers]
        for worker in workers:
            worker.join()
    slowest = [max(seconds) for seconds in zip(*(rounds for rounds, _, _ in found), strict=True)]
    requests, sent, received, _ = (statistics.median(part) for part in zip(*found[0][1], strict=True))
    trips = [min(cost[3] for cost in costs) for costs in zip(*(costs for _, costs, _ in found), strict=True)]
    alike = len({fingerprint for _, _, fingerprint in found}) == 1
    return {
        "seconds": statistics.median(slowest), "requests": requests, "sent_bytes": sent, "received_bytes": received,
        "trips": statistics.median(trips), "same_weights": alike,
    }  # fmt: skip


def main() -> None:
    """Prints both kinds of rounds, and the difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--run", default="", help="address of a folder or bucket; default: a new folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        through = measure(given, given.run or folder)
    direct = measure(given, "")
    more = 1000 * (through["seconds"] - direct["seconds"])
    print(json.dumps({"folder": through, "gloo": direct, "more_ms": round(more, 1)}, indent=1))


if __name__ == "__main__":
    main()
