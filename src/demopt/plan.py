"""`demopt plan`: a step's cost in bytes, memory and seconds, and the method that pays on a link. 1 MB is 10^6 bytes.

The optimizers themselves compute bytes and memory, for parameters with shapes but no memory (meta device).

A collective takes its bytes / bandwidth + its trips x latency / 2. After a pause TCP starts with a small window, which
adds waits for answers until it covers the message or the link. This is within 25 % of 83 of the 98 collectives that
the laboratory measured with gloo (laboratory/records/network.md). Loss and congestion are left out.
"""

import bisect
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from demopt.train.config import SETTINGS, Given, InputError, TrainConfig, assemble, config_of, resolve

OPTIMIZER_SHARE = 0.1  # of a step: Muon's matrix products relative to some 30,000 tokens per worker
MUCH = 0.3  # share of a step in the exchange from which the plan names alternatives
CARD_BYTES = 24e9
PACE = {  # by backend
    "gloo": "gloo's pace, as measured; nccl waits for fewer round trips (--backend nccl)",
    "nccl": "nccl's pace: computed from its rings, not measured",
}
WORKERS = tuple(2**power for power in range(1, 11))
BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's
DENSE = {"DDP": 4, "DDP bf16": 2}  # bytes per parameter
MOST_PARAMETERS = 10**11  # larger plans take too long
FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
DATA_SHARE = 0.96  # of a link's bits; the others are headers
HOST_SECONDS = 0.001  # gloo's own time per collective
FIRST_WINDOW = 10 * 1448  # bytes that TCP sends at once after a pause
SEGMENT_BYTES = 2**20  # of a long all_reduce, in gloo
TINY = 1000  # bytes; an all_reduce of less is not cut into segments
WORTH = 1.25  # the least speed-up for which to give up DDP's loss
FASTEST = 1e13  # bits per second
LOSS_BYTES = 16  # of demopt train's all_reduce of the loss, and of whether to stop
# Validation loss above the best DDP around Muon, by steps per round: 4 workers, 1,000 steps, in nats per byte. The rows
# are in laboratory/results, the table in docs/results.md; DeMo's row is for another text.
LOSS_ABOVE_DDP = {("LocalDeMo", 5): 0.010, ("LocalDeMo", 15): 0.063, ("DeMo", 1): 0.110}


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
    if backend not in PACE:
        raise InputError(f"--backend is {backend!r}; give gloo or nccl")
    if bandwidth is None and (latency or step_seconds or optimizer_seconds):
        raise InputError("--latency and seconds need --bandwidth too, such as 1Gbit")
    given: Given = {"preset": preset, "model": model, "lora": lora}
    train = assemble({name: value for name, value in given.items() if value is not None}, config)
    demo, local = _with_optimizer(train, "demo"), _with_optimizer(train, "local")
    local = dataclasses.replace(local, sync_every=sync_every or local.sync_every)
    link = None
    if bandwidth:
        if not (bits := quantity(bandwidth, r"(?:bits?(?:/s)?|bps)")):
            raise InputError(f"--bandwidth is {bandwidth!r}; give bits per second, such as 100Mbit, 1Gbit or 10Gbit")
        link = Link(bits, latency / 1e3, backend)
    try:
        made = make_plan(of_count(params) if params else of_config(local), demo, local, workers or WORKERS)
        made = dataclasses.replace(made, method="DeMo" if train.optimizer == "demo" else "LocalDeMo")
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from None
    added = OPTIMIZER_SHARE * step_seconds if optimizer_seconds is None else optimizer_seconds
    _show(made, Case(made, link, step_seconds, added) if link else None)
    return 0


def _with_optimizer(train: TrainConfig, optimizer: str) -> TrainConfig:
    """Returns the settings with this optimizer; its defaults if the config is of another one."""
    both = {name: getattr(TrainConfig, name) for name, about in SETTINGS.items() if about["fits"] == ("demo", "local")}
    other: Given = {} if train.optimizer == optimizer else {"optimizer": optimizer, **both}
    return resolve(config_of({**train.record(), **other}))


