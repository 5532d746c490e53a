"""The flags of `demopt plan`."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from demopt.core.names import wanted
from demopt.plan import network
from demopt.plan.model import GPT2, Model, gpt2, of_config, of_count, of_file, of_shapes
from demopt.train.assemble import assemble
from demopt.train.config import InputError, TrainConfig
from demopt.train.model import PRESETS, resolve
from demopt.train.options import option

MODEL, OPTIMIZER, LOCAL, NETWORK = "Model (one of these)", "DeMo", "LocalDeMo", "Network"
OPTIMIZER_SHARE = 0.1  # of a step: Muon's matrix products beside those of some 30,000 tokens a worker
WORKERS = tuple(2**power for power in range(1, 11))
MOST = {"params": 10**11, "chunk": 4096, "workers": 2**16}  # larger plans would take too long


def plan(
    preset: Annotated[str | None, option("The model of a preset of demopt train, or gpt2.", MODEL)] = None,
    config: Annotated[Path | None, option("A config of demopt train, or a run's config.json.", MODEL)] = None,
    params: Annotated[str | None, option("A number, such as 300M: all in full chunks.", MODEL)] = None,
    shapes: Annotated[Path | None, option("A JSON list of shapes, or a safetensors file.", MODEL)] = None,
    top_k: Annotated[int | None, option("Coefficients kept of a full chunk.", OPTIMIZER)] = None,
    relay_top_k: Annotated[int | None, option("Those that route relay sends back.", OPTIMIZER)] = None,
    chunk: Annotated[int | None, option("Side of a chunk.", OPTIMIZER)] = None,
    values: Annotated[str | None, option("Values on the wire.", OPTIMIZER)] = None,
    transform: Annotated[str | None, option("dct, hadamard, random or identity.", OPTIMIZER)] = None,
    update: Annotated[str | None, option("signum, or one that route owner cannot carry.", OPTIMIZER)] = None,
    sync_every: Annotated[int | None, option("Steps from one round to the next.", LOCAL)] = None,
    local_top_k: Annotated[int | None, option("Coefficients kept of a full chunk in a round.", LOCAL)] = None,
    workers: Annotated[list[int] | None, option("Repeatable. Default: 2, 4, ..., 1024.", NETWORK)] = None,
    bandwidth: Annotated[str | None, option("Bits a second: 100Mbit, 1Gbit. Adds seconds a step.", NETWORK)] = None,
    latency: Annotated[float | None, option("Round trip in ms, as ping shows it; with --bandwidth.", NETWORK)] = None,
    step_seconds: Annotated[
        float | None, option("A worker's step without the network; with --bandwidth.", NETWORK)
    ] = None,
    optimizer_seconds: Annotated[
        float | None, option("What Muon and the codec add to it. Default: a tenth of it.", NETWORK)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")] = False,
) -> int:
    """Bytes, seconds and memory of a training step by route and number of workers. Nothing is run."""
    flags = {"top_k": top_k, "relay_top_k": relay_top_k, "chunk": chunk, "values": values}
    flags |= {"transform": transform, "update": update}
    train = _config(preset, config, params, shapes)
    settings = _settings(_demo(train).demo_settings() if config else _defaults(), flags)
    every, keep = _local(resolve(train) if config else None, sync_every, local_top_k)
    model = of_shapes(GPT2, gpt2()) if preset == GPT2 else _model(train, params, shapes, settings)
    if model.parameters > MOST["params"]:
        raise InputError(f"{model.parameters:,} parameters, wanted at most {MOST['params']:,}")
    link = _link(bandwidth, latency)
    compute = _compute(link, step_seconds, optimizer_seconds)
    counts = _workers(workers)
    from demopt.plan.costs import make_plan
    from demopt.plan.table import as_data, show, show_verdict
    from demopt.plan.verdict import Compute, judge

    try:
        made = make_plan(model, settings, counts, every, keep)
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from None
    verdicts = [judge(made, link, Compute(*compute), count) for count in counts] if link else []
    if as_json:
        print(json.dumps(as_data(made, link, verdicts)))
        return 0
    from rich.console import Console

    console = Console()
    if verdicts:
        show_verdict(verdicts, every, console)
    show(made, link, console)
    if verdicts and console.is_terminal:  # the beginning has scrolled away
        console.print(verdicts[0].sentence(every), highlight=False, style="bold")
    return 0


def _config(preset: str | None, config: Path | None, params: str | None, shapes: Path | None) -> TrainConfig:
    """Return the `demopt train` config of the model; InputError unless exactly one of the flags is given."""
    given = [value for value in (preset, config, params, shapes) if value is not None]
    if len(given) != 1:
        raise InputError(f"wanted one of --preset, --config, --params and --shapes, got {len(given) or 'none'}")
    return assemble({}, config) if config else TrainConfig(preset=_trained(preset))


def check_preset(preset: str) -> None:
    """Raise InputError unless it is a preset of demopt train, or gpt2.

    Examples:
        >>> check_preset("gpt2")
    """
    known = (*PRESETS, GPT2)
    if preset not in known:
        raise InputError(f"--preset is {wanted(preset, known)}")


def _trained(preset: str | None) -> str:
    if preset is None or preset == GPT2:
        return TrainConfig.preset
    check_preset(preset)
    return preset


def _demo(train: TrainConfig) -> TrainConfig:
    """Return the config with DeMo as its optimizer, at its own top_k and momentum if the optimizer is another one."""
    other = {} if train.optimizer == "demo" else {"optimizer": "demo", "top_k": None, "momentum": None}
    return resolve(replace(train, **other))  # type: ignore[arg-type]


def _local(train: TrainConfig | None, sync_every: int | None, top_k: int | None) -> tuple[int, int | None]:
    """Return LocalDeMo's sync_every and top_k: flags override the config; None: its default."""
    for name, value in (("sync-every", sync_every), ("local-top-k", top_k)):
        if value is not None and value < 1:
            raise InputError(f"--{name} is {value}, wanted at least 1")
    if train is not None and train.optimizer == "local":
        sync_every, top_k = sync_every or train.sync_every, top_k or train.top_k
    return sync_every or TrainConfig.sync_every, top_k


