"""The flags and the output of `demopt plan`. MB are 10^6 bytes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demopt.train.config import Given, InputError, TrainConfig, assemble, config_of, resolve

if TYPE_CHECKING:
    from demopt.plan.costs import Model, Plan
    from demopt.plan.network import Link, Verdict
    from demopt.plan.store import Day

MODEL, OPTIMIZER, NETWORK = "Model (one of these)", "Optimizers", "Network"
OPTIMIZER_SHARE = 0.1  # of a step: Muon's matrix products relative to some 30,000 tokens per worker
MOMENTS_BYTES = 4  # per parameter in a checkpoint of a folder: at most the two moments of AdamW, in bfloat16
WORKERS = tuple(2**power for power in range(1, 11))
MOST_WORKERS = 2**16


def plan(
    preset: Annotated[str | None, typer.Option(help="A preset of demopt train.", rich_help_panel=MODEL)] = None,
    config: Annotated[Path | None, typer.Option(help="A run's config file.", rich_help_panel=MODEL)] = None,
    params: Annotated[str | None, typer.Option(help="A number, such as 300M.", rich_help_panel=MODEL)] = None,
    shapes: Annotated[Path | None, typer.Option(help="A safetensors file.", rich_help_panel=MODEL)] = None,
    top_k: Annotated[
        int | None, typer.Option(help="DeMo's coefficients per full chunk.", min=1, rich_help_panel=OPTIMIZER)
    ] = None,
    local_top_k: Annotated[
        int | None,
        typer.Option(help="LocalDeMo's, per round. Default: the signs of all.", min=1, rich_help_panel=OPTIMIZER),
    ] = None,
    sync_every: Annotated[
        int | None, typer.Option(help="LocalDeMo's steps per round.", min=1, rich_help_panel=OPTIMIZER)
    ] = None,
    values: Annotated[str | None, typer.Option(help="Values on the wire.", rich_help_panel=OPTIMIZER)] = None,
    update: Annotated[
        str | None, typer.Option(help="DeMo's update rule; signum allows route owner.", rich_help_panel=OPTIMIZER)
    ] = None,
    workers: Annotated[
        list[int] | None,
        typer.Option(help="Repeatable. Default: 2 to 1024.", min=2, max=MOST_WORKERS, rich_help_panel=NETWORK),
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="100Mbit, 1Gbit: adds seconds and a verdict.", rich_help_panel=NETWORK)
    ] = None,
    latency: Annotated[
        float, typer.Option(help="Round trip in ms, as ping shows it.", min=0, max=1e6, rich_help_panel=NETWORK)
    ] = 0.0,
    step_seconds: Annotated[
        float, typer.Option(help="A worker's step without the network.", min=0, max=1e9, rich_help_panel=NETWORK)
    ] = 0.0,
    optimizer_seconds: Annotated[
        float | None,
        typer.Option(
            help="Added to it by Muon and the codec. Default: a tenth.", min=0, max=1e9, rich_help_panel=NETWORK
        ),
    ] = None,
    store_prices: Annotated[
        str | None,
        typer.Option(
            help="Per million writes, per million reads, per GB read, such as 5,0.4,0.09: adds a day of demopt train "
            "--run.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")] = False,
) -> int:
    """Bytes, seconds and memory of a training step by number of workers, and the verdict. Nothing is run."""
    if len([given for given in (preset, config, params, shapes) if given is not None]) != 1:
        raise InputError("give one of --preset, --config, --params and --shapes")
    if bandwidth is None and store_prices is None and (latency or step_seconds or optimizer_seconds):
        raise InputError("--latency and seconds need --bandwidth too, such as 1Gbit, or --store-prices")
    if store_prices is not None and not step_seconds:
        raise InputError("--store-prices needs --step-seconds too: they say how often workers meet")
    train = assemble({}, config) if config else config_of({"preset": preset} if preset else {})
    demo = _with_optimizer(train, "demo", top_k=top_k, values=values, update=update)
    local = _with_optimizer(train, "local", top_k=local_top_k, values=values, sync_every=sync_every)
    from demopt.plan.costs import make_plan
    from demopt.plan.network import Link, judge
    from demopt.plan.network import bandwidth as bits_of
    from demopt.plan.store import day, prices_of
    from demopt.train.method import FLOAT32_BYTES

    prices = prices_of(store_prices) if store_prices is not None else None
    link = Link(bits_of(bandwidth), latency / 1e3) if bandwidth else None
    model = _model(train, params, shapes)
    try:
        made = make_plan(model, demo, local, workers or WORKERS)
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from None
    more = OPTIMIZER_SHARE * step_seconds if optimizer_seconds is None else optimizer_seconds
    verdicts = [judge(made, link, step_seconds, more, count) for count in made.costs] if link else []
    compute = local.sync_every * (step_seconds + more)
    checkpoint = (FLOAT32_BYTES + MOMENTS_BYTES) * model.parameters
    days = {
        count: day(made.local_bytes, checkpoint, count, compute, latency / 1e3, local.checkpoint_every, prices)
        for count in made.costs
        if prices
    }
    if as_json:
        found = {"store_day": {count: dataclasses.asdict(each) for count, each in days.items()}} if days else {}
        print(json.dumps({**_data(made, link, verdicts), **found}))
    else:
        _show(made, link, verdicts)
        _show_days(days)
    return 0


def _with_optimizer(train: TrainConfig, optimizer: str, **flags: Any) -> TrainConfig:
    """Returns the settings with this optimizer: its defaults if the config is of another one, and the given flags."""
    other: Given = {} if train.optimizer == optimizer else {"optimizer": optimizer, "top_k": None, "momentum": None}
    given = {name: value for name, value in flags.items() if value is not None}
    return resolve(config_of({**train.record(), **other, **given}))


def _model(train: TrainConfig, params: str | None, shapes: Path | None) -> Model:
    from demopt.plan.costs import of_config, of_count, of_file

    if params is not None:
        return of_count(params)
    return of_config(train) if shapes is None else of_file(shapes)


def _data(plan: Plan, link: Link | None, verdicts: list[Verdict]) -> Given:
    """Returns the plan as plain data; with a link, every cost has its seconds, and there are verdicts."""
    data = dataclasses.asdict(plan)
    for workers, ways in plan.costs.items() if link else ():
        for name, cost in ways.items():
            assert link is not None
            data["costs"][workers][name]["seconds"] = link.seconds(cost.calls, workers)
    every = plan.local.sync_every
    data["verdicts"] = [{"sentence": each.sentence(every), **dataclasses.asdict(each)} for each in verdicts]
    return data


def _show(plan: Plan, link: Link | None, verdicts: list[Verdict]) -> None:
    from rich.console import Console

    console, model, local = Console(), plan.model, plan.local
    sizes = "" if str(model.parameters) in model.name.replace(",", "") else f": {model.parameters:,} parameters"
    console.print(f"{model.name}{sizes}", highlight=False)
    for verdict in verdicts[:1]:
        console.print(verdict.sentence(local.sync_every), highlight=False, style="bold")
    if verdicts:
        table = _table("\nseconds per step", "workers", "method", "compute", "optimizer", "network", "step")
        for verdict in verdicts:
            for way in verdict.ways:
                figures = (way.compute, way.optimizer, way.network, way.seconds)
                table.add_row(f"{verdict.workers:,}", way.name, *map(digits, figures))
        console.print(table)
    names = list(dict.fromkeys(name for ways in plan.costs.values() for name in ways))
    table = _table("\nMB received per step (* by route auto)", "workers", *names)
    for workers, ways in plan.costs.items():
        marks = {plan.auto[workers]: "*"}
        share = {"LocalDeMo": 1 / local.sync_every}
        cells = [
            digits(ways[name].received_bytes / 1e6 * share.get(name, 1)) + marks.get(name, "") if name in ways else "-"
            for name in names
        ]
        table.add_row(f"{workers:,}", *cells)
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
    if not link:
        console.print("For seconds and a verdict give --bandwidth, --latency and --step-seconds.", style="dim")


def _show_days(days: dict[int, Day]) -> None:
    from rich.console import Console

    if days:
        headings = ("workers", "rounds", "writes and lists", "reads", "GB written", "GB read", "money")
        table = _table("\na day of a run through a store (demopt train --run)", *headings)
        for workers, each in days.items():
            figures = (each.rounds, each.writes, each.reads, each.put_bytes / 1e9, each.read_bytes / 1e9, each.money)
            table.add_row(f"{workers:,}", *map(digits, figures))
        Console().print(table)


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
