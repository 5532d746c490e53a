"""The flags and the output of `demopt plan`. MB are 10^6 bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demopt.train.config import Given, InputError, TrainConfig, assemble, config_of, resolve

if TYPE_CHECKING:
    from rich.console import Console

    from demopt.plan.costs import Case, Plan

OPTIMIZER_SHARE = 0.1  # of a step: Muon's matrix products relative to some 30,000 tokens per worker
MUCH = 0.3  # of a step in the exchange
CARD_BYTES = 24e9
NCCL = ", as measured; nccl waits for fewer round trips (--backend nccl)"
GLOO = ": computed from its rings, not measured"
WORKERS = tuple(2**power for power in range(1, 11))


def plan(
    preset: Annotated[str | None, typer.Option(help="A preset of demopt train.")] = None,
    config: Annotated[Path | None, typer.Option(help="Or a run's config file.")] = None,
    model: Annotated[str | None, typer.Option(help="Or a model's folder.")] = None,
    lora: Annotated[int | None, typer.Option(help="Rank of adapters on --model.", min=1)] = None,
    params: Annotated[str | None, typer.Option(help="Or a number of parameters, such as 300M.")] = None,
    sync_every: Annotated[int | None, typer.Option(help="LocalDeMo's steps per round.", min=1)] = None,
    workers: Annotated[list[int] | None, typer.Option(help="Repeatable. Default: 2 to 1024.", min=2, max=2**16)] = None,
    bandwidth: Annotated[str | None, typer.Option(help="100Mbit, 1Gbit: adds seconds and a verdict.")] = None,
    latency: Annotated[float, typer.Option(help="Round trip in ms, as ping shows it.", min=0, max=1e6)] = 0.0,
    step_seconds: Annotated[float, typer.Option(help="A worker's step without the network.", min=0, max=1e9)] = 0.0,
    optimizer_seconds: Annotated[
        float | None, typer.Option(help="Added to it by Muon and the codec. Default: a tenth.", min=0, max=1e9)
    ] = None,
    backend: Annotated[str, typer.Option(help="gloo or nccl.")] = "gloo",
) -> int:
    """Bytes, seconds and memory of a training step by number of workers, and the verdict. Nothing is run."""
    if len([given for given in (preset, config, model, params) if given is not None]) != 1:
        raise InputError("give one of --preset, --config, --model and --params")
    if backend not in ("gloo", "nccl"):
        raise InputError(f"--backend is {backend!r}; give gloo or nccl")
    if bandwidth is None and (latency or step_seconds or optimizer_seconds):
        raise InputError("--latency and seconds need --bandwidth too, such as 1Gbit")
    given: Given = {"preset": preset, "model": model, "lora": lora}
    train = assemble({}, config) if config else config_of({k: v for k, v in given.items() if v is not None})
    demo, local = _with_optimizer(train, "demo"), _with_optimizer(train, "local")
    local = dataclasses.replace(local, sync_every=sync_every or local.sync_every)
    from demopt.plan.costs import Case, Link, bits_of, make_plan, of_config, of_count

    link = Link(bits_of(bandwidth), latency / 1e3, backend) if bandwidth else None
    try:
        made = make_plan(of_count(params) if params else of_config(train), demo, local, workers or WORKERS)
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from None
    added = OPTIMIZER_SHARE * step_seconds if optimizer_seconds is None else optimizer_seconds
    _show(made, Case(made, link, step_seconds, added) if link else None)
    return 0


def _with_optimizer(train: TrainConfig, optimizer: str) -> TrainConfig:
    """Returns the settings with this optimizer; its defaults if the config is of another one."""
    other: Given = {} if train.optimizer == optimizer else {"optimizer": optimizer, "top_k": None, "momentum": None}
    return resolve(config_of({**train.record(), **other}))


def _show(plan: Plan, case: Case | None) -> None:
    """Prints the verdict for the first number of workers, and tables."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from demopt.plan.costs import digits, verdict

    console, model, local = Console(highlight=False), plan.model, plan.local
    sizes = "" if str(model.parameters) in model.name.replace(",", "") else f": {model.parameters:,} parameters"
    console.print(f"{model.name}{sizes}")
    if case:
        console.print(verdict(case, next(iter(plan.calls))), style="bold")
        if case.compute:
            _alternatives(console, case)
    console.print(f"{plan.memory} (weights, gradients and optimizers in float32, per worker)")
    if plan.memory.total > CARD_BYTES:
        console.print(
            "That is more than a 24 GB card has: demopt train --lora, or LocalDeMo over FSDP2 inside each box "
            "(docs/parallelism.md)."
        )
    methods = list(next(iter(plan.calls.values())))
    tables: dict[str, Callable[[str, int], float]] = {
        "MB received per step": lambda method, workers: plan.received_bytes(method, workers) / 1e6
    }
    if case:
        tables["seconds per step"] = case.seconds
    for title, figure in tables.items():
        table = Table(title=f"\n{title}", box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
        for heading in ("workers", *methods):
            table.add_column(heading, justify="right", no_wrap=True)
        for workers in plan.calls:
            table.add_row(f"{workers:,}", *(digits(figure(method, workers)) for method in methods))
        console.print(table)
    demo_kept, local_kept = plan.kept
    sent = f"top-k {local.top_k}" if local.top_k else "signs of all"
    demo_memory, local_memory = (digits(each / 1e6) for each in plan.memory_bytes)
    demo_bits, local_bits = (f"{plan.message_bits(method):.3g}" for method in ("DeMo", "LocalDeMo"))
    console.print(
        f"\nAs many MB are sent. Bits per parameter and step, in a worker's message: LocalDeMo {local_bits}, DeMo "
        f"{demo_bits}, DDP 32 or 16 (its ring sends up to twice that).\n"
        f"DeMo: top-k {plan.demo.top_k}, {demo_kept:,} coefficients per message; {demo_memory} MB of memory per "
        f"worker for momentum and update rule ({plan.demo.update}).\n"
        f"LocalDeMo: {sent}, {local_kept:,} coefficients per message, a round every {local.sync_every} "
        f"steps; {local_memory} MB for global weights and error, in addition to the inner optimizers.\n"
        f"Values: {local.values}. DDP: a ring all-reduce of the gradients, during backward."
    )
    if case:
        backend = case.link.backend
        console.print(f"Seconds are at {backend}'s pace{NCCL if backend == 'gloo' else GLOO}.")
    else:
        console.print("For seconds and a verdict give --bandwidth, --latency and --step-seconds.", style="dim")


def _alternatives(console: Console, case: Case) -> None:
    """Prints what 10,000 steps take, and, where the exchange is much of a step, what takes less and at which loss."""
    from demopt.plan.costs import LOSS_ABOVE_DDP, digits
    from demopt.train.screen import duration

    plan, workers = case.plan, next(iter(case.plan.calls))
    ours, ddp = case.seconds("LocalDeMo", workers), case.seconds("DDP bf16", workers)
    share = 1 - (case.compute + case.optimizer) / ours
    console.print(f"10,000 steps: {duration(1e4 * ours)}, with DDP {duration(1e4 * ddp)}; their losses differ.")
    if share < MUCH:
        return
    rows = []
    for (method, every), loss in LOSS_ABOVE_DDP.items():
        if method == "DeMo" or every > plan.local.sync_every:
            rarely = dataclasses.replace(plan, local=dataclasses.replace(plan.local, sync_every=every))
            flags = "--optimizer demo" if method == "DeMo" else f"--sync-every {every}"
            rows.append((dataclasses.replace(case, plan=rarely).seconds(method, workers), flags, loss))
    console.print(f"Exchange is {share:.0%} of a step. It takes less with")
    for seconds, flags, loss in rows:
        if seconds < ours:
            console.print(f"  {flags}: {digits(seconds)} s, 10,000 steps {duration(1e4 * seconds)}; loss +{loss:.3f}")
    console.print(
        "or several GPUs per box as one worker (FSDP2). Loss above DDP's, of small models after 1,000 steps; the "
        f"default's is +{LOSS_ABOVE_DDP['LocalDeMo', 5]:.3f} (docs/results.md)."
    )