def _model(train: TrainConfig, params: str | None, shapes: Path | None, settings: dict[str, Any]) -> Model:
    if params is not None:
        return of_count(network.count(params), settings["chunk"])
    return of_config(train) if shapes is None else of_file(shapes)


def _defaults() -> dict[str, Any]:
    """Return DeMo's default hyper-parameters."""
    import torch

    from demopt import DeMo
    from demopt.exchange import SingleRank

    return DeMo([torch.nn.Parameter(torch.zeros(1))], process_group=SingleRank()).defaults


def _settings(known: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `DeMo` that affect a plan; flags override `known`."""
    from demopt.plan.costs import SHOWN

    for name in ("top_k", "relay_top_k", "chunk"):
        if flags[name] is not None and flags[name] < 1:
            raise InputError(f"--{name.replace('_', '-')} is {flags[name]}, wanted at least 1")
    if (flags["chunk"] or 0) > MOST["chunk"]:
        raise InputError(f"--chunk is {flags['chunk']}, wanted at most {MOST['chunk']}")
    kept = {name: value for name, value in known.items() if name in SHOWN}
    return kept | {name: value for name, value in flags.items() if value is not None}


def _workers(given: list[int] | None) -> tuple[int, ...]:
    for count in given or ():
        if not 2 <= count <= MOST["workers"]:
            raise InputError(f"--workers is {count}, wanted 2 to {MOST['workers']}")
    return tuple(given) if given else WORKERS


def _compute(link: network.Link | None, step: float | None, optimizer: float | None) -> tuple[float, float]:
    """Return the seconds of a worker's step, and what demopt's optimizer adds."""
    for name, seconds in (("step", step), ("optimizer", optimizer)):
        if seconds is None:
            continue
        if not (math.isfinite(seconds) and seconds >= 0):
            raise InputError(f"--{name}-seconds is {seconds}, wanted seconds, at least 0")
        if link is None:
            raise InputError(f"--{name}-seconds alone says nothing; give --bandwidth too, such as 1Gbit")
    step = step or 0.0
    return step, OPTIMIZER_SHARE * step if optimizer is None else optimizer


def _link(bandwidth: str | None, latency: float | None) -> network.Link | None:
    if bandwidth is None:
        if latency is not None:
            raise InputError("--latency alone says nothing; give --bandwidth too, such as 1Gbit")
        return None
    milliseconds = latency or 0.0
    if not (math.isfinite(milliseconds) and milliseconds >= 0):
        raise InputError(f"--latency is {latency}, wanted milliseconds, at least 0")
    return network.Link(network.bandwidth(bandwidth), milliseconds / 1e3)
