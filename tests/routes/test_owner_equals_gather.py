"""Route "owner" gives the same parameters as "gather", bit for bit, after every step."""

from typing import Any

import pytest
import torch

import problems
import ranks
from demopt import DeMo
from demopt.exchange import Exchange
from demopt.wire.quantizers import VALUES

SHAPES = [(50, 33), (40, 16), (90,), (3,), ()]


def _trained(exchange: Exchange, route: str, settings: dict[str, Any]) -> list[int]:
    parameters = problems.parameters(SHAPES)
    chosen = {**problems.SMALL, "chunk": 8, "top_k": 5, "weight_decay": 0.1, **settings}
    optimizer = DeMo(parameters, **chosen, route=route, process_group=exchange)
    history = problems.train(optimizer, range(3), exchange.rank)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in history.parameters)
    return history.fingerprints


def _same(world_size: int, **settings: Any) -> None:
    gather = ranks.threads(_trained, world_size, "gather", settings)
    owner = ranks.threads(_trained, world_size, "owner", settings)
    assert gather == owner
    assert gather == [gather[0]] * world_size


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("transform", ["dct", "identity"])
def test_owner_equals_gather_for_values_and_transforms(values: str, transform: str, bits_by: str) -> None:
    _same(3, values=values, transform=transform)


@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
@pytest.mark.parametrize("values", ["float32", "sign"])
def test_owner_equals_gather_at_any_world_size(values: str, world_size: int) -> None:
    """At 7, some ranks own no chunks."""
    _same(world_size, values=values)


@pytest.mark.parametrize(
    "settings",
    [
        {"reduction": "mean", "values": "int8"},
        {"exact": False, "values": "2-bit"},
        {"clip_to_median": True, "values": "float32"},
        {"clip_to_median": True, "values": "sign"},
        {"top_k": 1, "values": "sign"},
        {"top_k": 64, "values": "sign"},
        {"maximize": True, "values": "float32", "transform": "random"},
    ],
    ids=str,
)
def test_owner_equals_gather_with_other_settings(settings: dict[str, Any]) -> None:
    _same(3, **settings)


def _no_gradients(exchange: Exchange, route: str, values: str) -> list[float]:
    parameters = problems.parameters(SHAPES)
    optimizer = DeMo(parameters, **{**problems.SMALL, "values": values}, route=route, process_group=exchange)
    if exchange.rank == 0:
        parameters[0].grad = problems.draw(SHAPES[0], 1)
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.step()
    return [float((p.detach() - b).abs().max()) for p, b in zip(parameters, before, strict=True)]


@pytest.mark.parametrize("route", ["gather", "owner"])
@pytest.mark.parametrize("values", ["float32", "sign"])
def test_routes_do_not_move_chunks_that_nobody_sent(route: str, values: str) -> None:
    for moved in ranks.threads(_no_gradients, 3, route, values):
        assert moved[0] > 0
        assert moved[1:] == [0.0] * 4
