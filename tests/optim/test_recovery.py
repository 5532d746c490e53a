"""After something went wrong on one rank alone: the others notice, and training can go on."""

from typing import Any

import pytest
import torch

import problems
import ranks
from demopt import DeMo, DriftError, ExchangeError, MessageError, SettingsError
from demopt.exchange import Exchange, Faulty, SingleRank

ROUTES = ["gather", "owner", "relay"]


def _optimizer(exchange: Exchange, **settings: Any) -> DeMo:
    return DeMo(problems.parameters(problems.FEW), **{**problems.SMALL, **settings}, process_group=exchange)


def _rebuilt_alone(exchange: Exchange, route: str) -> list[int]:
    optimizer = _optimizer(exchange, route=route)
    history = problems.train(optimizer, range(2), exchange.rank)
    if exchange.rank == 1:
        optimizer.load_state_dict(optimizer.state_dict())
    return history.fingerprints + problems.train(optimizer, range(2, 4), exchange.rank).fingerprints


@pytest.mark.parametrize("route", ROUTES)
def test_optimizer_rebuilt_on_one_rank_changes_nothing(route: str) -> None:
    """The others compare settings with it, find them equal, and take the round anew."""
    rebuilt = ranks.threads(_rebuilt_alone, 3, route)
    assert all(marks == rebuilt[0] for marks in rebuilt)
    assert len(set(rebuilt[0])) == 4


def _changed_alone(exchange: Exchange, route: str) -> str:
    optimizer = _optimizer(exchange, route=route)
    problems.train(optimizer, range(1), exchange.rank)
    if exchange.rank == 1:
        optimizer.param_groups[0]["top_k"] = 7
    with pytest.raises(SettingsError) as caught:
        problems.train(optimizer, range(1, 2), exchange.rank)
    return str(caught.value)


@pytest.mark.parametrize("route", ROUTES)
def test_setting_changed_on_one_rank_is_named_on_every_route(route: str) -> None:
    for said in ranks.threads(_changed_alone, 2, route):
        assert "rank 1 has param_groups[0]['top_k'] = 7" in said


def _damaged_once(exchange: Exchange) -> list[int]:
    """Rank 1 refuses one round that the others apply; all then take rank 0's parameters and step."""
    due = [False]

    def damage(messages: torch.Tensor) -> torch.Tensor:
        if due[0]:
            messages[0, -1] ^= 1
        return messages

    optimizer = _optimizer(Faulty(exchange, damage) if exchange.rank == 1 else exchange, route="gather")
    problems.train(optimizer, range(2), exchange.rank)
    due[0] = True
    if exchange.rank == 1:
        with pytest.raises(MessageError):
            problems.train(optimizer, range(2, 3), exchange.rank)
    else:
        problems.train(optimizer, range(2, 3), exchange.rank)
    due[0] = False
    optimizer.resync(0)
    return problems.train(optimizer, range(3, 5), exchange.rank).fingerprints


def _alone_in_its_group(exchange: Exchange) -> float:
    parameter = torch.nn.Parameter(torch.full((), float(exchange.rank)))
    optimizer = DeMo([parameter], process_group=exchange)
    optimizer.resync(1)
    return float(parameter.detach())


def test_resync_copies_a_single_parameter() -> None:
    assert ranks.threads(_alone_in_its_group, 2) == [1.0, 1.0]


def test_resync_mends_a_round_refused_by_one_rank() -> None:
    marks = ranks.threads(_damaged_once, 3)
    assert all(mark == marks[0] for mark in marks)


def test_failed_step_leaves_no_loss_scale() -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise ExchangeError("gone")

    optimizer: Any = _optimizer(Faulty(SingleRank(), fail), route="gather")
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    with pytest.raises(ExchangeError):
        optimizer.step()
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def _resumed_at_a_due_step(exchange: Exchange) -> list[int]:
    """Only rank 0 has the weights; at the first step after a resumption, which is due for a fingerprint."""
    optimizer = _optimizer(exchange, fingerprint_every=2)
    optimizer._step.fill_(2)
    if exchange.rank == 1:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].add_(1.0)
    try:
        return problems.train(optimizer, range(2), exchange.rank).fingerprints
    except DriftError:
        return []


@pytest.mark.filterwarnings("ignore:initial parameters")
def test_fingerprint_every_ignores_initial_weights_of_rank_0() -> None:
    first, second = ranks.threads(_resumed_at_a_due_step, 2)
    assert first == second != []


def test_load_state_dict_refused_by_route_changes_nothing() -> None:
    optimizer, other = _optimizer(SingleRank(), route="owner"), _optimizer(SingleRank(), update="sgd")
    problems.train(optimizer, range(1))
    problems.train(other, range(2))
    parameter = optimizer.param_groups[0]["params"][0]
    before = optimizer.state[parameter]["momentum"].clone()
    with pytest.raises(ValueError, match="route 'owner'"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["update"] == "signum"
    assert torch.equal(optimizer.state[parameter]["momentum"], before)
    problems.train(optimizer, range(1, 2))
