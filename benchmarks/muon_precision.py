"""A step of torch.optim.Muon, whose Newton-Schulz iteration is in bfloat16, beside one of Float32Muon, on this CPU.

    python benchmarks/muon_precision.py --results benchmarks/results/muon-precision.json

For each shape both step in turn, `--rounds` times, after a step each to warm up. Prints the medians in ms and the
median of the ratios within rounds.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from demopt.train.muon import Float32Muon

SHAPES = [(192, 192), (512, 192), (384, 384), (768, 768), (2048, 768)]


def compared(shape: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Returns the medians of both, in ms, and the median ratio."""
    optimizers = [kind([Parameter(torch.zeros(shape))], lr=0.01) for kind in (torch.optim.Muon, Float32Muon)]
    seconds: list[list[float]] = []
    for _ in range(1 + rounds):
        seconds.append([_step_seconds(optimizer, shape) for optimizer in optimizers])
    theirs, ours = zip(*seconds[1:], strict=True)
    ratio = statistics.median(one / other for one, other in zip(theirs, ours, strict=True))
    return {
        "shape": list(shape),
        "torch_ms": round(1e3 * statistics.median(theirs), 2),
        "float32_ms": round(1e3 * statistics.median(ours), 2),
        "ratio": round(ratio, 2),
    }


def _step_seconds(optimizer: torch.optim.Optimizer, shape: tuple[int, int]) -> float:
    optimizer.param_groups[0]["params"][0].grad = torch.randn(shape)
    began = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often both step")
    parser.add_argument("--results", type=Path, help="a JSON file for the figures")
    given = parser.parse_args()
    flags = torch.backends.cpu.get_cpu_capability()
    machine = f"{platform.machine()}, {flags}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(machine)
    found = []
    for shape in SHAPES:
        found.append(compared(shape, given.rounds))
        print("{shape}: torch.optim.Muon {torch_ms} ms, Float32Muon {float32_ms} ms, {ratio}x".format(**found[-1]))
    if given.results is not None:
        date = time.strftime("%Y-%m-%d")
        given.results.write_text(json.dumps({"date": date, "machine": machine, "steps": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
