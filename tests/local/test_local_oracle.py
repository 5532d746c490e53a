"""LocalDeMo against the literal oracle, and against what it must be in simple cases."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import oracle
import problems
import ranks
from demopt import LocalDeMo
from demopt.exchange import Exchange
from oracles.local import local_round, local_round_over_relay

SHAPES = problems.FEW
SETTINGS: dict[str, Any] = {
    "error_decay": 0.5, "outer_lr": 0.9, "alpha": 1.0, "top_k": 24, "chunk": 16, "transform": "dct",
    "reduction": "senders", "values": "float64",
}  # fmt: skip
H = 3


def _inner(parameters: list[Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def _trained(exchange: Exchange, settings: dict[str, Any]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Parameters and errors after each of three rounds."""
    parameters = problems.parameters(SHAPES, dtype=torch.float64)
    optimizer = LocalDeMo(_inner(parameters), sync_every=H, process_group=exchange, **settings)
    rounds = []
    for step in range(3 * H):
        problems.set_gradients(parameters, step, exchange.rank)
        optimizer.step()
        if (step + 1) % H == 0:
            entries = optimizer.state_dict()["state"]
            group = optimizer._codec.param_groups[0]
            errors = [oracle.dense(entries[n]["error"], p, group) for n, p in enumerate(parameters)]
            rounds.append(([p.detach().clone() for p in parameters], errors))
    return rounds


def _expected(world_size: int, settings: dict[str, Any]) -> list[tuple[list[Tensor], list[list[Tensor]]]]:
    shared = [p.detach().clone() for p in problems.parameters(SHAPES, dtype=torch.float64)]
    own = [problems.parameters(SHAPES, dtype=torch.float64) for _ in range(world_size)]
    inner = [_inner(parameters) for parameters in own]
    group = {"relay_top_k": 3 * settings["top_k"] // 2, **settings, "chunking": "padded"}
    kept_back = [_zero(x, group) for x in shared]
    errors = [[_zero(x, group) for x in shared] for _ in range(world_size)]
    rounds = []
    for step in range(3 * H):
        for rank, parameters in enumerate(own):
            problems.set_gradients(parameters, step, rank)
            inner[rank].step()
        if (step + 1) % H == 0:
            moved = [[p.detach() for p in each] for each in own]
            if "route" in settings:
                shared, errors, kept_back = local_round_over_relay(shared, moved, errors, kept_back, group)
            else:
                shared, errors = local_round(shared, moved, errors, settings)
            for parameters in own:
                for parameter, value in zip(parameters, shared, strict=True):
                    parameter.data.copy_(value)
            rounds.append((shared, errors))
    return rounds


def _zero(parameter: Tensor, group: dict[str, Any]) -> Tensor:
    from oracles.reference import zero_momentum

    return zero_momentum(parameter, group)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"reduction": "mean"},
        {"reduction": "root"},
        {"error_decay": 0.0},
        {"alpha": 0.5},
        {"top_k": 256},
        {"route": "relay"},
        {"route": "relay", "reduction": "mean", "relay_top_k": 5},
        {"route": "relay", "error_decay": 0.0},
    ],
    ids=str,
)
def test_local_demo_equals_the_literal_round(changed: dict[str, Any]) -> None:
    settings = {**SETTINGS, **changed}
    expected = _expected(3, settings)
    for rank, rounds in enumerate(ranks.threads(_trained, 3, settings)):
        for (parameters, errors), (shared, all_errors) in zip(rounds, expected, strict=True):
            for mine, theirs in zip(parameters, shared, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
            for mine, theirs in zip(errors, all_errors[rank], strict=True):
                torch.testing.assert_close(mine.reshape(theirs.shape), theirs, rtol=0, atol=1e-10)


def test_one_rank_that_keeps_everything_is_its_inner_optimizer() -> None:
    alone, wrapped = (problems.parameters(SHAPES, dtype=torch.float64) for _ in range(2))
    inner = torch.optim.AdamW(alone, lr=0.01)
    optimizer = LocalDeMo(
        torch.optim.AdamW(wrapped, lr=0.01), sync_every=2, top_k=256, chunk=16, values="float64", error_decay=0.0
    )
    for step in range(6):
        for parameters, each in ((alone, inner), (wrapped, optimizer)):
            problems.set_gradients(parameters, step)
            each.step()
    for mine, theirs in zip(wrapped, alone, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def _with_equal_gradients(exchange: Exchange) -> list[Tensor]:
    parameters = problems.parameters(SHAPES, dtype=torch.float64)
    optimizer = LocalDeMo(
        _inner(parameters), sync_every=1, top_k=256, chunk=16, values="float64", error_decay=0.0, process_group=exchange
    )
    for step in range(4):
        problems.set_gradients(parameters, step, rank=0)
        optimizer.step()
    return [p.detach() for p in parameters]


@pytest.mark.filterwarnings("ignore:all 3 ranks have bit-identical gradients")
def test_equal_gradients_uncompressed_are_data_parallel_training() -> None:
    alone = problems.parameters(SHAPES, dtype=torch.float64)
    inner = _inner(alone)
    for step in range(4):
        problems.set_gradients(alone, step)
        inner.step()
    for parameters in ranks.threads(_with_equal_gradients, 3):
        for mine, theirs in zip(parameters, alone, strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-12)
