"""A plan says what the routes themselves say, and what real ranks then do, to the byte."""

import math

import pytest
import torch
from torch import Tensor

import problems
import ranks
from demopt import DeMo, LocalDeMo
from demopt.exchange import Exchange, Meter
from demopt.optim.chunk_group import build
from demopt.optim.compress import Workspace
from demopt.optim.routes.choice import ROUTES, make_route
from demopt.plan.costs import Plan, Row, make_chunk_groups, make_plan, memory_of
from demopt.plan.model import Model, of_config, of_count, of_shapes
from demopt.train.config import TrainConfig
from demopt.wire.values import VALUES

MODELS = {
    "odd": problems.SHAPES,
    "decoder": [(257, 48), (48, 48), (130, 48), (48, 130), (48,), (48,)],
    "one": [(7,)],
}
SETTINGS = {"chunk": 16, "top_k": 24, "relay_top_k": 40}


def plan_of(model: Model, world_size: int, **settings: object) -> Row:
    return make_plan(model, settings, [world_size]).rows[0]


@pytest.fixture(scope="module")
def large() -> Plan:
    """The paper's 300M model, as issue 3 asks for it."""
    model = of_config(TrainConfig(preset="demo-300m"))
    return make_plan(model, {"top_k": 32, "relay_top_k": 64, "values": "sign"}, [64])


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", MODELS)
def test_plan_bytes_equal_route_traffic(name: str, values: str) -> None:
    settings = {**SETTINGS, "values": values}
    plan = make_plan(of_shapes(name, MODELS[name]), settings, [2, 3, 4])
    for row in plan.rows:
        for route in ROUTES:
            optimizer = DeMo(problems.parameters(MODELS[name]), lr=0.1, **settings)
            chunk_groups = [chunk_group for chunk_group in build(optimizer.param_groups) if chunk_group.chunks]
            for rank in range(row.workers):
                real = make_route(route, chunk_groups, rank, row.workers, Workspace())[0].traffic
                assert (row.ways[route].sent_bytes, row.ways[route].received_bytes) == (real.sent, real.received)
    assert plan.memory.momentum_bytes == sum(chunk_group.momentum.nbytes for chunk_group in chunk_groups)


def _step(exchange: Exchange, route: str, values: str) -> tuple[DeMo, int, int, Tensor]:
    """A rank's second step, the first without a handshake: with its calls, messages and what came of them."""
    meter = Meter(exchange)
    parameters = problems.parameters(problems.FEW)
    optimizer = DeMo(parameters, lr=0.1, route=route, values=values, process_group=meter, **SETTINGS)
    for step in range(2):
        problems.set_gradients(parameters, step, exchange.rank)
        calls = meter.calls
        message = optimizer.extract()
        gathered = optimizer.exchange(message)
        optimizer.apply(gathered)
    return optimizer, meter.calls - calls, message.numel(), gathered


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("route", "values"),
    [
        ("gather", "sign"),
        ("gather", "bfloat16"),
        ("owner", "2-bit"),
        ("owner", "float32"),
        ("relay", "int8"),
        ("relay", "sign"),
    ],
)
def test_plan_costs_equal_real_ranks(route: str, values: str, world_size: int) -> None:
    row = plan_of(of_shapes("few", problems.FEW), world_size, values=values, **SETTINGS)
    cost = row.ways[route]
    kept_back = []
    for optimizer, calls, message_bytes, gathered in ranks.threads(_step, world_size, route, values):
        assert optimizer.stats.sent_bytes == cost.sent_bytes
        assert optimizer.stats.received_bytes == cost.received_bytes
        assert message_bytes == cost.message_bytes == optimizer.stats.payload_bytes
        if route == "gather":
            assert gathered.nbytes == cost.gathered_bytes
        assert calls == cost.rounds
        kept_back.append(sum(state["relay"].nbytes for state in optimizer.state.values() if "relay" in state))
    assert max(kept_back) == cost.kept_back_bytes


def test_plan_of_300m_gives_the_bytes_of_issue_3(large: Plan) -> None:
    ways = large.rows[0].ways
    assert ways["owner"].received_bytes <= 45e6
    assert ways["relay"].received_bytes <= 9e6
    coefficients = 32 * 78_112  # K, and the chunks of 319,946,752 / 4096
    assert large.chunks == 78_112
    assert large.kept == coefficients
    assert ways["published"].received_bytes == 63 * 12 * coefficients  # 1,890 MB from the other ranks
    assert ways["published"].gathered_bytes == 64 * 12 * coefficients
    assert round(ways["published"].gathered_bytes / 1e6, -1) == 1920  # its own 30 MB included
    assert ways["all_reduce_bf16"].received_bytes == 2 * 63 * 2 * 319_946_752 // 64
    assert large.rows[0].auto == "owner"


