"""The cost of a step: the optimizers themselves compute it, for parameters with shapes but no memory (meta device)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from demopt.codec.compress import Workspace
from demopt.exchange import SingleRank
from demopt.replicator.wiring import make_route
from demopt.train.config import InputError, TrainConfig, resolve
from demopt.train.data import BYTE_VOCABULARY
from demopt.train.method import FLOAT32_BYTES, Memory, make_optimizer, memory_of
from demopt.train.model import build, count_parameters

BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's
DENSE = {"DDP": FLOAT32_BYTES, "DDP bf16": 2}  # bytes per parameter
MOST_PARAMETERS = 10**11  # larger plans take too long
FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Model:
    """The parameters that train, on the meta device. `parameters` is their true count, also in chunks that are full."""

    name: str
    module: nn.Module
    parameters: int


@dataclass(frozen=True)
class Call:
    """Collectives of one kind, one after the other; `size` is the length in bytes of a rank's message."""

    kind: str
    size: float
    times: int = 1


@dataclass(frozen=True)
class Plan:
    """The collectives of a step, or of LocalDeMo's round, by number of workers, then by method.

    Memory is that of the optimizers per worker; LocalDeMo's inner optimizers are not in it.
    """

    model: Model
    demo: TrainConfig
    local: TrainConfig
    kept: tuple[int, int]  # coefficients in a message of DeMo, and of LocalDeMo
    memory_bytes: tuple[int, int]
    calls: dict[int, dict[str, tuple[Call, ...]]]
    memory: Memory  # of a worker with LocalDeMo, without activations

    def message_bits(self, method: str) -> float:
        """Returns the bits of a worker's message per parameter and step."""
        first = self.calls[next(iter(self.calls))][method][0]
        return 8 * first.size / self.model.parameters / self.steps(method)

    def received_bytes(self, method: str, workers: int) -> float:
        """Returns the bytes that a rank receives per step; it sends as many."""
        return exchanged_bytes(self.calls[workers][method], workers) / self.steps(method)

    def steps(self, method: str) -> int:
        """Returns the steps per round of a method."""
        return self.local.sync_every if method == "LocalDeMo" else 1


def quantity(text: str, unit: str = "") -> float:
    """Parses a number with a factor, and the pattern of a unit; 0 if the text is none."""
    found = re.fullmatch(rf"(\d+\.?\d*) ?([kmgbt]?){unit}", text.strip(), re.IGNORECASE)
    return float(found[1]) * FACTORS[found[2].lower()] if found else 0.0


def of_count(text: str) -> Model:
    """Returns a model with this number of parameters, in full chunks of 64 x 64."""
    count = round(quantity(text))
    if not 0 < count <= MOST_PARAMETERS:
        raise InputError(
            f"--params is {text!r}; give a number of parameters from 1 to {MOST_PARAMETERS:,}, such as 124400000, 300M "
            "or 1.2B"
        )
    matrix = nn.Parameter(torch.empty(64, 64 * -(-count // 4096), device="meta"))
    return Model(f"{count:,} parameters in full chunks", nn.ParameterList([matrix]), count)


def of_config(config: TrainConfig) -> Model:
    """Returns the parameters of the decoder that `demopt train` would build."""
    config = resolve(config)
    with torch.device("meta"):
        module = build(dataclasses.replace(config, vocab_size=config.vocab_size or BYTE_VOCABULARY))
    return Model(config.model or config.preset, module, count_parameters(module))


def make_plan(model: Model, demo: TrainConfig, local: TrainConfig, workers: Sequence[int]) -> Plan:
    """Plans a model with the settings of two runs; ValueError or TypeError if an optimizer refuses one."""
    optimizers: list[Any] = [make_optimizer(config, model.module, SingleRank()) for config in (demo, local)]
    groups = [optimizer.replicator.wiring().chunk_groups for optimizer in optimizers]
    calls: dict[int, dict[str, tuple[Call, ...]]] = {}
    for world_size in workers:
        calls[world_size] = {}
        for name, size in DENSE.items():  # in the buckets of DistributedDataParallel
            buckets = -(-size * model.parameters // BUCKET_BYTES)
            calls[world_size][name] = (Call("all_reduce", size * model.parameters / buckets, buckets),)
        for name, each in (("DeMo", groups[0]), ("LocalDeMo", groups[1])):
            route, _ = make_route("auto", each, 0, world_size, Workspace())
            message, answer = route.widths
            gather = (Call("all_gather", message),)
            owner = (Call("all_to_all", message), Call("all_gather", answer))
            calls[world_size][name] = owner if route.collectives == 2 else gather
    kept = [sum(group.chunks * group.key.keep for group in each) for each in groups]
    states = [[value for entry in each.state.values() for value in entry.values()] for each in optimizers]
    memory = [sum(value.nbytes for value in state if value.is_meta) for state in states]  # without counters
    needed = memory_of(local, model.module, optimizers[1], activations=0)
    return Plan(model, demo, local, (kept[0], kept[1]), (memory[0], memory[1]), calls, needed)


def exchanged_bytes(calls: Sequence[Call], workers: int) -> float:
    """Returns the bytes that a rank sends in collectives, and receives: all_gather and all_reduce go in a ring."""
    parts = {"all_gather": workers, "all_to_all": 1, "all_reduce": 2}
    return sum(call.times * call.size * parts[call.kind] * (workers - 1) / workers for call in calls)
