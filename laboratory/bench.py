"""Seconds, memory and bytes of an optimizer step: DeMo and LocalDeMo beside AdamW and Muon, in turn in the same run.

    python -m laboratory.bench --workers 1 --workers 2 --out laboratory/results/bench.json
    python -m laboratory.bench --shapes quick --rounds 2             # does it run at all

All methods step the same parameters. In every round each takes one step; each round starts with another method. A
ratio is the median of the ratios within rounds, so slowdowns of a whole round cancel out: compare ratios between runs,
seconds only within one. A sample is the time on the slowest rank.

- DeMo is the default, signum. LocalDeMo wraps the same optimizers as "Muon and AdamW". It has two rows, a step with
  a round and one without; their difference over H is the cost of rounds per step.
- Gradients are normal noise, with a scale per parameter over two orders of magnitude, and new in every round: the
  momentum would be a multiple of constant ones. On each rank DeMo and LocalDeMo have different ones; AdamW and Muon
  have equal ones, as after an all-reduce, whose time is not included.
- Held: bytes that the optimizer keeps beyond parameters and gradients. Peak: bytes that a step allocates on top. Both
  come from the allocator's events, in steps that are not timed.
"""

import datetime
import itertools
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile

import demopt
from demopt.exchange import SingleRank

Shape = list[int]
LR = 1e-6  # so small that parameters hardly change
NEVER = 1 << 40  # steps per round, where steps without a round are timed
BASE = "AdamW"  # of the ratios
EMBEDDING = 16  # a matrix at least so many times as long as wide counts as one: shapes do not say which are
GPT2 = {"gpt2": (768, 12), "gpt2-1b": (1792, 24)}  # width, layers
POOL = (1 << 22) + 15  # elements of noise; odd, so that rows of parameters and of the pool do not line up


def shapes_of(name: str) -> list[Shape]:
    """Returns the shapes of GPT-2 with 124M or 1B parameters, a few small ones, or those of a JSON file of lists.

    Examples:
        >>> import math
        >>> sum(math.prod(shape) for shape in shapes_of("gpt2"))
        124439808
        >>> sum(math.prod(shape) for shape in shapes_of("gpt2-1b"))
        1017302272
    """
    if name == "quick":
        return [[512, 16], [128, 128], [300, 128], [128], [50]]
    if name not in GPT2:
        return [list(map(int, shape)) for shape in json.loads(Path(name).read_text(encoding="utf-8"))]
    d, layers = GPT2[name]
    norms, attention = [[d]] * 4, [[3 * d, d], [3 * d], [d, d], [d]]
    mlp = [[4 * d, d], [4 * d], [d, 4 * d], [d]]
    return [[50257, d], [1024, d], *layers * [*norms, *attention, *mlp], [d], [d]]


class Parameters(nn.Module):
    """Parameters of given shapes, embeddings as nn.Embedding, so that Muon leaves them out."""

    def __init__(self, shapes: list[Shape], device: torch.device) -> None:
        super().__init__()
        embeddings = [shape for shape in shapes if len(shape) == 2 and shape[0] >= EMBEDDING * shape[1]]
        rest = [shape for shape in shapes if shape not in embeddings]
        self.embeddings = nn.ModuleList(nn.Embedding(shape[0], shape[1], device=device) for shape in embeddings)
        self.rest = nn.ParameterList(0.02 * torch.randn(shape, device=device) for shape in rest)


class Gradients:
    """Sets the gradients of parameters, by rank and round, in buffers allocated once.

    Examples:
        >>> parameter = nn.Parameter(torch.zeros(2, 3))
        >>> gradients = Gradients([parameter], pool=101)
        >>> gradients.fill(rank=0, turn=0)
        >>> first = parameter.grad.clone()
        >>> gradients.fill(rank=0, turn=1)
        >>> bool((parameter.grad == first).all())
        False
    """

    def __init__(self, parameters: Sequence[nn.Parameter], pool: int = POOL) -> None:
        draw = torch.Generator().manual_seed(0)
        self._parameters = parameters
        self._pool = torch.randn(pool, generator=draw).to(parameters[0].device)
        self._scales = (10 ** (-2 * torch.rand(len(parameters), generator=draw) - 1)).tolist()
        self._buffers = [torch.empty_like(parameter) for parameter in parameters]

    def fill(self, rank: int, turn: int) -> None:
        """Sets the gradients of a rank in a round; the noise starts at another place of the pool each time."""
        place = (rank * 7919 + turn * 104_729) * 1_000_003 % len(self._pool)
        for parameter, buffer, scale in zip(self._parameters, self._buffers, self._scales, strict=True):
            flat, done = buffer.view(-1), 0
            while done < flat.numel():
                part = self._pool[place : place + flat.numel() - done]
                torch.mul(part, scale, out=flat[done : done + len(part)])
                done, place = done + len(part), (place + len(part)) % len(self._pool)
            parameter.grad = buffer


