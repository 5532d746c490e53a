"""The flags and the output of `demopt plan`. MB are 10^6 bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demopt.train.config import Given, InputError, TrainConfig, assemble, config_of, resolve

if TYPE_CHECKING:
    from demopt.plan.costs import Plan
    from demopt.plan.network import Link

OPTIMIZER_SHARE = 0.1  # of a step: Muon's matrix products relative to some 30,000 tokens per worker
WORKERS = tuple(2**power for power in range(1, 11))


def plan(
    preset: Annotated[str | None, typer.Option(help="A preset of demopt train.")] = None,
    config: Annotated[Path | None, typer.Option(help="Or a run's config file.")] = None,
    params: Annotated[str | None, typer.Option(help="Or a number of parameters, such as 300M.")] = None,
    sync_every: Annotated[int | None, typer.Option(help="LocalDeMo's steps per round.", min=1)] = None,
    workers: Annotated[list[int] | None, typer.Option(help="Repeatable. Default: 2 to 1024.", min=2, max=2**16)] = None,
    bandwidth: Annotated[str | None, typer.Option(help="100Mbit, 1Gbit: adds seconds and a verdict.")] = None,
    latency: Annotated[float, typer.Option(help="Round trip in ms, as ping shows it.", min=0, max=1e6)] = 0.0,
    step_seconds: Annotated[float, typer.Option(help="A worker's step without the network.", min=0, max=1e9)] = 0.0,
    optimizer_seconds: Annotated[
        float | None, typer.Option(help="Added to it by Muon and the codec. Default: a tenth.", min=0, max=1e9)
    ] = None,
) -> int:
    """Bytes, seconds and memory of a training step by number of workers, and the verdict. Nothing is run."""
    if len([given for given in (preset, config, params) if given is not None]) != 1:
        raise InputError("give one of --preset, --config and --params")
    if bandwidth is None and (latency or step_seconds or optimizer_seconds):
        raise InputError("--latency and seconds need --bandwidth too, such as 1Gbit")
    train = assemble({}, config) if config else config_of({"preset": preset} if preset else {})
    demo, local = _with_optimizer(train, "demo"), _with_optimizer(train, "local")
    local = dataclasses.replace(local, sync_every=sync_every or local.sync_every)
    from demopt.plan.costs import make_plan, of_config, of_count
    from demopt.plan.network import Link
    from demopt.plan.network import bandwidth as bits_of

    link = Link(bits_of(bandwidth), latency / 1e3) if bandwidth else None
    try:
        made = make_plan(of_count(params) if params else of_config(train), demo, local, workers or WORKERS)
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from None
    _show(made, link, step_seconds, OPTIMIZER_SHARE * step_seconds if optimizer_seconds is None else optimizer_seconds)
    return 0


def _with_optimizer(train: TrainConfig, optimizer: str) -> TrainConfig:
    """Returns the settings with this optimizer; its defaults if the config is of another one."""
    other: Given = {} if train.optimizer == optimizer else {"optimizer": optimizer, "top_k": None, "momentum": None}
    return resolve(config_of({**train.record(), **other}))


def _show(plan: Plan, link: Link | None, compute: float, optimizer: float) -> None:
    """Prints one table, and the verdict for the first number of workers. `optimizer`: the seconds that demopt adds."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from demopt.plan.network import digits, step_seconds, verdict

    console, model, local = Console(highlight=False), plan.model, plan.local
    sizes = "" if str(model.parameters) in model.name.replace(",", "") else f": {model.parameters:,} parameters"
    console.print(f"{model.name}{sizes}")
    if link:
        console.print(verdict(plan, link, compute, optimizer, next(iter(plan.calls))), style="bold")
    table = Table(title="\nper step", box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    methods = list(next(iter(plan.calls.values())))
    for unit in ("MB", "s") if link else ("MB",):
        for method in ("workers", *methods) if unit == "MB" else methods:
            table.add_column(method if method == "workers" else f"{method}\n{unit}", justify="right", no_wrap=True)
    for workers in plan.calls:
        figures = [plan.received_bytes(method, workers) / 1e6 for method in methods]
        if link:
            figures += [step_seconds(plan, link, compute, optimizer, method, workers) for method in methods]
        table.add_row(f"{workers:,}", *map(digits, figures))
    console.print(table)
    demo_kept, local_kept = plan.kept
    sent = f"top-k {local.top_k}" if local.top_k else "signs of all"
    demo_memory, local_memory = (digits(each / 1e6) for each in plan.memory_bytes)
    console.print(
        f"\nMB received, as many are sent; s with --step-seconds and the optimizer's.\n"
        f"DeMo: top-k {plan.demo.top_k}, {demo_kept:,} coefficients per message; {demo_memory} MB of memory per "
        f"worker for momentum and update rule ({plan.demo.update}).\n"
        f"LocalDeMo: {sent}, {local_kept:,} coefficients per message, a round every {local.sync_every} "
        f"steps; {local_memory} MB for global weights and error, in addition to the inner optimizers.\n"
        f"Values: {local.values}. DDP: a ring all-reduce of the gradients in float32 or bfloat16."
    )
    if not link:
        console.print("For seconds and a verdict give --bandwidth, --latency and --step-seconds.", style="dim")
