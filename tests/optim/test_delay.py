"""Updates that come a step late: what is applied, when, and that nothing is lost."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import problems
import ranks
from demopt import DeMo, ExchangeError
from demopt.exchange import Delay, Exchange, SingleRank
from demopt.wire import frame


def _optimizer(exchange: Any = None, **settings: Any) -> DeMo:
    return DeMo(problems.parameters(problems.FEW), **{**problems.SMALL, **settings}, process_group=exchange)


@pytest.mark.parametrize("route", ["gather", "owner", "relay"])
def test_delay_applies_each_update_one_step_later(route: str) -> None:
    at_once, late = (ranks.threads(_route_late, 2, route, delay) for delay in (0, 1))
    start = problems.parameters(problems.FEW)
    initial = DeMo(start, lr=1.0).fingerprint()
    for (marks, end), (late_marks, late_end) in zip(at_once, late, strict=True):
        assert late_marks == [initial, *marks[:-1]]
        assert late_end == end == [marks[-1]]


def _route_late(exchange: Exchange, route: str, delay: int) -> tuple[list[int], list[int]]:
    """Gradients do not depend on the parameters, so a late update is the same update."""
    optimizer = _optimizer(exchange, route=route, delay=delay)
    marks = problems.train(optimizer, range(6), exchange.rank).fingerprints
    optimizer.flush()
    return marks, [optimizer.fingerprint()]


def _over_gloo(rank: int, world_size: int) -> list[int]:
    optimizer = _optimizer(None, delay=1, fingerprint_every=2)
    marks = problems.train(optimizer, range(5), rank).fingerprints
    optimizer.flush()
    assert optimizer.stats.received_bytes > 0
    return [*marks, optimizer.fingerprint()]


def test_delay_over_gloo_keeps_replicas_equal() -> None:
    marks = ranks.run(_over_gloo, 3)
    assert all(each == marks[0] for each in marks)
    assert len(set(marks[0])) == 6


def test_delay_saving_needs_flush_and_resumes_exactly() -> None:
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
    (late,) = optimizer._in_flight
    assert late.outgoing[0] is not None
    sent = late.outgoing[0].selected
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        optimizer.state[parameter]["momentum"].zero_()  # what was not sent
    optimizer.step()
    away = [
        (chunk_group.flat_momentum.gather(1, of.positions) - 0.5 * of.values).abs().max().item()
        for chunk_group, of in zip(late.plan.buckets[0].route.chunk_groups, sent, strict=False)
    ]
    finite = all(bool(torch.isfinite(momentum).all()) for momentum in problems.momenta(optimizer))
    return optimizer.fingerprint() == begun and optimizer.stats.skipped, finite, max(away, default=0.0)


def test_delay_returns_what_a_skipped_round_sent() -> None:
    for skipped, finite, away in ranks.threads(_not_finite, 2):
        assert skipped
        assert finite
        assert away < 1e-6


def _fails_once(exchange: Exchange) -> list[int]:
    link = problems.FailsWhenDue(exchange)
    optimizer = _optimizer(link, delay=1, route="gather")
    problems.train(optimizer, range(2), exchange.rank)
    problems.set_gradients(problems.all_parameters(optimizer), 2, exchange.rank)
    assert optimizer._in_flight
    optimizer._in_flight[0].wait()
    link.due = True
    optimizer.step()  # applies round 1, sends round 2
    before = optimizer.fingerprint()
    with pytest.raises(ExchangeError, match="step 2: the link is down"):
        optimizer.step()
    assert optimizer.fingerprint() == before
    optimizer.resync(0)
    return problems.train(optimizer, range(3, 6), exchange.rank).fingerprints


def test_delay_reports_failed_exchange_one_step_later() -> None:
    marks = ranks.threads(_fails_once, 2)
    assert marks[0] == marks[1]
    assert len(set(marks[0])) == 3


def _changed(exchange: Exchange) -> list[int]:
    optimizer = _optimizer(exchange, delay=1)
    marks = problems.train(optimizer, range(2), exchange.rank).fingerprints
    optimizer.param_groups[0]["top_k"] = 7
    return marks + problems.train(optimizer, range(2, 5), exchange.rank).fingerprints


def test_delay_lets_settings_change_in_flight() -> None:
    marks = ranks.threads(_changed, 2)
    assert marks[0] == marks[1]


@pytest.mark.parametrize("route", ["gather", "owner", "relay"])
def test_delay_state_dict_can_hold_update_in_flight(route: str) -> None:
    for whole, resumed in ranks.threads(_saved_under_way, 2, {"route": route, "relay_top_k": 9, "delay": 1}):
        assert resumed == whole


def _saved_under_way(exchange: Exchange, settings: dict[str, Any]) -> tuple[list[int], list[int]]:
    optimizer = _optimizer(exchange, **settings)
    problems.train(optimizer, range(3), exchange.rank)
    saved = copy.deepcopy(optimizer.state_dict(in_flight=True))
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


@pytest.mark.parametrize(("delay", "world_size"), [(0, 1), (1, 2)])
def test_delay_returns_unsendable_loaded_update_to_momentum(delay: int, world_size: int) -> None:
    """Loaded without delay, or among other ranks: nothing is applied, and nothing of the gradient is lost."""
    others = SingleRank()
    others.world_size = world_size
    optimizer = _optimizer(delay=1)
    problems.train(optimizer, range(1))
    untouched = _optimizer()
    problems.set_gradients(problems.all_parameters(untouched), 0)
    untouched.extract()
    untouched.rollback()
    resumed = _optimizer(others, delay=delay)
    told = pytest.warns(UserWarning, match="saved by rank 0 of 1") if world_size > 1 else nullcontext()
    with told:
        resumed.load_state_dict(optimizer.state_dict(in_flight=True))
    assert problems.same(problems.momenta(resumed), problems.momenta(untouched))
    mark = resumed.fingerprint()
    resumed.flush()
    assert resumed.fingerprint() == mark


@pytest.mark.parametrize(
    ("damage", "settings", "said"),
    [
        (lambda late: late.pop("message"), {"delay": 1}, "missing or damaged"),
        (lambda late: late["header"][1].fill_(3), {"delay": 1}, "saved by rank 3 .* this is rank 0"),
        (lambda _: None, {"overlap": 2}, "overlap=0"),
    ],
)
def test_delay_refused_state_leaves_update_in_flight(damage: Any, settings: dict[str, Any], said: str) -> None:
    """ValueError, and the optimizer goes on as if load_state_dict had not been called."""
    other = _optimizer(delay=1)
    problems.train(other, range(4, 6))
    saved = copy.deepcopy(other.state_dict(in_flight=True))
    damage(saved["in_flight"])
    optimizer, twin = _optimizer(**settings), _optimizer(**settings)
    for each in (optimizer, twin):
        problems.train(each, range(2))
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(saved)
    for each in (optimizer, twin):
        each.flush()
    assert optimizer.fingerprint() == twin.fingerprint()
    assert problems.same_history(problems.train(optimizer, range(2, 4)), problems.train(twin, range(2, 4)))


class _Down(SingleRank):
    """A link that is down while `due`."""

    due = False

    def all_gather(self, message_B: Tensor) -> Tensor:
        if self.due:
            raise ExchangeError("the link is down")
        return super().all_gather(message_B)


def _after_a_failure(flushed: bool) -> DeMo:
    """Round 1 fails: in flush, or in the step after, which has extracted round 2 by then."""
    link = _Down()
    optimizer = _optimizer(link, delay=1, values="float32", momentum=0.5)
    problems.train(optimizer, range(1))
    optimizer.flush()
    link.due = True
    problems.train(optimizer, range(1, 2))
    fail = optimizer.flush if flushed else lambda: problems.train(optimizer, range(2, 3))
    with pytest.raises(ExchangeError):
        fail()
    return optimizer


@pytest.mark.parametrize("flushed", [True, False])
def test_delay_returns_what_a_failed_round_sent(flushed: bool) -> None:
    """As if neither it nor the round after, whose coefficients overlap with its own, had taken anything out."""
    twin = _optimizer(values="float32", momentum=0.5)
    problems.train(twin, range(1))
    for step in (1,) if flushed else (1, 2):
        problems.set_gradients(problems.all_parameters(twin), step)
        twin.extract()
        twin.rollback()
    found = problems.momenta(_after_a_failure(flushed))
    for mine, theirs in zip(found, problems.momenta(twin), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_delay_flush_returns_what_a_skipped_round_sent() -> None:
    """No gradient has come since, so it has not decayed either: bit for bit."""
    optimizer, twin = _optimizer(delay=1, momentum=0.5), _optimizer(momentum=0.5)
    for each in (optimizer, twin):
        problems.set_gradients(problems.all_parameters(each), 0)
    optimizer.step()
    (late,) = optimizer._in_flight
    assert late.outgoing[0] is not None
    late.outgoing[0].work = None  # as another rank's flag would come: the round is skipped by all
    message = late.outgoing[0].message
    header = replace(late.headers[0], flags=frame.NONFINITE)
    late.outgoing[0].message = frame.build(header, torch.zeros_like(message[frame.HEADER_BYTES :]))
    optimizer.flush()
    assert optimizer.stats.skipped
    twin.extract()
    twin.rollback()
    assert problems.same(problems.momenta(optimizer), problems.momenta(twin))


def _counted(exchange: Exchange) -> list[int]:
    optimizer = _optimizer(Delay(exchange, latency_seconds=0.01), delay=1, route="owner")
    received = []
    for step in range(4):
        problems.train(optimizer, range(step, step + 1), exchange.rank)
        received.append(optimizer.stats.received_bytes)
    optimizer.flush()
    return [*received, optimizer.stats.received_bytes]


def test_delay_counts_bytes_of_the_applied_exchange() -> None:
    for first, *others in ranks.threads(_counted, 2):
        assert first == 0
        assert len(set(others)) == 1


def test_delay_equals_gradients_of_one_step_ago() -> None:
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
