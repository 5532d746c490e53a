"""Counts what one step runs: calls, functions and files of demopt, and the depth of the call stack.

Two ranks in threads, two Linear layers, all defaults, CPU without the C kernels; counts the third step of rank 0, in
its own thread:

    python benchmarks/step_path.py [--route owner] [--list]
"""

import argparse
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import demopt
from demopt.exchange import Exchange, thread_exchanges
from demopt.kernels import codec, cpu

PACKAGE = str(Path(demopt.__file__).parent)


class Counting:
    """A profiler hook that counts the calls of demopt's own functions."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.depth = self.deepest = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if event == "call":
            self.depth += 1
            self.deepest = max(self.deepest, self.depth)
            self.calls[frame.f_code.co_filename.removeprefix(PACKAGE + "/"), frame.f_code.co_qualname] += 1
        elif event == "return":
            self.depth -= 1


def train(exchange: Exchange, settings: dict[str, Any]) -> Counting:
    """Takes three steps; returns the path of the third."""
    with LOCK:  # the seed belongs to the process
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    optimizer = demopt.DeMo(model.parameters(), process_group=exchange, **settings)
    path = Counting()
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 64), 0.1 * (exchange.rank + 1))).square().mean().backward()
        if step == 2:
            sys.setprofile(path)
        optimizer.step()
        sys.setprofile(None)
    return path


LOCK = threading.Lock()

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--route", default="auto")
    parser.add_argument("--update", default="signum")
    parser.add_argument("--list", action="store_true", help="list functions with their calls")
    args = parser.parse_args()
    codec.covers = lambda _: False  # as where there is no C compiler
    cpu.covers = lambda *_: False
    with ThreadPoolExecutor(2) as pool:
        settings = {"route": args.route, "update": args.update}
        path = next(iter(pool.map(lambda exchange: train(exchange, settings), thread_exchanges(2))))
    files = {file for file, _ in path.calls}
    named = [name for _, name in path.calls if "<" not in name]  # a comprehension is a call, but no function
    print(f"{sum(path.calls.values())} calls, {len(named)} functions, {len(files)} files, depth {path.deepest}")
    if args.list:
        for (file, name), count in sorted(path.calls.items()):
            print(f"{count:5} {file:32} {name}")
