"""After an error on one rank alone: the others notice, and training can go on."""

from typing import Any

import pytest
import torch

import problems
import ranks
from demopt import DriftError, ExchangeError, LocalDeMo, MessageError
from demopt.exchange import Exchange, SingleRank

ROUTES = pytest.mark.parametrize("route", ["gather", "owner"])


@ROUTES
def test_optimizer_rebuilt_on_one_rank_changes_nothing(route: str) -> None:
    """The others compare settings with it, find them equal, and repeat the round."""

    def rebuilt_alone(exchange: Exchange) -> list[int]:
        optimizer = problems.demo(exchange, route=route)
        history = problems.train(optimizer, range(2), exchange.rank)
        if exchange.rank == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        return history.fingerprints + problems.train(optimizer, range(2, 4), exchange.rank).fingerprints

    marks = ranks.threads(rebuilt_alone, 3)
    assert all(mark == marks[0] for mark in marks)
    assert len(set(marks[0])) == 4


def test_resync_repairs_a_round_refused_by_one_rank() -> None:
    """Rank 1 refuses a round that the others apply; all then take rank 0's parameters and step."""

    def damaged_once(exchange: Exchange) -> list[int]:
        due = [False]

        def damage(messages: torch.Tensor) -> torch.Tensor:
            if due[0]:
                messages[0, -1] ^= 1
            return messages

        optimizer = problems.demo(problems.Faulty(exchange, damage) if exchange.rank == 1 else exchange, route="gather")
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

    marks = ranks.threads(damaged_once, 3)
    assert all(mark == marks[0] for mark in marks)


@pytest.mark.parametrize("local", [False, True])
def test_failed_step_leaves_no_loss_scale(local: bool) -> None:
    link = problems.FailsWhenDue(SingleRank())
    link.due = True
    optimizer: Any = problems.demo(link, route="gather")
    if local:
        inner = torch.optim.SGD(problems.parameters(problems.FEW), lr=0.1)
        optimizer = LocalDeMo(inner, sync_every=1, process_group=link)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    with pytest.raises(ExchangeError):
        optimizer.step()
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.filterwarnings("ignore:initial parameters")
def test_first_step_after_a_resumption_takes_weights_before_it_compares_fingerprints() -> None:
    """Only rank 0 has loaded the weights, and the step is due for a fingerprint."""

    def resumed(exchange: Exchange) -> list[int]:
        optimizer = problems.demo(exchange, fingerprint_every=2)
        optimizer.replicator.step.fill_(2)
        if exchange.rank == 1:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].add_(1.0)
        try:
            return problems.train(optimizer, range(2), exchange.rank).fingerprints
        except DriftError:
            return []

    first, second = ranks.threads(resumed, 2)
    assert first == second != []


def test_state_refused_by_the_route_changes_nothing() -> None:
    optimizer, other = problems.demo(SingleRank(), route="owner"), problems.demo(SingleRank(), update="sgd")
    problems.train(optimizer, range(1))
    problems.train(other, range(2))
    before = problems.momenta(optimizer)
    with pytest.raises(ValueError, match="route 'owner'"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["update"] == "signum"
    assert problems.same(problems.momenta(optimizer), before)
    problems.train(optimizer, range(1, 2))
