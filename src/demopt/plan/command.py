"""The flags and the output of `demopt plan`. MB are 10^6 bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demopt.train.config import Given, InputError, TrainConfig, assemble, config_of, resolve

if TYPE_CHECKING:
    from demopt.plan.costs import Plan
    from demopt.plan.network import Verdict

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
    demo = _with_optimizer(train, "demo")
    local = _with_optimizer(train, "local", **({"sync_every": sync_every} if sync_every else {}))
    from demopt.plan.costs import make_plan, of_config, of_count
    from demopt.plan.network import Link, judge
    from demopt.plan.network import bandwidth as bits_of

    link = Link(bits_of(bandwidth), latency / 1e3) if bandwidth else None
    try:
        made = make_plan(of_count(params) if params else of_config(train), demo, local, workers or WORKERS)
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from None
    more = OPTIMIZER_SHARE * step_seconds if optimizer_seconds is None else optimizer_seconds
    _show(made, [judge(made, link, step_seconds, more, count) for count in made.costs] if link else [])
    return 0


def _with_optimizer(train: TrainConfig, optimizer: str, **more: Any) -> TrainConfig:
    """Returns the settings with this optimizer; its defaults if the config is of another one."""
    other: Given = {} if train.optimizer == optimizer else {"optimizer": optimizer, "top_k": None, "momentum": None}
    return resolve(config_of({**train.record(), **other, **more}))


def _show(plan: Plan, verdicts: list[Verdict]) -> None:
    from rich.console import Console

    console, model, local = Console(), plan.model, plan.local
    sizes = "" if str(model.parameters) in model.name.replace(",", "") else f": {model.parameters:,} parameters"
    console.print(f"{model.name}{sizes}", highlight=False)
    if verdicts:
        console.print(verdicts[0].sentence(), highlight=False, style="bold")
        table = _table("\nseconds per step", "workers", "method", "compute", "optimizer", "network", "step")
        for verdict in verdicts:
            for way in verdict.ways:
                figures = (way.compute, way.optimizer, way.network, way.seconds)
                table.add_row(f"{verdict.workers:,}", way.name, *map(digits, figures))
        console.print(table)
    names = list(next(iter(plan.costs.values())))
    table = _table("\nMB received per step", "workers", *names)
    for workers, ways in plan.costs.items():
        steps = {"LocalDeMo": local.sync_every}  # per message
        table.add_row(f"{workers:,}", *(digits(ways[name].received_bytes / 1e6 / steps.get(name, 1)) for name in names))
    console.print(table)
    demo_kept, local_kept = plan.kept
    sent = f"top-k {local.top_k}" if local.top_k else "signs of all"
    demo_memory, local_memory = (digits(each / 1e6) for each in plan.memory_bytes)
    console.print(
        f"\nDeMo: top-k {plan.demo.top_k}, {demo_kept:,} coefficients per message; {demo_memory} MB of memory per "
        f"worker for momentum and update rule ({plan.demo.update}).\n"
        f"LocalDeMo: {sent}, {local_kept:,} coefficients per message, a round every {local.sync_every} "
        f"steps; {local_memory} MB for global weights and error, in addition to the inner optimizers.\n"
        f"Values: {local.values}. DDP: a ring all-reduce of the gradients in float32 or bfloat16.",
        highlight=False,
    )
    if not verdicts:
        console.print("For seconds and a verdict give --bandwidth, --latency and --step-seconds.", style="dim")


def digits(number: float) -> str:
    """Formats with three significant digits, or with all digits before the point.

    Examples:
        >>> digits(1889.5), digits(99.96), digits(42.61), digits(0.04), digits(0.0)
        ('1,890', '100', '42.6', '0.0400', '0')
    """
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:#.3g}".rstrip(".") if number and math.isfinite(number) else "0"


def _table(title: str, *headings: str) -> Any:
    """Returns an empty table, narrow enough for a terminal of 80 columns."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading.replace(" ", "\n"), justify="left" if heading == "method" else "right", no_wrap=True)
    return table