def test_plan_memory_counts_momentum_and_workspace(large: Plan) -> None:
    assert large.memory.momentum_bytes == 4 * 319_946_752
    assert large.memory.workspace_bytes == 2 * 4 * (1 << 20)
    assert large.memory.chosen_bytes == 12 * large.kept


def test_plan_relay_keeps_back_a_share_of_momentum(large: Plan) -> None:
    share = large.memory.momentum_bytes / 64
    assert share <= large.rows[0].ways["relay"].kept_back_bytes <= share + 8 * 4096 * 4


def test_plan_owner_and_relay_bytes_hardly_grow_with_workers() -> None:
    plan = make_plan(of_count(30_000_000, 64), {"values": "sign"}, [2, 1024])
    few, many = (row.ways for row in plan.rows)
    assert many["gather"].received_bytes == 1023 * few["gather"].received_bytes
    for route in ("owner", "relay"):
        assert many[route].received_bytes < 3 * few[route].received_bytes


def test_plan_auto_picks_the_cheapest_route() -> None:
    model, settings = of_count(10_000_000, 64), {"values": "sign"}
    rows = make_plan(model, settings, [2, 16]).rows
    assert [row.auto for row in rows] == ["gather", "owner"]
    for row in rows:
        cheapest = min(("gather", "owner"), key=lambda name, ways=row.ways: ways[name].received_bytes)
        assert row.auto == cheapest
        assert f"{row.ways[row.auto].received_bytes:,}" in row.why


def test_plan_leaves_out_impossible_routes() -> None:
    row = plan_of(of_count(4096, 64), 64, update="sgd")
    assert "owner" not in row.ways
    assert row.auto == "gather"


@pytest.mark.parametrize("settings", [{"values": "morse"}, {"top_k": 0}, {"topk": 8}])
def test_plan_refuses_what_demo_refuses(settings: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        make_plan(of_count(4096, 64), settings, [2])


def test_plan_of_large_model_allocates_nothing() -> None:
    plan = make_plan(of_count(10_000_000_000, 64), {}, [1024])
    assert plan.memory.momentum_bytes == pytest.approx(4e10)
    assert plan.chunks == math.ceil(1e10 / 4096)
    assert torch.empty(0).device.type == "cpu"  # the meta device was no default


def test_plan_memory_counts_rule_state() -> None:
    shapes = [(64, 64), (64,)]
    for update, moments in (("signum", 0), ("muon", 0), ("lion", 1), ("adamw", 1)):
        memory = memory_of(make_chunk_groups(shapes, {"update": update}))
        weights = 2 * 4 if update == "adamw" else 0  # a number a chunk
        assert memory.rule_bytes == moments * memory.momentum_bytes + weights


def _round(exchange: Exchange, route: str) -> tuple[LocalDeMo, int]:
    meter = Meter(exchange)
    parameters = problems.parameters(problems.FEW)
    inner = torch.optim.SGD(parameters, lr=0.1)
    settings = {"chunk": SETTINGS["chunk"], "top_k": SETTINGS["top_k"]}  # owners answer with their default
    optimizer = LocalDeMo(inner, sync_every=2, route=route, process_group=meter, **settings)
    calls = 0
    for step in range(4):
        problems.set_gradients(parameters, step, exchange.rank)
        before, _ = meter.calls, optimizer.step()
        calls = meter.calls - before
    return optimizer, calls


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("route", ["gather", "relay"])
def test_plan_of_local_is_what_real_ranks_send_in_a_round(route: str, world_size: int) -> None:
    top_k = SETTINGS["top_k"]
    plan = make_plan(of_shapes("few", problems.FEW), SETTINGS, [world_size], sync_every=2, local_top_k=top_k)
    cost = plan.local.rows[0].ways[route]
    for optimizer, calls in ranks.threads(_round, world_size, route):
        assert (optimizer.stats.sent_bytes, optimizer.stats.received_bytes) == (cost.sent_bytes, cost.received_bytes)
        assert optimizer.stats.payload_bytes == cost.message_bytes
        assert calls == cost.rounds
