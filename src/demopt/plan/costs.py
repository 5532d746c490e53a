"""The cost of a step: the optimizers themselves compute it, for parameters with shapes but no memory (meta device)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from demopt import DeMo, LocalDeMo
from demopt.codec.compress import Workspace
from demopt.exchange import SingleRank
from demopt.exchange.meter import all_reduce_bytes
from demopt.replicator.plan import make_route
from demopt.replicator.route import Route
from demopt.train.config import PRESETS, InputError, TrainConfig, resolve
from demopt.train.data import BYTE_VOCABULARY
from demopt.train.method import FLOAT32_BYTES, make_optimizer

Shape = tuple[int, ...]

BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's
DENSE = {"DDP": FLOAT32_BYTES, "DDP bf16": 2}  # bytes per parameter
MOST_PARAMETERS = 10**11  # larger plans take too long
_COUNT = re.compile(r"([0-9._]+) ?([kmgbt]?)", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


# Models


@dataclass(frozen=True)
class Model:
    """The parameters that train. `parameters` is their true count, also where the shapes are rounded up to chunks."""

    name: str
    shapes: tuple[Shape, ...]
    parameters: int

    def __post_init__(self) -> None:
        if not 0 < self.parameters <= MOST_PARAMETERS:
            raise InputError(f"{self.parameters:,} parameters; a plan is for 1 to {MOST_PARAMETERS:,}")

    def module(self) -> nn.Module:
        """Returns a module with these parameters on the meta device."""
        return nn.ParameterList([nn.Parameter(torch.empty(shape, device="meta")) for shape in self.shapes])


def of_shapes(name: str, shapes: Sequence[Shape]) -> Model:
    """Returns a model with parameters of these shapes."""
    return Model(name, tuple(shapes), sum(map(math.prod, shapes)))


def of_count(text: str) -> Model:
    """Returns a model with this number of parameters, in full chunks of 64 x 64."""
    found = _COUNT.fullmatch(text.strip())
    try:
        count = round(float(found[1]) * _FACTORS[found[2].lower()]) if found else 0
    except ValueError:
        count = 0
    if count < 1:
        raise InputError(f"--params is {text!r}; give a number of parameters, such as 124400000, 300M or 1.2B")
    return Model(f"{count:,} parameters in full chunks", ((64, 64 * -(-count // 4096)),), count)


def of_config(config: TrainConfig) -> Model:
    """Returns the parameters of the decoder that `demopt train` would build."""
    config = resolve(config)
    assert config.layers is not None
    assert config.width is not None
    assert config.mlp is not None
    width, mlp, norm = config.width, config.mlp, PRESETS[config.preset].family == "llama"
    attention: list[Shape] = [(width, width)] * 4
    gated: list[Shape] = [(mlp, width), (mlp, width), (width, mlp)]
    norms: list[Shape] = [(width,)] if norm else []  # olmo's norms have no parameters
    layer = attention + gated + 2 * norms
    return of_shapes(config.preset, [(config.vocab_size or BYTE_VOCABULARY, width), *layer * config.layers, *norms])


# Costs


@dataclass(frozen=True)
class Call:
    """Collectives of one kind, one after the other; `size` is the length in bytes of a rank's message."""

    kind: str
    size: int
    times: int = 1


@dataclass(frozen=True)
class Cost:
    """The bytes of one step or round for one rank, and its collectives, one after the other."""

    sent_bytes: int
    received_bytes: int
    message_bytes: int = 0
    calls: tuple[Call, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Plan:
    """The costs of a model by number of workers, then by method: per step with DDP and DeMo, per round with LocalDeMo.

    Memory is that of the optimizers per worker; LocalDeMo's inner optimizers are not in it.
    """

    model: Model
    demo: TrainConfig
    local: TrainConfig
    kept: tuple[int, int]  # coefficients in a message of DeMo, and of LocalDeMo
    memory_bytes: tuple[int, int]
    costs: dict[int, dict[str, Cost]]


def make_plan(model: Model, demo: TrainConfig, local: TrainConfig, workers: Sequence[int]) -> Plan:
    """Plans a model with the settings of two runs; ValueError or TypeError if an optimizer refuses one."""
    module = model.module()
    optimizers: list[Any] = [make_optimizer(config, module, SingleRank()) for config in (demo, local)]
    groups = [optimizer.replicator.plan().chunk_groups for optimizer in optimizers]
    costs: dict[int, dict[str, Cost]] = {}
    for world_size in workers:
        costs[world_size] = {name: ring(size * model.parameters, world_size) for name, size in DENSE.items()}
        for name, each in (("DeMo", groups[0]), ("LocalDeMo", groups[1])):
            costs[world_size][name] = cost_of(make_route("auto", each, 0, world_size, Workspace())[0])
    kept = [sum(group.chunks * group.key.keep for group in each) for each in groups]
    memory = [_memory(optimizer) for optimizer in optimizers]
    return Plan(model, demo, local, (kept[0], kept[1]), (memory[0], memory[1]), costs)


def ring(size: int, world_size: int) -> Cost:
    """Returns the cost of a ring all-reduce of `size` bytes, in the buckets of DistributedDataParallel."""
    both = all_reduce_bytes(size, world_size)
    buckets = -(-size // BUCKET_BYTES)
    return Cost(both, both, size, (Call("all_reduce", -(-size // buckets), buckets),))


def cost_of(route: Route) -> Cost:
    """Returns the cost of a step on a route."""
    message, answer = route.widths
    calls: tuple[Call, ...] = (Call("all_gather", message),)
    if route.collectives == 2:
        calls = (Call("all_to_all", message), Call("all_gather", answer))
    return Cost(route.bytes_each_way, route.bytes_each_way, message, calls)


def _memory(optimizer: DeMo | LocalDeMo) -> int:
    """Returns the bytes of an optimizer's state before the first step; counters are not worth mentioning."""
    return sum(value.nbytes for entry in optimizer.state.values() for value in entry.values() if value.is_meta)
