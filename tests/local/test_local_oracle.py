"""LocalDeMo against the literal oracle, and in cases in which it is a well-known optimizer."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import oracle
import problems
import ranks
from demopt import LocalDeMo
from demopt.codec.hyperparameters import Codec
from demopt.exchange import Exchange
from oracles.local import local_round
from oracles.reference import zero_momentum

SHAPES = problems.FEW
SETTINGS: dict[str, Any] = {
    "error_decay": 0.5, "outer_lr": 0.9, "top_k": 24, "chunk": 16, "transform": "dct",
    "reduction": "senders", "values": "float64",
}  # fmt: skip
EVERYTHING: dict[str, Any] = {"top_k": 256, "chunk": 16, "values": "float64", "error_decay": 0.0}
H = 3


def _inner(parameters: list[Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def _trained(exchange: Exchange, settings: dict[str, Any]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Parameters and errors after each of three rounds."""
    parameters = problems.parameters(SHAPES, dtype=torch.float64)
    optimizer = LocalDeMo(_inner(parameters), sync_every=H, process_group=exchange, **settings)
    group, rounds = optimizer.replicator.groups[0], []
    for step in range(3 * H):
        problems.set_gradients(parameters, step, exchange.rank)
        optimizer.step()
        if (step + 1) % H == 0:
            errors = [oracle.dense(optimizer.state[p]["error"], p, group) for p in parameters]
            rounds.append(([p.detach().clone() for p in parameters], errors))
    return rounds


def _expected(world_size: int, settings: dict[str, Any]) -> list[tuple[list[Tensor], list[list[Tensor]]]]:
    weights = [p.detach().clone() for p in problems.parameters(SHAPES, dtype=torch.float64)]
    local = [problems.parameters(SHAPES, dtype=torch.float64) for _ in range(world_size)]
    inner = [_inner(parameters) for parameters in local]
    errors = [[zero_momentum(x, {**settings, "chunking": "padded"}) for x in weights] for _ in range(world_size)]
    rounds = []
    for step in range(3 * H):
        for rank, parameters in enumerate(local):
            problems.set_gradients(parameters, step, rank)
            inner[rank].step()
        if (step + 1) % H == 0:
            weights, errors = local_round(weights, [[p.detach() for p in each] for each in local], errors, settings)
            for parameters in local:
                for parameter, value in zip(parameters, weights, strict=True):
                    parameter.data.copy_(value)
            rounds.append((weights, errors))
    return rounds


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"reduction": "mean"},
        {"error_decay": 0.0},
        {"values": "2-bit"},
        {"top_k": 256, "values": "sign", "reduction": "mean", "error_decay": 1.0},  # the signs of all coefficients
    ],
    ids=str,
)
def test_local_demo_equals_the_literal_round(changed: dict[str, Any]) -> None:
    settings = {**SETTINGS, **changed}
    expected = _expected(3, settings)
    for rank, rounds in enumerate(ranks.threads(_trained, 3, settings)):
        for (parameters, errors), (weights, all_errors) in zip(rounds, expected, strict=True):
            for got, want in zip(parameters + errors, weights + all_errors[rank], strict=True):
                torch.testing.assert_close(got.reshape(want.shape), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("delay", [0, 1])
def test_one_rank_that_keeps_everything_equals_its_inner_optimizer(delay: int) -> None:
    alone, wrapped = (problems.parameters(SHAPES, dtype=torch.float64) for _ in range(2))
    inner = torch.optim.AdamW(alone, lr=0.01)
    optimizer = LocalDeMo(torch.optim.AdamW(wrapped, lr=0.01), sync_every=2, delay=delay, **EVERYTHING)
    for step in range(6):
        for parameters, each in ((alone, inner), (wrapped, optimizer)):
            problems.set_gradients(parameters, step)
            each.step()
    optimizer.flush()
    for got, want in zip(wrapped, alone, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_error_of_signs_of_all_stays_below_one_pseudo_gradient() -> None:
    """Over 200 rounds of gradients that are noise around a slope: it is not forgotten, and must not grow."""
    (parameter,) = problems.parameters([(32, 48)])
    optimizer = LocalDeMo(torch.optim.SGD([parameter], lr=1.0), sync_every=1, codec=Codec(chunk=16))
    slope, norms = 0.3 * problems.draw(parameter.shape, 0), []
    for step in range(200):
        parameter.grad = slope + problems.draw(parameter.shape, 1, step)
        optimizer.step()
        norms.append(float(optimizer.state[parameter]["error"].norm() / parameter.grad.norm()))
    assert 0.5 < max(norms) < 1