@dataclass(frozen=True)
class Method:
    """The optimizers of one row, which step one after the other."""

    make: Callable[[nn.Module, Any], list[torch.optim.Optimizer]]
    differs: bool  # whether the gradients differ between ranks


def _muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    return demopt.muon_adamw(model, lr=LR)


def _local(model: nn.Module, group: Any, sync_every: int) -> list[torch.optim.Optimizer]:
    # Fingerprints would differ: other methods move the same parameters.
    return [demopt.LocalDeMo(_muon(model), sync_every=sync_every, fingerprint_every=0, process_group=group)]


METHODS = {  # "no round" last: ranks compare their weights in the first step of DeMo, and in the first round
    "DeMo": Method(
        lambda model, group: [demopt.DeMo(model.parameters(), lr=LR, fingerprint_every=0, process_group=group)], True
    ),
    "LocalDeMo, round": Method(lambda model, group: _local(model, group, 1), True),
    "Muon and AdamW": Method(lambda model, _: _muon(model), False),
    BASE: Method(lambda model, _: [torch.optim.AdamW(model.parameters(), lr=LR, fused=True)], False),
    "LocalDeMo, no round": Method(lambda model, group: _local(model, group, NEVER), True),
}


@dataclass
class Row:
    """The measurements of one method at one number of workers. Seconds: of each round, on the slowest rank."""

    name: str
    seconds: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)  # of rank 0's steps, as its optimizer reports them
    held_bytes: int = 0
    peak_bytes: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def record(self, base: Sequence[float]) -> dict[str, Any]:
        """Returns the row with its median, and the median of its ratios to the base within rounds.

        Examples:
            >>> record = Row("a", seconds=[2.0, 40.0, 6.0]).record([1.0, 10.0, 3.0])
            >>> record["median"], record["ratio"]
            (6.0, 2.0)
        """
        ratios = [mine / theirs for mine, theirs in zip(self.seconds, base, strict=True)]
        return {**asdict(self), "median": statistics.median(self.seconds), "ratio": statistics.median(ratios)}


