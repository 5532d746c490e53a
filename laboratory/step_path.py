"""Counts what one step runs: calls, functions, files and classes of demopt, and the depth of the call stack.

    python -m laboratory.step_path [--list]

Four ranks in threads, two Linear layers, the CPU kernels; counts the fourth step of rank 0, in its
thread. LocalDeMo is around AdamW, with a round at every step, over either route. The exchange between threads, which
stands for a network, is not counted. Needs Python 3.11.
"""

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import demopt
from demopt.exchange import Exchange, Threads

PACKAGE = str(Path(demopt.__file__).parent)
WORLD_SIZE, STEPS = 4, 4


class StepPath:
    """The path of a step: a profiler hook that counts calls of demopt's functions, by file and qualified name."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.depth = self.deepest = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) or file.endswith("exchange/threads.py"):
            return
        if event == "call":
            self.depth += 1
            self.deepest = max(self.deepest, self.depth)
            self.calls[file.removeprefix(PACKAGE + "/"), frame.f_code.co_qualname] += 1
        elif event == "return":
            self.depth -= 1

    def counts(self) -> dict[str, int]:
        """Returns the counts. A comprehension is a call, but no function."""
        names = {(file, name) for file, name in self.calls if "<" not in name.rpartition(".")[2]}
        classes = {(file, name.split(".")[0]) for file, name in names if "." in name and "<locals>" not in name}
        return {
            "calls": sum(self.calls.values()),
            "functions": len(names),
            "files": len({file for file, _ in self.calls}),
            "classes": len(classes),
            "depth": self.deepest,
        }


Make = Callable[[torch.nn.Module, Exchange], torch.optim.Optimizer]


def demo(model: torch.nn.Module, exchange: Exchange) -> torch.optim.Optimizer:
    """Makes a DeMo with all defaults."""
    return demopt.DeMo(model.parameters(), process_group=exchange)


def local_demo(model: torch.nn.Module, exchange: Exchange) -> torch.optim.Optimizer:
    """Makes a LocalDeMo with a round at every step, over route gather."""
    return _local_demo(model, exchange, "gather")


def two_way(model: torch.nn.Module, exchange: Exchange) -> torch.optim.Optimizer:
    """Makes a LocalDeMo whose rounds go to owners and back."""
    return _local_demo(model, exchange, "owner")


def _local_demo(model: torch.nn.Module, exchange: Exchange, route: str) -> torch.optim.Optimizer:
    return demopt.LocalDeMo(torch.optim.AdamW(model.parameters()), sync_every=1, route=route, process_group=exchange)


def walk(make: Make) -> StepPath:
    """Takes four steps on four ranks; returns the path of rank 0's fourth."""
    seed, found = threading.Lock(), StepPath()

    def train(exchange: Exchange) -> None:
        with seed:  # it belongs to the process
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128))
        optimizer = make(model, exchange)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.full((4, 128), 0.1 * (exchange.rank + 1))).square().mean().backward()
            if step == STEPS - 1 and exchange.rank == 0:
                sys.setprofile(found)
            optimizer.step()
            sys.setprofile(None)

    ranks = Threads(WORLD_SIZE)
    ranks.run(train)
    ranks.close()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list functions with their calls")
    args = parser.parse_args()
    for make in (demo, local_demo, two_way):
        path = walk(make)
        print(make.__name__, ", ".join(f"{count} {name}" for name, count in path.counts().items()))
        if args.list:
            for (file, name), count in sorted(path.calls.items()):
                print(f"{count:5} {file:32} {name}")
