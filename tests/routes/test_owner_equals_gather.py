"""Route "owner" sends the planned bytes and gives the parameters of "gather", bit for bit, after every step."""

from typing import Any

import pytest
import torch

import problems
import ranks
from demopt.exchange import Exchange
from demopt.wire.quantizers import VALUES

SHAPES = [(50, 33), (40, 16), (90,), (3,), (), (0, 5), (2, 3, 5)]


def _trained(exchange: Exchange, route: str, settings: dict[str, Any]) -> list[int]:
    optimizer = problems.demo(
        exchange, SHAPES, route=route, **{"chunk": 8, "top_k": 5, "weight_decay": 0.1, **settings}
    )
    start, history = optimizer.fingerprint(), problems.train(optimizer, range(3), exchange.rank)
    planned = optimizer.replicator.wiring().route.bytes_each_way
    assert (optimizer.stats.sent_bytes, optimizer.stats.received_bytes) == (planned, planned)
    assert optimizer.stats.route == f"{route}: as asked"
    assert history.fingerprints[-1] != start
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


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        *((world_size, {"values": values}) for world_size in (1, 2, 4, 7) for values in ("float32", "sign")),
        (3, {"reduction": "mean", "values": "int8"}),
        (3, {"exact": False, "values": "2-bit"}),
        *((3, {"top_k": top_k, "values": "sign"}) for top_k in (1, 64)),
        (3, {"maximize": True, "values": "float32", "transform": "random"}),
    ],
    ids=str,
)
def test_owner_equals_gather_at_any_world_size_and_with_other_settings(
    world_size: int, settings: dict[str, Any]
) -> None:
    """At 7, some ranks own no chunks."""
    _same(world_size, **settings)


def _no_gradients(exchange: Exchange, route: str, values: str) -> list[float]:
    optimizer = problems.demo(exchange, SHAPES, values=values, route=route)
    if exchange.rank == 0:
        problems.all_parameters(optimizer)[0].grad = problems.draw(SHAPES[0], 1)
    before = problems.values(optimizer)
    optimizer.step()
    return [float((p - b).abs().sum()) for p, b in zip(problems.values(optimizer), before, strict=True)]


@pytest.mark.parametrize("route", ["gather", "owner"])
@pytest.mark.parametrize("values", ["float32", "sign"])
def test_routes_do_not_move_chunks_that_nobody_sent(route: str, values: str) -> None:
    for moved in ranks.threads(_no_gradients, 3, route, values):
        assert moved[0] > 0
        assert moved[1:] == [0.0] * (len(SHAPES) - 1)
