"""demopt on a GPU, in one command of under ten minutes: does it compute the right bits, and how long does it take?

    make gpu                                        # or: python -m laboratory.gpu
    python -m laboratory.gpu --device cpu --quick   # do the parts run at all: small, without a GPU

Writes laboratory/results/gpu-NAME.json, and prints a line for each part:

- bits: a rank on the GPU and one on the CPU train together, and must end with the same weights, bit for bit
- bench: a step at 124M and at 1B parameters: DeMo, LocalDeMo with and without a round, fused AdamW, torch's Muon;
  medians; 1B only where there is memory for all methods together, 57 GB
- nccl: the collectives of a group with one rank, and LocalDeMo's rounds in the background
- 300M: ten steps of the paper's 300M configuration with LocalDeMo, in tokens per second
"""

import datetime
import json
import math
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from torch import Tensor

import demopt
from demopt.exchange import Exchange, SingleRank, Threads
from laboratory import bench
from laboratory.training import TrainConfig, backward, build, resolve

RESULTS = Path(__file__).with_name("results")
NO_GPU = (
    "no GPU is here, so nothing was measured: torch.cuda.is_available() is False. Run it on a machine with an NVIDIA "
    "or AMD GPU and a torch for it, and please send the file that it writes (issue template: A GPU run)."
)
#: All methods of the bench together hold 49, and a step takes the rest on top: at 1B parameters 57 GB of a card's 80.
BYTES_PER_PARAMETER = 57
Part = Callable[[torch.device, bool], dict[str, Any]]


class ThroughHost(Exchange):
    """Threads that exchange messages on the host, as machines with unlike devices do."""

    def __init__(self, exchange: Exchange) -> None:
        self.rank, self.world_size, self._exchange = exchange.rank, exchange.world_size, exchange

    def all_gather(self, message_B: Tensor) -> Tensor:
        """Returns the messages of all ranks, on the host."""
        return self._exchange.all_gather(message_B.cpu())

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        """Returns the parts for this rank, on the host."""
        return self._exchange.all_to_all(parts_WB.cpu())

    def broadcast(self, data_B: Tensor, src: int) -> None:
        """Overwrites data with those of rank `src`."""
        data = data_B.cpu()
        self._exchange.broadcast(data, src)
        data_B.copy_(data)


def bits(device: torch.device, quick: bool, steps: int = 10) -> dict[str, Any]:
    """Trains a rank on the device and one on the CPU together; raises RuntimeError unless their weights are equal."""
    shapes = bench.shapes_of("quick") if quick else [[5003, 256], *4 * [[768, 256], [768], [256, 1024], [256]]]

    def train(exchange: Exchange, make: Callable[[list[Tensor], Exchange], Any], dtype: torch.dtype) -> list[Tensor]:
        here = device if exchange.rank == 0 else torch.device("cpu")
        draw = torch.Generator().manual_seed(0)
        params: list[Any] = [torch.nn.Parameter(torch.randn(s, generator=draw).to(here, dtype)) for s in shapes]
        optimizer = make(params, ThroughHost(exchange))
        draw.manual_seed(1 + exchange.rank)
        for _ in range(steps):
            for parameter in params:
                parameter.grad = torch.randn(parameter.shape, generator=draw).to(here, dtype)
            optimizer.step()
        return [parameter.detach().cpu() for parameter in params]

    def local(route: str) -> Callable[[list[Tensor], Exchange], Any]:
        return lambda params, exchange: demopt.LocalDeMo(
            torch.optim.AdamW(params), sync_every=2, route=route, process_group=exchange
        )

    cases: dict[str, tuple[Callable[[list[Tensor], Exchange], Any], torch.dtype]] = {
        "DeMo": (lambda params, exchange: demopt.DeMo(params, process_group=exchange), torch.float32),
        "DeMo, bfloat16": (lambda params, exchange: demopt.DeMo(params, process_group=exchange), torch.bfloat16),
        "LocalDeMo, gather": (local("gather"), torch.float32),
        "LocalDeMo, owner": (local("owner"), torch.float32),
    }
    differing = []
    for name, (make, dtype) in cases.items():
        threads = Threads(2, timeout=300.0)
        one, other = threads.run(lambda exchange, make=make, dtype=dtype: train(exchange, make, dtype))  # type: ignore[misc]
        threads.close()
        if not all(map(torch.equal, one, other)):
            differing.append(name)
    if differing:
        raise RuntimeError(f"weights differ between {device} and the CPU: {', '.join(differing)}")
    return {"equal": list(cases)}


def steps(device: torch.device, quick: bool) -> dict[str, Any]:
    """Measures a step of each method of `laboratory.bench` at both sizes, in milliseconds."""
    found: dict[str, Any] = {}
    for size, (shapes, rounds) in {"124M": ("gpt2", 20), "1B": ("gpt2-1b", 5)}.items():
        given = bench.shapes_of("quick" if quick else shapes)
        needed = BYTES_PER_PARAMETER * sum(math.prod(shape) for shape in given)
        free = needed  # on a CPU
        if device.type == "cuda":
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info(device)[0]
        if free < needed:
            found[size] = {"skipped": f"takes {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"}
            continue
        with tempfile.TemporaryDirectory() as folder:
            bench.measure(0, 1, given, 1 if quick else rounds, 1 if quick else 5, device.type, folder)
            rows = json.loads(Path(folder, "1.json").read_text(encoding="utf-8"))
        found[size] = {"milliseconds": {row["name"]: round(1e3 * row["median"], 3) for row in rows}, "rows": rows}
    return found


