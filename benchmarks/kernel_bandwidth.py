"""Measures the bytes a second of the GPU kernels, beside a copy and torch's fused AdamW on the same device.

    python benchmarks/kernel_bandwidth.py --presets 124m demo-300m demo-1b --dtype float32 --world 1

Needs an NVIDIA GPU. Counts the bytes that must move: extract reads gradients and momenta and writes momenta; apply
reads and writes parameters; both move coefficients; AdamW reads parameter, gradient and two moments and writes all but
the gradient. Each round times all of them in turn; results are medians. Writes JSON under benchmarks/results.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

import demopt
from demopt.kernels import triton_apply, triton_extract
from demopt.kernels.steps import Steps
from demopt.optim.chunk_group import ChunkGroup, build
from demopt.plan.model import of_config
from demopt.train.config import TrainConfig

RESULTS = Path(__file__).parent / "results"
LR = 1e-6


@dataclass
class Work:
    """Something to time, and the bytes that it must move."""

    run: Callable[[], object]
    bytes: int


def extract_work(chunk_groups: list[ChunkGroup], found: list[tuple[Tensor, Tensor]]) -> Work:
    """Extracts all chunk groups, and leaves the positions and values of each in `found`."""

    def run() -> None:
        found.clear()
        for chunk_group in chunk_groups:
            members, chunkings = zip(*chunk_group.members, strict=True)
            gradients = [member.grad for member in members]
            found.append(
                triton_extract.extract(
                    gradients, chunkings, chunk_group.momentum, chunk_group.bases, 0.9, 1.0, chunk_group.key.keep
                )
            )

    gradients = sum(member.grad.nbytes for chunk_group in chunk_groups for member, _ in chunk_group.members)
    momenta = sum(2 * chunk_group.momentum.nbytes for chunk_group in chunk_groups)
    return Work(
        run, gradients + momenta + sum(12 * chunk_group.chunks * chunk_group.key.keep for chunk_group in chunk_groups)
    )


def apply_work(chunk_groups: list[ChunkGroup], found: list[tuple[Tensor, Tensor]], world_size: int) -> Work:
    """Applies all chunk groups, as if every rank had sent what this one found."""
    sent = []
    for positions, values in found:
        levels = values.sign().to(torch.int64).expand(world_size, *values.shape).contiguous()
        codes = torch.full((world_size, len(values)), 2032, device=values.device)
        sent.append((positions.expand(world_size, *positions.shape).contiguous(), levels, codes))

    def run() -> None:
        for chunk_group, coefficients in zip(chunk_groups, sent, strict=True):
            members, chunkings = zip(*chunk_group.members, strict=True)
            parameters = [member.detach() for member in members]
            steps = Steps(*coefficients, chunk_group.inverse_bases, 1, "senders")
            triton_apply.apply(parameters, chunkings, steps, LR, weight_decay=0.1)

    parameters = sum(2 * member.nbytes for chunk_group in chunk_groups for member, _ in chunk_group.members)
    return Work(run, parameters + sum(part.nbytes for parts in sent for part in parts))


def copy_work(size: int, device: torch.device) -> Work:
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return Work(lambda: target.copy_(source), 2 * size)


def seconds(works: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each work, timed in turn by the device's own clock."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 3):
        for name, work in works.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work.run()
            stop.record()
            stop.synchronize()
            if number >= 3:  # the first rounds compile, and fill tables
                times[name].append(start.elapsed_time(stop) / 1000)
    return times


def measure(preset: str, dtype: torch.dtype, world_size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Returns, for each work: median and range of seconds, bytes, bytes a second, and their ratio to a copy's."""
    device = torch.device("cuda")
    shapes = of_config(TrainConfig(preset=preset)).shapes
    parameters = [Parameter(0.02 * torch.randn(shape, device=device).to(dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    chunk_groups = build(demopt.DeMo(parameters, lr=LR, values="sign").param_groups)
    found: list[tuple[Tensor, Tensor]] = []
    extract = extract_work(chunk_groups, found)
    extract.run()
    adamw = torch.optim.AdamW(parameters, lr=LR, fused=True)
    works = {
        "copy": copy_work(1 << 30, device),
        "extract": extract,
        "apply": apply_work(chunk_groups, found, world_size),
        "AdamW, fused": Work(adamw.step, 7 * sum(parameter.nbytes for parameter in parameters)),
    }
    times = seconds(works, rounds)
    report = {}
    for name, work in works.items():
        median = statistics.median(times[name])
        rate = work.bytes / median
        report[name] = {"seconds": median, "least": min(times[name]), "most": max(times[name]), "bytes": work.bytes}
        report[name] |= {"bytes_per_second": rate, "of_copy": rate / report["copy"].get("bytes_per_second", rate)}
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["124m", "demo-300m", "demo-1b"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--world", type=int, default=1, help="ranks whose coefficients are applied")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("kernel_bandwidth needs an NVIDIA GPU, and torch finds none here", file=sys.stderr)
        return 2
    import triton

    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(["python", "benchmarks/kernel_bandwidth.py", *sys.argv[1:]]),
        "precision": {"extract": triton_extract.PRECISION, "apply": triton_apply.PRECISION},
        "results": {},
    }
    for preset in arguments.presets:
        report = measure(preset, getattr(torch, arguments.dtype), arguments.world_size, arguments.rounds)
        record["results"][preset] = report
        for name, line in report.items():
            rate, share = line["bytes_per_second"] / 1e9, line["of_copy"]
            print(f"{preset:10} {name:13} {1e3 * line['seconds']:8.3f} ms  {rate:7.0f} GB/s  {share:5.0%} of copy")
        torch.cuda.empty_cache()
    path = RESULTS / f"kernel_bandwidth_{arguments.dtype}_w{arguments.world_size}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