def measure(rank: int, world_size: int, shapes: list[Shape], rounds: int, warmup: int, kind: str, folder: str) -> None:
    """Measures all methods on one rank; rank 0 writes the rows into the folder."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler logs each of its starts
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    torch.set_num_threads(max(1, cores() // world_size))
    group: Any = SingleRank()
    if world_size > 1:
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{folder}/store-{world_size}", rank=rank, world_size=world_size
        )
        group = None
    torch.manual_seed(0)
    model = Parameters(shapes, device)
    gradients = Gradients(list(model.parameters()))
    rows = {name: Row(name) for name in METHODS}
    optimizers: dict[str, list[torch.optim.Optimizer]] = {}
    for told in ("the model's weights were changed", "another LocalDeMo takes steps"):
        warnings.filterwarnings("ignore", told)  # all methods step the same parameters

    def step(name: str) -> None:
        for optimizer in optimizers[name]:
            optimizer.step()

    def first(name: str, method: Method) -> None:
        optimizers[name] = method.make(model, group)
        step(name)

    for name, method in METHODS.items():
        gradients.fill(rank if method.differs else 0, turn=0)
        rows[name].held_bytes = allocated(lambda name=name, method=method: first(name, method), device)[1]  # type: ignore[misc]
        gradients.fill(rank if method.differs else 0, turn=1)
        rows[name].peak_bytes = allocated(lambda name=name: step(name), device)[0]  # type: ignore[misc]
    names = list(METHODS)
    for turn in range(warmup + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            gradients.fill(rank if METHODS[name].differs else 0, turn=2 + turn)
            seconds = _seconds(lambda name=name: step(name), world_size, device)  # type: ignore[misc]
            if turn >= warmup:
                _add(rows[name], seconds, optimizers[name][0])
    if rank == 0:
        records = [row.record(rows[BASE].seconds) for row in rows.values()]
        Path(folder, f"{world_size}.json").write_text(json.dumps(records), encoding="utf-8")
    if world_size > 1:
        dist.destroy_process_group()


def _seconds(work: Callable[[], None], world_size: int, device: torch.device) -> float:
    """Returns the seconds of `work` on the slowest rank; all ranks begin together."""
    if world_size > 1:
        dist.all_reduce(torch.zeros(1))
    wait(device)
    began = time.perf_counter()
    work()
    wait(device)
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    if world_size > 1:
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def _add(row: Row, seconds: float, optimizer: torch.optim.Optimizer) -> None:
    row.seconds.append(seconds)
    if isinstance(optimizer, demopt.DeMo | demopt.LocalDeMo):
        stats = optimizer.stats
        row.stages.append(stats.seconds)
        row.payload_bytes, row.sent_bytes = stats.payload_bytes, stats.sent_bytes
        row.received_bytes = stats.received_bytes


def wait(device: torch.device) -> None:
    """Waits until a GPU has done all launched work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(work: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Runs `work`; returns the peak of its allocations, and what is still held at the end, in bytes.

    Examples:
        >>> kept = []
        >>> allocated(lambda: kept.append(torch.zeros(1000) + torch.zeros(1000)), torch.device("cpu"))
        (12000, 4000)
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiler:
        work()
    events: Any = profiler.profiler.kineto_results.events()
    ours = [event for event in events if event.name() == "[memory]"]
    found = [(event.start_ns(), place, event.nbytes()) for place, event in enumerate(ours)]
    sums = list(itertools.accumulate((size for _, _, size in sorted(found)), initial=0))
    return max(sums), sums[-1]


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def table(runs: list[dict[str, Any]]) -> str:
    """Returns a Markdown table of all runs; 1 MB is 10^6 bytes."""
    lines = ["| workers | | ms | range | x AdamW | held MB | peak MB | payload MB |", "|---" * 8 + "|"]
    for run in runs:
        for row in run["methods"]:
            median, least, most = (1e3 * value for value in (row["median"], min(row["seconds"]), max(row["seconds"])))
            sizes = (f"{row[name] / 1e6:.3g}" for name in ("held_bytes", "peak_bytes", "payload_bytes"))
            times = f"{median:.1f} | {least:.1f} to {most:.1f} | {row['ratio']:.2f}"
            lines.append(f"| {run['workers']} | {row['name']} | {times} | {' | '.join(sizes)} |")
    return "\n".join(lines)


def bench(
    shapes: Annotated[
        str, typer.Option(help="gpt2 (124M parameters), gpt2-1b, quick, or a JSON file of shapes.")
    ] = "gpt2",
    workers: Annotated[list[int] | None, typer.Option(help="Processes on this machine. Repeatable. [1, 2]")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; each method takes a step in each.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds before, which do not count.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
    out: Annotated[Path | None, typer.Option(help="JSON file for every sample.")] = None,
) -> None:
    """Seconds, memory and bytes of an optimizer step, DeMo and LocalDeMo beside AdamW and Muon."""
    try:
        given = shapes_of(shapes)
    except (OSError, ValueError, TypeError) as error:
        raise typer.BadParameter(f"--shapes is {shapes!r}; give gpt2, gpt2-1b, quick or a JSON file: {error}") from None
    runs: list[dict[str, Any]] = []
    for count in workers or [1, 2]:
        load = os.getloadavg()[0]  # of other processes only
        with tempfile.TemporaryDirectory() as folder:
            spawn(measure, (count, given, rounds, warmup, device, folder), nprocs=count)
            rows = json.loads(Path(folder, f"{count}.json").read_text(encoding="utf-8"))
        runs.append({"workers": count, "threads": max(1, cores() // count), "load_average": load, "methods": rows})
    print(table(runs))
    if out is not None:
        name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
        facts = {
            "date": datetime.date.today().isoformat(),
            "command": shlex.join(["python", "-m", "laboratory.bench", *sys.argv[1:]]),
            "machine": f"{name}, {cores()} cores, {torch.backends.cpu.get_cpu_capability()}",
            "versions": {"demopt": demopt.__version__, "torch": torch.__version__},
            "shapes": Path(shapes).name,
            "parameters": sum(torch.Size(shape).numel() for shape in given),
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**facts, "runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(bench)
