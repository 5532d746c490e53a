"""A plan says what the optimizers themselves say, and what real ranks then do, to the byte."""

import math
from typing import Any

import pytest
import torch

import problems
import ranks
from demopt import DeMo, LocalDeMo
from demopt.exchange import Exchange, Meter
from demopt.plan.costs import Cost, Model, Plan, make_plan, of_config, of_count, of_shapes
from demopt.train.config import PRESETS, TrainConfig, resolve
from demopt.train.model import build


def plan_of(model: Model, *workers: int, demo: dict[str, Any] | None = None, **local: Any) -> Plan:
    configs = [
        resolve(TrainConfig(optimizer=optimizer, **settings))  # type: ignore[arg-type]
        for optimizer, settings in (("demo", demo or {"update": "signum"}), ("local", local))
    ]
    return make_plan(model, *configs, workers=workers)


@pytest.fixture(scope="module")
def large() -> Plan:
    """The paper's 300M model, with today's messages."""
    return plan_of(of_config(TrainConfig(preset="demo-300m")), 64)


# Models


@pytest.mark.parametrize("preset", PRESETS)
def test_of_config_has_the_shapes_of_the_decoder(preset: str) -> None:
    config = resolve(TrainConfig(preset=preset))
    with torch.device("meta"):
        decoder = build(TrainConfig(**{**config.record(), "vocab_size": config.vocab_size or 256}))
    model = of_config(config)
    assert sorted(model.shapes) == sorted(tuple(parameter.shape) for parameter in decoder.parameters())
    assert model.parameters == sum(parameter.numel() for parameter in decoder.parameters())


# Costs


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
    demo = {"update": update or "signum", **settings}
    cost = plan_of(of_shapes("few", problems.FEW), world_size, demo=demo, **settings).costs[world_size][method]
    for sent, received, message, calls in ranks.threads(counted, world_size, way, values):
        assert Cost(sent, received, message) == Cost(cost.sent_bytes, cost.received_bytes, cost.message_bytes)
        assert calls == len(cost.calls)


def test_costs_of_the_papers_300m_model(large: Plan) -> None:
    ways = large.costs[64]
    assert large.kept[0] == 32 * 78_112  # K, and the chunks of 319,946,752 / 4096
    assert ways["DeMo"].received_bytes <= 45e6
    assert ways["DDP bf16"].received_bytes == 2 * 63 * 2 * 319_946_752 // 64
    assert len(ways["DeMo"].calls) == 2  # route owner
    assert large.memory_bytes == (4 * 319_946_752, 8 * 319_946_752)  # momentum; global weights and error


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
