"""Bytes that two ranks send each other in a step, in each framework, counted by the kernel on their loopback interface.

    python benchmarks/frameworks.py                 # all cases; needs root, for a network namespace of their own
    python benchmarks/frameworks.py trainer ddp     # these

A case is trained as users of the framework would, and once more with demopt's integration. The model's gradients are
264,448 bytes. Counted are the frames on the interface, of both ranks together, headers and acknowledgements with them:
the mean of 20 steps. Docs: docs/integrations.md.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

import demopt

SKIPPED, STEPS = 5, 25  # the first steps: handshakes, and what frameworks exchange once
FILE = Path(__file__).absolute()


def count(stop: bool) -> None:
    """Reads the interface after each step of a DeMo or LocalDeMo from now on; may end the process after the last."""
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


def parts(**settings: Any) -> tuple[nn.Module, torch.optim.Optimizer, torch.utils.data.Dataset[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
    if settings.pop("local", False):
        optimizer: torch.optim.Optimizer = demopt.LocalDeMo(torch.optim.AdamW(model.parameters()), **settings)
    else:
        optimizer = demopt.DeMo(model.parameters(), lr=1e-3, **settings)
    return model, optimizer, torch.utils.data.TensorDataset(torch.randn(2 * STEPS * 8, 64))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x).square().mean()


def loop(wrap: str = "", **settings: Any) -> None:
    model, optimizer, data = parts(**settings)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    if wrap:
        model = DistributedDataParallel(model)
    if wrap == "unsync":
        demopt.unsync(model)
    for step in range(STEPS):
        x = torch.stack([data[16 * step + 8 * rank + i][0] for i in range(8)])
        optimizer.zero_grad()
        loss_of(model, x).backward()
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

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer, self.data = parts(**settings)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
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


def titan(ours: bool, *options: str) -> None:
    """torchtitan's debug model on one shard a replica, until the example would save."""
    import demopt.parallel

    if not ours:
        demopt.parallel.unsync = lambda model: model  # before demopt.integrations.torchtitan takes it
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["titan.py", "--steps", str(2 * STEPS), "--out", folder, *options]
        runpy.run_path(str(FILE.parents[1] / "examples/titan.py"), run_name="__main__")


CASES: dict[str, Callable[[], Any]] = {
    "loop": loop,
    "loop, LocalDeMo": lambda: loop(local=True),
    "DDP": lambda: loop("ddp"),
    "DDP, unsync": lambda: loop("unsync"),
    "DDP, unsync, overlap": lambda: loop("unsync", overlap=2),
    "DDP, unsync, LocalDeMo": lambda: loop("unsync", local=True),
    "Trainer": lambda: trainer(ours=False),
    "Trainer, DeMoCallback": lambda: trainer(ours=True),
    "Trainer, DeMoCallback, LocalDeMo": lambda: trainer(ours=True, local=True),
    "accelerate": lambda: accelerate(ours=False),
    "accelerate, unsync": lambda: accelerate(ours=True),
    "accelerate, unsync, LocalDeMo": lambda: accelerate(ours=True, local=True),
    "Lightning": lambda: lightning(ours=False),
    "Lightning, DeMoStrategy": lambda: lightning(ours=True),
    "Lightning, DeMoStrategy, LocalDeMo": lambda: lightning(ours=True, local=True),
    "torchtitan": lambda: titan(ours=False),
    "torchtitan, parallelize": lambda: titan(ours=True),
    "torchtitan, parallelize, LocalDeMo": lambda: titan(True, "--local-demo"),
}


def measure(name: str) -> str:
    """Runs a case on two ranks in a network namespace; bytes a step, or how it failed."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 {FILE} --rank '{name}'"
        environment = os.environ | {"WIRE": f"{folder}/bytes", "OMP_NUM_THREADS": "1"}
        command = ["unshare", "--net", "sh", "-c", f"ip link set lo up && exec {ranks}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "Error" in line]
            return f"failed: {errors[0] if errors else done.stderr[-300:]}"
        warned = " (warns: bit-identical gradients)" if "bit-identical" in done.stderr else ""
        return f"{json.loads(Path(folder, 'bytes').read_text()):,.0f}{warned}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="words that a case's name has; none: all cases")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        count(stop="torchtitan" in args.rank)
        CASES[args.rank]()
    else:
        for name in CASES:
            if not args.cases or any(word.lower() in name.lower() for word in args.cases):
                print(f"{name:38} {measure(name)}", flush=True)
