"""Updates that come a step late: what is applied, when, and that nothing is lost."""

import copy
from typing import Any

import pytest
import torch

import problems
import ranks
from demopt import DeMo, ExchangeError
from demopt.exchange import Delay, Exchange


def _optimizer(exchange: Any = None, **settings: Any) -> DeMo:
    return DeMo(problems.parameters(problems.FEW), **{**problems.SMALL, **settings}, process_group=exchange)


@pytest.mark.parametrize("route", ["gather", "owner", "relay", "shared"])
def test_each_update_comes_one_step_later(route: str) -> None:
    values = {"values": "float32"} if route == "shared" else {}
    at_once, late = (ranks.threads(_route_late, 2, route, delay, values) for delay in (0, 1))
    start = problems.parameters(problems.FEW)
    initial = DeMo(start, lr=1.0).fingerprint()
    for (marks, end), (late_marks, late_end) in zip(at_once, late, strict=True):
        assert late_marks == [initial, *marks[:-1]]
        assert late_end == end == [marks[-1]]


def _route_late(exchange: Exchange, route: str, delay: int, values: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Gradients do not depend on the parameters, so a late update is the same update."""
    optimizer = _optimizer(exchange, route=route, delay=delay, **values)
    marks = problems.train(optimizer, range(6), exchange.rank).fingerprints
    optimizer.flush()
    return marks, [optimizer.fingerprint()]


def _over_gloo(rank: int, world: int) -> list[int]:
    optimizer = _optimizer(None, delay=1, fingerprint_every=2)
    marks = problems.train(optimizer, range(5), rank).fingerprints
    optimizer.flush()
    assert optimizer.stats.received_bytes > 0
    return [*marks, optimizer.fingerprint()]


def test_between_processes() -> None:
    marks = ranks.run(_over_gloo, 3)
    assert all(each == marks[0] for each in marks)
    assert len(set(marks[0])) == 6


def test_saving_wants_a_flush_and_a_resumed_run_is_the_uninterrupted_one() -> None:
    optimizer = _optimizer(delay=1)
    problems.train(optimizer, range(3))
    with pytest.raises(RuntimeError, match=r"call flush\(\) on all ranks"):
        optimizer.state_dict()
    optimizer.flush()
    optimizer.flush()  # nothing more to do
    saved, parameters = optimizer.state_dict(), [p.detach().clone() for p in problems.all_parameters(optimizer)]
    resumed = _optimizer(delay=1)
    with torch.no_grad():
        for parameter, value in zip(problems.all_parameters(resumed), parameters, strict=True):
            parameter.copy_(value)
    resumed.load_state_dict(saved)
    assert problems.same_history(problems.train(resumed, range(3, 6)), problems.train(optimizer, range(3, 6)))


def _not_finite(exchange: Exchange) -> tuple[bool, bool, float]:
    """Rank 1's first gradient is no number; how far what rank 0 had sent is from being back, decayed."""
    optimizer = _optimizer(exchange, delay=1, momentum=0.5, values="float32")
    parameters = problems.all_parameters(optimizer)
    begun = optimizer.fingerprint()
    problems.set_gradients(parameters, 0, exchange.rank)
    if exchange.rank == 1:
        parameters[0].grad = torch.full_like(parameters[0], float("nan"))
    optimizer.step()
    late = optimizer._rounds._late
    assert late is not None
    assert late.sendings[0] is not None
    sent = late.sendings[0].extracted
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        optimizer.state[parameter]["momentum"].zero_()  # what was not sent
    optimizer.step()
    away = [
        (bucket.flat_momentum.gather(1, of.positions) - 0.5 * of.values).abs().max().item()
        for bucket, of in zip(optimizer._rounds.segments[0].route.buckets, sent, strict=False)
    ]
    finite = all(bool(torch.isfinite(momentum).all()) for momentum in problems.momenta(optimizer))
    return optimizer.fingerprint() == begun and optimizer.stats.skipped, finite, max(away, default=0.0)


def test_what_a_skipped_round_had_sent_comes_back() -> None:
    for skipped, finite, away in ranks.threads(_not_finite, 2):
        assert skipped
        assert finite
        assert away < 1e-6


def _fails_once(exchange: Exchange) -> list[int]:
    link = problems.FailsWhenDue(exchange)
    optimizer = _optimizer(link, delay=1, route="gather")
    problems.train(optimizer, range(2), exchange.rank)
    problems.set_gradients(problems.all_parameters(optimizer), 2, exchange.rank)
    assert optimizer._rounds._late is not None
    optimizer._rounds._late.settle()
    link.due = True
    optimizer.step()  # applies round 1, sends round 2
    before = optimizer.fingerprint()
    with pytest.raises(ExchangeError, match="step 2: the link is down"):
        optimizer.step()
    assert optimizer.fingerprint() == before
    optimizer.resync(0)
    return problems.train(optimizer, range(3, 6), exchange.rank).fingerprints


def test_a_failed_exchange_is_told_a_step_later_and_training_goes_on() -> None:
    marks = ranks.threads(_fails_once, 2)
    assert marks[0] == marks[1]
    assert len(set(marks[0])) == 3


def _changed(exchange: Exchange) -> list[int]:
    optimizer = _optimizer(exchange, delay=1)
    marks = problems.train(optimizer, range(2), exchange.rank).fingerprints
    optimizer.param_groups[0]["top_k"] = 7
    return marks + problems.train(optimizer, range(2, 5), exchange.rank).fingerprints


def test_settings_can_change_with_an_exchange_under_way() -> None:
    marks = ranks.threads(_changed, 2)
    assert marks[0] == marks[1]


@pytest.mark.parametrize("route", ["gather", "owner", "relay", "shared"])
def test_a_state_can_hold_what_is_under_way(route: str) -> None:
    values = {"values": "float32"} if route == "shared" else {}
    for whole, resumed in ranks.threads(_saved_under_way, 2, {"route": route, "relay_top_k": 9, "delay": 1, **values}):
        assert resumed == whole


def _saved_under_way(exchange: Exchange, settings: dict[str, Any]) -> tuple[list[int], list[int]]:
    optimizer = _optimizer(exchange, **settings)
    problems.train(optimizer, range(3), exchange.rank)
    saved = copy.deepcopy(optimizer.state_dict(under_way=True))
    parameters = [p.detach().clone() for p in problems.all_parameters(optimizer)]
    resumed = _optimizer(exchange, **settings)
    with torch.no_grad():
        for parameter, value in zip(problems.all_parameters(resumed), parameters, strict=True):
            parameter.copy_(value)
    resumed.load_state_dict(saved)
    marks = []
    for each in (optimizer, resumed):  # one after the other, on the same exchange
        found = problems.train(each, range(3, 6), exchange.rank).fingerprints
        each.flush()
        marks.append([*found, each.fingerprint()])
    return marks[0], marks[1]


def test_a_state_with_something_under_way_wants_delay_and_the_same_settings() -> None:
    optimizer = _optimizer(delay=1)
    problems.train(optimizer, range(2))
    saved = optimizer.state_dict(under_way=True)
    with pytest.raises(ValueError, match=r"saved with delay=1 .* flush\(\)"):
        _optimizer().load_state_dict(saved)
    saved["late"]["message"] = saved["late"]["message"][:-8]
    with pytest.raises(ValueError, match="bytes under way"):
        _optimizer(delay=1).load_state_dict(saved)


def _counted(exchange: Exchange) -> list[int]:
    optimizer = _optimizer(Delay(exchange, latency_seconds=0.01), delay=1, route="owner")
    received = []
    for step in range(4):
        problems.train(optimizer, range(step, step + 1), exchange.rank)
        received.append(optimizer.stats.received_bytes)
    optimizer.flush()
    return [*received, optimizer.stats.received_bytes]


def test_bytes_are_those_of_the_exchange_that_was_applied() -> None:
    for first, *others in ranks.threads(_counted, 2):
        assert first == 0
        assert len(set(others)) == 1


def test_delay_is_a_gradient_of_one_step_ago() -> None:
    """An update a step late is the same training as gradients taken where the parameters were a step before."""

    def trained(late: bool) -> int:
        weight, before = (torch.nn.Parameter(problems.draw((9, 7), 1)) for _ in range(2))
        optimizer = DeMo([weight], **{**problems.SMALL, "delay": int(late)})
        for step in range(8):
            seen = weight if late else before
            error = problems.draw((5, 9), 2, step) @ seen - problems.draw((5, 7), 3, step)
            (weight.grad,) = torch.autograd.grad(error.square().sum(), seen)
            before.data.copy_(weight.data)
            optimizer.step()
        optimizer.flush()
        return optimizer.fingerprint()

    assert trained(late=True) == trained(late=False)