def _show(plan: "Plan", case: "Case | None") -> None:
    """Prints the verdict for the first number of workers, and tables."""
    from demopt.train.method import in_words

    console, local = Console(highlight=False, markup=False, emoji=False), plan.local
    sizes = "" if str(plan.parameters) in plan.name.replace(",", "") else f": {plan.parameters:,} parameters"
    console.print(f"{plan.name}{sizes}")
    if case:
        console.print(verdict(case, next(iter(plan.calls))), style="bold")
        if case.compute:
            _alternatives(console, case)
    memory = plan.memory[plan.method]
    console.print(f"{in_words(memory)} (weights, gradients and optimizers in float32, per worker)")
    if sum(memory.values()) > CARD_BYTES:
        other = "demopt train --lora, or LocalDeMo over FSDP2 inside each box (docs/parallelism.md)"
        console.print(f"That is more than a 24 GB card has: {other}.")
    methods = list(next(iter(plan.calls.values())))
    tables: dict[str, Callable[[str, int], float]] = {"MB received per step": plan.received_megabytes}
    if case:
        tables["seconds per step"] = case.seconds
    for title, figure in tables.items():
        columns = [Column(heading, justify="right", no_wrap=True) for heading in ("workers", *methods)]
        table = Table(*columns, title=f"\n{title}", box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
        for workers in plan.calls:
            table.add_row(f"{workers:,}", *(digits(figure(method, workers)) for method in methods))
        console.print(table)
    sent = f"top-k {local.top_k}" if local.top_k else "signs of all"
    values = " and ".join(f"{each.values} ({name})" for name, each in (("DeMo", plan.demo), ("LocalDeMo", local)))
    values = local.values if local.values == plan.demo.values else values
    kept, held = plan.kept, {method: digits(each["demopt"] / 1e6) for method, each in plan.memory.items()}
    console.print(
        "\nAs many MB are sent. Bits per parameter and step, in a worker's message: LocalDeMo "
        f"{plan.message_bits('LocalDeMo'):.3g}, DeMo {plan.message_bits('DeMo'):.3g}, DDP 32 or 16 (its ring sends up "
        "to twice that).\n"
        f"DeMo: top-k {plan.demo.top_k}, {kept['DeMo']:,} coefficients per message; {held['DeMo']} MB of memory per "
        f"worker for momentum and update rule ({plan.demo.update}).\n"
        f"LocalDeMo: {sent}, {kept['LocalDeMo']:,} coefficients per message, a round every {local.sync_every} steps; "
        f"{held['LocalDeMo']} MB for global weights and error, in addition to the inner optimizers.\n"
        f"Values: {values}. DDP: a ring all-reduce of the gradients, during backward."
    )
    if case:
        console.print(f"Seconds are at {PACE[case.link.backend]}.")
    else:
        console.print("For seconds and a verdict give --bandwidth, --latency and --step-seconds.", style="dim")


def _alternatives(console: Console, case: "Case") -> None:
    """Prints the time of 10,000 steps and, where the exchange is much of a step, the faster choices and their loss."""
    from demopt.train.screen import duration

    plan, workers = case.plan, next(iter(case.plan.calls))
    ours, ddp = case.seconds(plan.method, workers), case.seconds("DDP bf16", workers)
    share = 1 - (case.compute + case.optimizer) / ours
    console.print(f"10,000 steps: {duration(1e4 * ours)}, with DDP {duration(1e4 * ddp)}; their losses differ.")
    if share < MUCH:
        return
    faster = []
    for (method, every), loss in LOSS_ABOVE_DDP.items():
        rarely = dataclasses.replace(plan, local=dataclasses.replace(plan.local, sync_every=every))
        seconds = dataclasses.replace(case, plan=rarely).seconds(method, workers)
        if seconds < ours:
            flags = "--optimizer demo" if method == "DeMo" else f"--sync-every {every}"
            flags = flags if plan.method == "LocalDeMo" else f"--optimizer local {flags}"
            faster.append(f"  {flags}: {digits(seconds)} s, 10,000 steps {duration(1e4 * seconds)}; loss +{loss:.3f}\n")
    choices = "\n" + "".join(faster) + "or " if faster else " "
    console.print(
        f"Exchange is {share:.0%} of a step. It takes less with{choices}several GPUs per box as one worker (FSDP2). "
        "Loss above DDP's, of small models after 1,000 steps; the default's is "
        f"+{LOSS_ABOVE_DDP['LocalDeMo', 5]:.3f}, DeMo's +{LOSS_ABOVE_DDP['DeMo', 1]:.3f} (docs/results.md)."
    )


#: A model's name, its nn.Module on the meta device (maybe padded to full chunks), and its number of parameters.
Model = tuple[str, Any, int]


@dataclass(frozen=True)
class Call:
    """Collectives of one kind, one after the other; `size` is the length in bytes of a rank's message."""

    kind: str
    size: float
    times: int = 1

    def exchanged_bytes(self, workers: int) -> float:
        """Returns the bytes that a rank sends; it receives as many. all_gather and all_reduce go in a ring."""
        parts = {"all_gather": workers, "all_to_all": 1, "all_reduce": 2}[self.kind]
        return self.times * self.size * parts * (workers - 1) / workers


@dataclass(frozen=True)
class Plan:
    """The collectives of a step, or of LocalDeMo's round, by number of workers, then by method."""

    name: str
    parameters: int
    demo: TrainConfig
    local: TrainConfig
    kept: dict[str, int]  # coefficients in a message, of DeMo and LocalDeMo
    calls: dict[int, dict[str, tuple[Call, ...]]]
    memory: dict[str, dict[str, int]]  # a worker's bytes with each of these, by purpose, without activations
    method: str = "LocalDeMo"  # the one that is compared with DDP: the config's

    def message_bits(self, method: str) -> float:
        """Returns the bits of a worker's message per parameter and step."""
        first = next(iter(self.calls.values()))[method][0]
        return 8 * first.size / self.parameters / self.steps(method)

    def received_megabytes(self, method: str, workers: int) -> float:
        """Returns the MB that a rank receives per step; it sends as many."""
        return sum(call.exchanged_bytes(workers) for call in self.calls[workers][method]) / self.steps(method) / 1e6

    def steps(self, method: str) -> int:
        return self.local.sync_every if method == "LocalDeMo" else 1


def quantity(text: str, unit: str = "") -> float:
    """Parses a number with a factor and a unit, given as a pattern; 0 if the text is not such a number."""
    found = re.fullmatch(rf"(\d+\.?\d*) ?([kmgbt]?){unit}", text.strip(), re.IGNORECASE)
    return float(found[1]) * FACTORS[found[2].lower()] if found else 0.0


def of_count(text: str) -> Model:
    """Returns a model with this number of parameters, in full chunks of 64 x 64."""
    import torch
    from torch import nn

    count = round(quantity(text))
    if not 0 < count <= MOST_PARAMETERS:
        wanted = f"a number of parameters from 1 to {MOST_PARAMETERS:,}, such as 124400000, 300M or 1.2B"
        raise InputError(f"--params is {text!r}; give {wanted}")
    matrix = nn.Parameter(torch.empty(64, 64 * -(-count // 4096), device="meta"))
    return f"{count:,} parameters, as one matrix", nn.ParameterList([matrix]), count


def of_config(config: TrainConfig) -> Model:
    """Returns the parameters of the decoder that `demopt train` would build."""
    import torch

    from demopt.train.model import build, count_parameters

    with torch.device("meta"):
        module = build(config)
    return config.model or config.preset, module, count_parameters(module)


def make_plan(model: Model, demo: TrainConfig, local: TrainConfig, workers: Sequence[int]) -> Plan:
    """Plans a model with the settings of two runs; ValueError or TypeError if an optimizer refuses one."""
    from demopt.codec.steps import Workspace
    from demopt.exchange import SingleRank
    from demopt.replicator.wiring import make_route
    from demopt.train.method import make_optimizer, memory_of

    (title, module, parameters), configs = model, {"DeMo": demo, "LocalDeMo": local}
    made: dict[str, Any] = {method: make_optimizer(each, module, SingleRank()) for method, each in configs.items()}
    groups = {name: each.replicator.wiring().chunk_groups for name, each in made.items()}
    calls: dict[int, dict[str, tuple[Call, ...]]] = {}
    for world_size in workers:
        calls[world_size] = {}
        for method, size in DENSE.items():  # in the buckets of DistributedDataParallel
            buckets = -(-size * parameters // BUCKET_BYTES)
            calls[world_size][method] = (Call("all_reduce", size * parameters / buckets, buckets),)
        for method, mine in groups.items():
            route, _ = make_route("auto", mine, 0, world_size, Workspace())
            message, answer = route.widths
            gather = (Call("all_gather", message),)
            owner = (Call("all_to_all", message), Call("all_gather", answer))
            calls[world_size][method] = owner if route.name == "owner" else gather
    kept = {name: sum(group.chunks * group.key.keep for group in mine) for name, mine in groups.items()}
    memory = {name: memory_of(configs[name], module, each) for name, each in made.items()}
    return Plan(title, parameters, demo, local, kept, calls, memory)


@dataclass(frozen=True)
class Link:
    """Each worker's connection: full duplex, the same bandwidth in both directions, and a round trip to the others."""

    bits_per_second: float
    latency_seconds: float
    backend: str = "gloo"  # of the process group; nccl's trips are those of its rings, and were not measured

    def seconds(self, calls: Sequence[Call], workers: int) -> float:
        """Returns the time that collectives take, one after the other."""
        seconds, gloo = 0.0, self.backend == "gloo"
        for call in calls:
            sent = 8 * call.exchanged_bytes(workers) / (DATA_SHARE * self.bits_per_second)
            if gloo and workers == 2 and call.kind != "all_reduce":
                sent *= 2  # whoever comes first sends, and its "ready to receive" waits behind its own data
            waits = trips(call, workers, gloo) * self.latency_seconds / 2 + gloo * HOST_SECONDS
            seconds += sent + call.times * waits + self.slow_start(call, workers)
        return seconds

    def slow_start(self, call: Call, workers: int) -> float:
        """Returns the wait while TCP doubles its window per round trip, less the time that it sends meanwhile."""
        size = call.size if call.kind == "all_gather" else call.size / workers  # of a message
        round_trips = math.ceil(math.log2(size / FIRST_WINDOW + 1)) - 1 if size else 0
        return max(round_trips * self.latency_seconds - 8 * size / self.bits_per_second, 0.0)


def trips(call: Call, workers: int, gloo: bool) -> float:
    """Returns the number of crossings of the network that wait for each other, as measured for gloo's algorithms.

    A message takes three, of which some overlap: ready to send, ready to receive, the data. A long all_reduce goes in
    segments, each of which waits; one of a few bytes needs only the data. In nccl's rings no part waits for another.
    """
    if not gloo:
        return {"all_gather": workers - 1, "all_to_all": 1}.get(call.kind, 2 * (workers - 1))
    if call.kind == "all_gather":
        return 2.5 * (workers - 1)
    if call.kind == "all_to_all":
        return workers
    if call.size < TINY:
        return 2 * (workers - 1)
    return max(6 * (workers - 1) - 2, math.ceil(call.exchanged_bytes(workers) / call.times / SEGMENT_BYTES))


@dataclass(frozen=True)
class Case:
    """A plan on a link. `compute`: seconds of a worker's step without the network; `optimizer`: what demopt adds."""

    plan: Plan
    link: Link
    compute: float
    optimizer: float

    def seconds(self, method: str, workers: int) -> float:
        """Returns the seconds of a step. DDP sends during backward, which is two thirds of computing."""
        calls, steps = self.plan.calls[workers][method], self.plan.steps(method)
        network, loss = (self.link.seconds(each, workers) / steps for each in (calls, [Call("all_reduce", LOSS_BYTES)]))
        if method.startswith("DDP"):
            return max(self.compute, network + self.compute / 3) + loss
        return self.compute + network + loss + self.optimizer

    def at(self, bits_per_second: float, workers: int) -> tuple[float, float]:
        """Returns the seconds of a step at a bandwidth: DDP's with bfloat16 gradients, and demopt's."""
        there = dataclasses.replace(self, link=dataclasses.replace(self.link, bits_per_second=bits_per_second))
        return there.seconds("DDP bf16", workers), there.seconds(self.plan.method, workers)


def verdict(case: Case, workers: int) -> str:
    """Returns the method to take, the figures behind it, and the bandwidth at which both are equally fast."""
    link, round_trip = case.link, f"{digits(1e3 * case.link.latency_seconds)} ms"
    ddp, ours = case.at(link.bits_per_second, workers)
    way = f"{workers} workers, {rate(link.bits_per_second)}, {round_trip}, {link.backend}"
    if not case.compute:
        network = f"{digits(ddp)} s per step with DDP (bfloat16) and {digits(ours)} s with demopt ({way})"
        return f"The network takes {network}. For a verdict give --step-seconds."
    if ours * WORTH > ddp:
        more = f"only {digits(ddp / ours)} times faster, and" if ours < ddp else "slower, and"
        advice = f"Stay with DDP: demopt is {more} costs some loss"
    else:
        advice = f"Take demopt: {digits(ddp / ours)} times faster than DDP"
    equal, (fast_ddp, fast_ours) = equal_bandwidth(case, workers), case.at(FASTEST, workers)
    if equal:
        end = f"Both are equal at {rate(equal)}."
    elif fast_ours >= fast_ddp:
        end = "DDP is ahead at any bandwidth."
    else:
        least = digits(fast_ddp / fast_ours)
        end = f"demopt is ahead at any bandwidth, by at least {least} times, because of the {round_trip}."
    return f"{advice}, {digits(ours)} s per step against {digits(ddp)} s ({way}; DDP bfloat16, during backward). {end}"


def equal_bandwidth(case: Case, workers: int) -> float | None:
    """Returns the bits per second at which DDP in bfloat16 and demopt take as long; None if one is always faster."""

    def ddp_wins(exponent: int) -> bool:
        ddp, ours = case.at(10 ** (exponent / 5000), workers)
        return ddp <= ours

    exponents = range(15_000, 65_000)  # of 1 kbit/s to FASTEST
    found = bisect.bisect_left(exponents, True, key=ddp_wins)
    return 10 ** (exponents[found] / 5000) if 0 < found < len(exponents) else None


def rate(bits_per_second: float) -> str:
    """Formats a bandwidth.

    Examples:
        >>> rate(195_975e6), rate(2.5e6)
        ('196 Gbit/s', '2.50 Mbit/s')
    """
    for factor, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits_per_second >= factor:
            return f"{digits(bits_per_second / factor)} {unit}"
    return f"{digits(bits_per_second / 1e3)} kbit/s"


def digits(number: float) -> str:
    """Formats with three significant digits, or with all digits before the point.

    Examples:
        >>> digits(1889.5), digits(99.96), digits(42.61), digits(0.04), digits(0.0)
        ('1,890', '100', '42.6', '0.0400', '0')
    """
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:#.3g}".rstrip(".") if number and math.isfinite(number) else "0"
