"""Bytes per step on the wire, by framework and by parallelism, counted by the kernel on a network namespace's loopback.

    sudo python -m laboratory.wire_bytes                 # all cases
    sudo python -m laboratory.wire_bytes trainer fsdp2   # these

A case trains as users of the framework would, or with demopt's integration. The model's gradients are 264,448 bytes.
Counted are the frames of all ranks together, headers and acknowledgements included: the mean of 20 steps.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

import demopt

SKIPPED, STEPS = 5, 25  # the first steps: handshakes, and exchanges that frameworks make once
ROOT = Path(__file__).resolve().parents[1]


def count(stop: bool) -> None:
    """Reads the interface after each step of a DeMo or LocalDeMo from now on; `stop`: ends the process at the last."""
    seen: list[int] = []

    def read(optimizer: Any, *_: Any) -> None:
        if type(optimizer) in (demopt.DeMo, demopt.LocalDeMo):
            (line,) = [
                line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")
            ]
            seen.append(int(line.split(":")[1].split()[0]))
            if len(seen) == STEPS:
                if os.environ["RANK"] == "0":
                    Path(os.environ["WIRE"]).write_text(json.dumps((seen[-1] - seen[SKIPPED - 1]) / (STEPS - SKIPPED)))
                if stop:
                    os._exit(0)

    register_optimizer_step_post_hook(read)


def parts(**settings: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
    if settings.pop("local", False):
        optimizer: torch.optim.Optimizer = demopt.LocalDeMo(torch.optim.AdamW(model.parameters()), **settings)
    else:
        optimizer = demopt.DeMo(model.parameters(), lr=1e-3, **settings)
    return model, optimizer, torch.utils.data.TensorDataset(torch.randn(4 * STEPS * 8, 64))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - x).square().mean()
    return loss


def loop(wrap: str = "", **settings: Any) -> None:
    """A loop in plain torch: wrap is "", ddp or unsync."""
    model, optimizer, data = parts(**settings)
    torch.distributed.init_process_group("gloo")
    if wrap:
        model = DistributedDataParallel(model)
    if wrap == "unsync":
        demopt.unsync(model)
    steps(model, optimizer, data)


def sharded(hybrid: bool, unsync: bool = False, muon: bool = False) -> None:
    """FSDP2 on nodes of two ranks: shards inside a node; hybrid: torch synchronizes the nodes too."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, torch.distributed.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model, _, data = parts()
    fully_shard(model, mesh=mesh if hybrid else mesh["shard"])
    if unsync:
        demopt.unsync(model)
    parameters = demopt.muon_groups(model, lr=0.02) if muon else model.parameters()
    steps(model, demopt.DeMo(parameters, process_group=mesh["replicate"]), data)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> None:
    """Takes the steps, each rank on other rows."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    for step in range(STEPS):
        first = 8 * (ranks * step + rank)
        optimizer.zero_grad()
        loss_of(model, torch.stack([data[first + row][0] for row in range(8)])).backward()
        optimizer.step()


def accelerate(ours: bool, **settings: Any) -> None:
    from accelerate import Accelerator

    from demopt.integrations.accelerate import register

    model, optimizer, data = parts(**settings)
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
    if ours:
        demopt.unsync(model)
        register(accelerator, optimizer)
    for (x,) in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, x))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def trainer(ours: bool, **settings: Any) -> None:
    from transformers import Trainer, TrainingArguments

    from demopt.integrations.transformers import DeMoCallback

    class Wrapped(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            del labels
            return {"loss": loss_of(self.model, x)}

    model, optimizer, data = parts(**settings)
    rows = [{"x": x, "labels": torch.zeros(1)} for (x,) in data]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=8, report_to="none", disable_tqdm=True, use_cpu=True,
            save_strategy="no", logging_strategy="no",
        )  # fmt: skip
        callbacks = [DeMoCallback()] if ours else []
        Trainer(
            Wrapped(model), arguments, train_dataset=rows, optimizers=(optimizer, None), callbacks=callbacks
        ).train()


def lightning(ours: bool, **settings: Any) -> None:
    import lightning.pytorch as lightning

    from demopt.integrations.lightning import DeMoStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer, self.data = parts(**settings)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            del number
            return loss_of(self.model, batch[0])

        def configure_optimizers(self) -> Any:
            return self.optimizer

    module = Module()
    strategy = DeMoStrategy() if ours else "ddp"
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    fit = lightning.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=STEPS, **quiet).fit
    fit(module, torch.utils.data.DataLoader(module.data, batch_size=8))


def titan(*options: str) -> None:
    """torchtitan's debug model on one shard per replica, until the example would save."""
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["titan.py", "--steps", str(2 * STEPS), "--out", folder, *options]
        runpy.run_path(str(ROOT / "examples/titan.py"), run_name="__main__")


@dataclass(frozen=True)
class Case:
    """A way to train, and the number of ranks."""

    train: Callable[[], None]
    ranks: int = 2
    stop: bool = False  # the process at the last step


CASES = {
    "loop": Case(loop),
    "loop, 4 ranks": Case(loop, 4),
    "loop, LocalDeMo": Case(lambda: loop(local=True)),
    "DDP": Case(lambda: loop("ddp")),
    "DDP, unsync": Case(lambda: loop("unsync")),
    "DDP, unsync, LocalDeMo": Case(lambda: loop("unsync", local=True)),
    "FSDP2 inside a node": Case(lambda: sharded(hybrid=False), 4),
    "FSDP2 inside a node, muon": Case(lambda: sharded(hybrid=False, muon=True), 4),
    "HSDP": Case(lambda: sharded(hybrid=True), 4),
    "HSDP, unsync": Case(lambda: sharded(hybrid=True, unsync=True), 4),
    "Trainer": Case(lambda: trainer(ours=False)),
    "Trainer, DeMoCallback": Case(lambda: trainer(ours=True)),
    "Trainer, DeMoCallback, LocalDeMo": Case(lambda: trainer(ours=True, local=True)),
    "accelerate": Case(lambda: accelerate(ours=False)),
    "accelerate, unsync": Case(lambda: accelerate(ours=True)),
    "accelerate, unsync, LocalDeMo": Case(lambda: accelerate(ours=True, local=True)),
    "Lightning": Case(lambda: lightning(ours=False)),
    "Lightning, DeMoStrategy": Case(lambda: lightning(ours=True)),
    "Lightning, DeMoStrategy, LocalDeMo": Case(lambda: lightning(ours=True, local=True)),
    "torchtitan, parallelize": Case(lambda: titan("--demo"), stop=True),
    "torchtitan, parallelize, LocalDeMo": Case(titan, stop=True),
}


def measure(name: str) -> str:
    """Runs a case on its ranks in a network namespace; returns its bytes per step, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        launch = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node {CASES[name].ranks}"
        command = f"ip link set lo up && exec {launch} -m laboratory.wire_bytes --rank '{name}'"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "WIRE": f"{folder}/bytes", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        words = ["unshare", "--net", "sh", "-c", command]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "Error" in line]
            return f"failed: {errors[0] if errors else done.stderr[-300:]}"
        warned = " (warns: bit-identical gradients)" if "bit-identical" in done.stderr else ""
        return f"{json.loads(Path(folder, 'bytes').read_text()):,.0f}{warned}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="words in the names of the cases; none: all cases")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        count(CASES[args.rank].stop)
        CASES[args.rank].train()
    else:
        for name in CASES:
            if not args.cases or any(word.lower() in name.lower() for word in args.cases):
                print(f"{name:38} {measure(name)}", flush=True)