def _told(found: dict[str, Any]) -> str:
    """Returns the line for both sizes.

    Examples:
        >>> _told({"124M": {"milliseconds": {"DeMo": 4.2}}, "1B": {"skipped": "takes 58 GB, 24 GB are free"}})
        '124M: DeMo 4.2 ms; 1B: skipped, it takes 58 GB, 24 GB are free'
    """
    lines = []
    for size in ("124M", "1B"):
        times = found[size].get("milliseconds", {})
        measured = ", ".join(f"{name} {milliseconds} ms" for name, milliseconds in times.items())
        lines.append(f"{size}: {measured or 'skipped, it ' + found[size]['skipped']}")
    return "; ".join(lines)


def nccl(device: torch.device, quick: bool) -> dict[str, Any]:
    """Runs all collectives, and rounds in the background, in a group with one rank."""
    del quick
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        exchange = demopt.exchange.Collective()
        message = torch.arange(64, dtype=torch.uint8, device=device)
        rows = [exchange.all_gather(message)[0], exchange.all_to_all(message.view(1, -1))[0]]
        exchange.broadcast(message, 0)
        if not all(torch.equal(row, message) for row in rows):
            raise RuntimeError("a collective changed the message")
        parameter = torch.nn.Parameter(torch.ones(128, 128, device=device))
        optimizer = demopt.LocalDeMo(torch.optim.AdamW([parameter]), sync_every=1, delay=1)
        for _ in range(4):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        optimizer.flush()
        return {"backend": backend, "finite": bool(parameter.isfinite().all())}
    finally:
        dist.destroy_process_group()


def training(device: torch.device, quick: bool) -> dict[str, Any]:
    """Takes ten steps of the paper's 300M configuration on random tokens, one sequence of 2048 each."""
    preset = "tiny" if quick else "demo-300m"
    config = resolve(TrainConfig(preset=preset, optimizer="local", vocab_size=257 if quick else 50304, accumulate=1))
    model = build(config).to(device)
    inner = demopt.muon_adamw(model, lr=0.015)
    optimizer = demopt.LocalDeMo(inner, sync_every=5, process_group=SingleRank())
    draw, seconds, losses = np.random.default_rng(0), [], []
    assert config.sequence
    assert config.vocab_size
    for _ in range(10):
        began = time.perf_counter()
        windows = draw.integers(0, config.vocab_size, (1, config.sequence + 1))
        losses.append(backward(model, windows, device))
        optimizer.step()
        optimizer.zero_grad()
        bench.wait(device)
        seconds.append(time.perf_counter() - began)
    if not np.isfinite(losses).all():
        raise RuntimeError(f"the loss is not finite: {losses}")
    median = float(np.median(seconds))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()), "seconds": seconds, "losses": losses,
        "tokens_per_second": round(config.sequence / median),
    }  # fmt: skip


PARTS: dict[str, tuple[Part, Callable[[dict[str, Any]], str]]] = {
    "bits": (bits, lambda found: f"equal to the CPU's: {'; '.join(found['equal'])}"),
    "bench": (steps, _told),
    "nccl": (nccl, lambda found: f"{found['backend']}: all collectives, rounds in the background"),
    "300M": (training, lambda found: f"ten steps, {found['tokens_per_second']} tokens a second"),
}


def main(
    device: Annotated[str, typer.Option(help="The device that is tried.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Small: whether the parts run at all.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the result. [laboratory/results]")] = None,
) -> None:
    """Tries demopt on a GPU: bits, times, nccl, and ten steps of a 300M model."""
    if device == "cuda" and not torch.cuda.is_available():
        typer.echo(NO_GPU)
        raise typer.Exit(1)
    name = torch.cuda.get_device_name() if device == "cuda" else device
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "versions": {"demopt": demopt.__version__, "torch": torch.__version__, "cuda": torch.version.cuda},
        "quick": quick,
    }
    for part, (work, told) in PARTS.items():
        began = time.perf_counter()
        try:
            found[part] = work(torch.device(device), quick)
            line = told(found[part])
        except Exception as error:  # the other parts are still worth running
            found[part] = {"error": f"{type(error).__name__}: {error}"}
            line = f"FAILED: {found[part]['error'].splitlines()[0]}"
        found[part]["took"] = round(time.perf_counter() - began, 1)
        typer.echo(f"{part}: {line}")
    folder = RESULTS if out is None else out
    path = folder / f"gpu-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    typer.echo(f"{path} has all of it; please send it (issue template: A GPU run)")
    raise typer.Exit(int(any("error" in found[part] for part in PARTS)))


if __name__ == "__main__":
    typer.run(main)
