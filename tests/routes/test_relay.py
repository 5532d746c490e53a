"""relay against its literal oracle; what it conserves; when it is gather."""

from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import problems
import ranks
from demopt import DeMo
from demopt.exchange import Exchange
from oracles import reference
from oracles.relay import relay_step

SHAPES = [(32, 16), (17, 19), (100, 8), (20,), (3, 2, 2), ()]
STEPS = 4


def _run(exchange: Exchange, route: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Parameters, momenta and what is kept back, after each step."""
    parameters = problems.parameters(SHAPES, torch.float64)
    optimizer = DeMo(parameters, **settings, route=route, process_group=exchange)
    seen = []
    for step in range(STEPS):
        problems.set_gradients(parameters, step, exchange.rank)
        optimizer.step()
        states = [optimizer.state[parameter] for parameter in parameters]
        seen.append(
            {
                "parameters": [parameter.detach().clone() for parameter in parameters],
                "momenta": [state["momentum"].clone() for state in states],
                "relay": [state["relay"].clone() for state in states if "relay" in state],
            }
        )
    return seen


def _settings(**more: Any) -> dict[str, Any]:
    return {**problems.SMALL, "relay_top_k": 12, "values": "float64", "weight_decay": 0.1, **more}


def _group(settings: dict[str, Any]) -> dict[str, Any]:
    return DeMo(problems.parameters(SHAPES, torch.float64), **settings).param_groups[0]


def _gradients(step: int, world_size: int) -> list[list[Tensor]]:
    shapes = list(enumerate(SHAPES))
    return [
        [problems.draw(shape, 9, step, r, i, dtype=torch.float64) for i, shape in shapes] for r in range(world_size)
    ]


def _chunked(matrix: Tensor, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """A matrix of chunks (R, C) as rows [chunks, N]."""
    r, c = reference.chunk_shape(parameter.shape, group)
    return matrix.unfold(0, r, r).unfold(1, c, c).reshape(-1, r * c)


def _near(got: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for left, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def _near_where(decided: list[Tensor], got: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    _near(
        [t[m] for t, m in zip(got, decided, strict=True)],
        [t[m] for t, m in zip(wanted, decided, strict=True)],
        tolerance,
    )
    assert sum(int(m.sum()) for m in decided) > 0.9 * sum(m.numel() for m in decided)


def _rule_out(decided: list[Tensor], aggregates: list[Tensor], zero: float, settings: dict[str, Any]) -> None:
    """Elements whose update was, at some step, too near zero for its sign to mean anything."""
    if settings.get("update", "signum") == "signum":
        for mask, aggregate in zip(decided, aggregates, strict=True):
            mask &= aggregate.abs() > zero


RELAYS = [
    {},
    {"update": "sgd"},
    {"update": "sgd", "reduction": "mean", "alpha": 0.5},
    {"update": "sgd", "values": "float32", "transform": "identity"},
    {"update": "sgd", "relay_top_k": 1, "transform": "hadamard"},
    {"update": "sgd", "relay_top_k": 256, "transform": "random"},
    {"chunking": "divisor", "maximize": True, "gradient_scale": "lr"},
]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("more", RELAYS, ids=str)
def test_relay_matches_oracle(more: dict[str, Any], world_size: int) -> None:
    settings = _settings(**more)
    group, found = _group(settings), ranks.threads(_run, world_size, "relay", settings)
    parameters: list[Tensor] = [p.detach() for p in problems.parameters(SHAPES, torch.float64)]
    momenta = [[reference.zero_momentum(p, group) for p in parameters] for _ in range(world_size)]
    kept_back = [reference.zero_momentum(p, group) for p in parameters]
    decided = [torch.ones(p.shape, dtype=torch.bool) for p in parameters]
    for step in range(STEPS):
        after = relay_step(parameters, _gradients(step, world_size), momenta, kept_back, group)
        parameters, momenta, kept_back = after.parameters, after.momenta, after.kept_back
        _rule_out(decided, after.delivered, 1e-11, settings)
        for rank in range(world_size):
            seen = found[rank][step]
            _near_where(decided, seen["parameters"], parameters, 1e-9)
            dense = [oracle.dense(m, p, group) for m, p in zip(seen["momenta"], parameters, strict=True)]
            _near(dense, momenta[rank], 1e-9)
        held = [torch.cat([found[rank][step]["relay"][p] for rank in range(world_size)]) for p in range(len(SHAPES))]
        _near(held, [_chunked(a, p, group) for a, p in zip(kept_back, parameters, strict=True)], 1e-9)


@pytest.mark.parametrize("transform", ["dct", "identity"])
@pytest.mark.parametrize("values", ["float64", "sign", "int8"])
def test_relay_conserves_what_leaves_the_momenta(values: str, transform: str) -> None:
    """What leaves the momenta is kept back or delivered; nothing is made or lost, by quantisation neither."""
    world_size = 3
    settings = _settings(values=values, transform=transform, update="sgd", reduction="mean", weight_decay=0.0)
    found = ranks.threads(_run, world_size, "relay", settings)
    group, decay, lr = _group(settings), settings["momentum"], settings["lr"]
    before: list[Tensor] = [p.detach() for p in problems.parameters(SHAPES, torch.float64)]
    zero = [reference.zero_momentum(p, group) for p in before]
    mean, held = zero, zero
    for step in range(STEPS):
        gradients = [sum(of) / world_size for of in zip(*_gradients(step, world_size), strict=True)]
        accumulated = [reference.accumulate(m, g, group) for m, g in zip(mean, gradients, strict=True)]
        mean, now_held, delivered = [], [], []
        for p, after in enumerate(found[0][step]["parameters"]):
            momenta = [oracle.dense(found[r][step]["momenta"][p], after, group) for r in range(world_size)]
            mean.append(sum(momenta) / world_size)
            rows = torch.cat([found[r][step]["relay"][p] for r in range(world_size)])
            now_held.append(oracle.dense(rows, after, group))
            delivered.append(reference.accumulate(zero[p], (before[p] - after) / lr / (1 - decay), group))
        for p, after in enumerate(found[0][step]["parameters"]):
            rows, columns = reference.matrix_shape(after.shape)
            left = (accumulated[p] + held[p])[:rows, :columns]
            right = (mean[p] + now_held[p] + delivered[p])[:rows, :columns]
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)
        before, held = found[0][step]["parameters"], now_held


def test_relay_with_all_coefficients_equals_gather() -> None:
    settings = _settings(top_k=256, relay_top_k=256, update="sgd", reduction="mean", values="float32")
    gather, relay = (ranks.threads(_run, 3, route, settings) for route in ("gather", "relay"))
    for step in range(STEPS):
        _near(relay[0][step]["parameters"], gather[0][step]["parameters"], 1e-6)
