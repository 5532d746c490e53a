"""A plan says what the optimizers themselves say, and what real ranks then do, to the byte."""

import math
from typing import Any

import pytest
import torch

import problems
import ranks
from demopt import DeMo, LocalDeMo
from demopt.exchange import Exchange, Meter
from demopt.plan.costs import Model, Plan, exchanged_bytes, make_plan, of_count
from demopt.train.config import TrainConfig, resolve


def plan_of(model: Model, *workers: int, demo: dict[str, Any] | None = None, **local: Any) -> Plan:
    configs = [
        resolve(TrainConfig(optimizer=optimizer, **settings))  # type: ignore[arg-type]
        for optimizer, settings in (("demo", demo or {"update": "signum"}), ("local", local))
    ]
    return make_plan(model, *configs, workers=workers)


def counted(exchange: Exchange, kind: str, values: str) -> tuple[int, int, int, int]:
    """Bytes and calls of a rank's second round; the first has a handshake."""
    meter = Meter(exchange)
    parameters = problems.parameters(problems.FEW)
    settings: Any = {"values": values, "top_k": 24, "process_group": meter}
    optimizer: Any
    if kind == "LocalDeMo":
        optimizer = LocalDeMo(torch.optim.SGD(parameters, lr=0.1), sync_every=1, **settings)
    else:
        optimizer = DeMo(parameters, update=kind.removeprefix("DeMo "), **settings)
    for step in range(2):
        problems.set_gradients(parameters, step, exchange.rank)
        calls = meter.calls
        optimizer.step()
    stats = optimizer.stats
    return stats.sent_bytes, stats.received_bytes, stats.payload_bytes, meter.calls - calls


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("values", ["sign", "2-bit", "bfloat16"])
@pytest.mark.parametrize("way", ["DeMo sgd", "DeMo signum", "LocalDeMo"])  # DeMo takes gather, and owner
def test_costs_are_what_real_ranks_send(way: str, values: str, world_size: int) -> None:
    settings, (method, _, update) = {"values": values, "top_k": 24}, way.partition(" ")
    few = Model("few", torch.nn.ParameterList(problems.parameters(problems.FEW)), sum(map(math.prod, problems.FEW)))
    demo = {"update": update or "signum", **settings}
    calls = plan_of(few, world_size, demo=demo, **settings).calls[world_size][method]
    planned = exchanged_bytes(calls, world_size)
    for sent, received, message, times in ranks.threads(counted, world_size, way, values):
        assert (sent, received, message, times) == (planned, planned, calls[0].size, len(calls))


def test_memory_counts_the_update_rules_state() -> None:
    for update, moments in (("signum", 0), ("muon", 0), ("lion", 1), ("adamw", 1)):
        memory, _ = plan_of(of_count("4096"), 2, demo={"update": update}).memory_bytes
        weights = 4 if update == "adamw" else 0  # a number per chunk
        assert memory == (1 + moments) * 4 * 4096 + weights


def test_plan_of_a_large_model_allocates_nothing() -> None:
    plan = plan_of(of_count("10B"), 1024)
    assert plan.memory_bytes[0] == pytest.approx(4e10, rel=1e-5)
    assert plan.kept[0] == 32 * math.ceil(1e10 / 4096)
    assert torch.empty(0).device.type == "cpu"  # the meta device was no default
