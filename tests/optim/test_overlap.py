"""Exchanges during backward: the same bits as without, gradient by gradient; and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import problems
import ranks
from demopt import DeMo, ExchangeError, SettingsError
from demopt.exchange import Exchange


def _model() -> nn.Sequential:
    return _drawn(nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 1)))


def _drawn(model: nn.Sequential) -> nn.Sequential:
    """With weights that do not come from torch's generator, which the threads share."""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(problems.draw(parameter.shape, index) / 5)
    return model


def _loss(model: nn.Module, step: int, rank: int, part: int = 0) -> Tensor:
    inputs = problems.draw((8, 20), step, rank, part)
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def _optimizer(model: nn.Module, process_group: Any, **settings: Any) -> DeMo:
    chosen = {**problems.SMALL, "chunk": 8, "top_k": 6, "weight_decay": 0.1, **settings}
    return DeMo(model.parameters(), process_group=process_group, **chosen)


def _trained(exchange: Exchange, settings: dict[str, Any], parts: int = 1) -> list[int]:
    model = _model()
    optimizer = _optimizer(model, exchange, **settings)
    marks = []
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        optimizer.zero_grad()
        with optimizer.no_sync():
            for part in range(parts - 1):
                _loss(model, step, exchange.rank, part).backward()
        _loss(model, step, exchange.rank, parts - 1).backward()
        if exchange.rank == 0 and step == 3:
            early = optimizer._round
            assert (early is not None) == (settings.get("overlap", 0) > 0), "sent during backward"
        optimizer.step()
        marks.append(optimizer.fingerprint())
    return marks


@pytest.mark.parametrize("route", ["gather", "owner", "relay"])
@pytest.mark.parametrize("buckets", [1, 3, 100])
@pytest.mark.parametrize("parts", [1, 3])
def test_overlap_gives_the_same_bits(route: str, buckets: int, parts: int) -> None:
    settings = {"route": route, "relay_top_k": 9, "fingerprint_every": 2}
    plain = ranks.threads(_trained, 3, settings, parts)
    overlapped = ranks.threads(_trained, 3, {**settings, "overlap": buckets}, parts)
    assert overlapped == plain
    assert all(marks == plain[0] for marks in plain)


def _over_gloo(rank: int, world_size: int, overlap: int) -> list[int]:
    """The user's own collectives on the default group, between backward and step, do not mix with DeMo's."""
    model = _model()
    optimizer = _optimizer(model, None, overlap=overlap)
    marks = []
    for step in range(5):
        optimizer.zero_grad()
        loss = _loss(model, step, rank)
        loss.backward()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        optimizer.step()
        marks.append(optimizer.fingerprint())
    assert optimizer.stats.received_bytes > 0
    return marks


def test_overlap_over_gloo_gives_the_same_bits() -> None:
    assert ranks.run(_over_gloo, 2, 3) == ranks.run(_over_gloo, 2, 0)


def _unused(exchange: Exchange, overlap: int) -> list[int]:
    """The middle layer is used on rank 0 alone."""
    model = _drawn(nn.Sequential(nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 1)))
    optimizer = _optimizer(model, exchange, overlap=overlap)
    marks = []
    for step in range(4):
        optimizer.zero_grad()
        used = model if exchange.rank == 0 else nn.Sequential(model[0], model[2])
        used(problems.draw((8, 20), step, exchange.rank)).square().mean().backward()
        optimizer.step()
        marks.append(optimizer.fingerprint())
    return marks


def test_overlap_sends_missing_gradients_in_step() -> None:
    assert ranks.threads(_unused, 2, 4) == ranks.threads(_unused, 2, 0)


def _not_finite(exchange: Exchange) -> list[bool]:
    model = _model()
    optimizer = _optimizer(model, exchange, overlap=3)
    skipped = []
    for step in range(4):
        before = optimizer.fingerprint()
        optimizer.zero_grad()
        loss = _loss(model, step, exchange.rank)
        (loss * float("nan") if step == 2 and exchange.rank == 1 else loss).backward()
        optimizer.step()
        skipped.append(optimizer.stats.skipped and optimizer.fingerprint() == before)
    assert all(bool(torch.isfinite(momentum).all()) for momentum in problems.momenta(optimizer))
    return skipped


def test_overlap_skips_on_all_ranks() -> None:
    assert ranks.threads(_not_finite, 2) == [[False, False, True, False]] * 2


def _resized(exchange: Exchange, overlap: int, resized: tuple[int, ...]) -> list[int]:
    """K changes between steps, on the ranks `resized`."""
    model = _model()
    optimizer = _optimizer(model, exchange, overlap=overlap)
    marks = []
    for step in range(5):
        if step == 2 and exchange.rank in resized:
            optimizer.param_groups[0]["top_k"] = 9
        optimizer.zero_grad()
        _loss(model, step, exchange.rank).backward()
        optimizer.step()
        marks.append(optimizer.fingerprint())
    return marks


def test_overlap_lets_settings_change_between_steps() -> None:
    assert ranks.threads(_resized, 2, 3, (0, 1)) == ranks.threads(_resized, 2, 0, (0, 1))


def _resized_alone(exchange: Exchange) -> str:
    with pytest.raises(SettingsError) as caught:
        _resized(exchange, 3, (1,))
    return str(caught.value)


def test_overlap_names_a_setting_changed_on_one_rank() -> None:
    for said in ranks.threads(_resized_alone, 2):
        assert "rank 1 has param_groups[0]['top_k'] = 9.0 where rank 0 has 6.0" in said


def _warm(**settings: Any) -> tuple[nn.Module, DeMo]:
    model = _model()
    optimizer = _optimizer(model, None, **settings)
    _loss(model, 0, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_overlap_notices_gradients_clipped_after_sending() -> None:
    model, optimizer = _warm(overlap=2)
    momenta = problems.momenta(optimizer)
    _loss(model, 1, 0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match=r"written after backward had sent it.*overlap=0"):
        optimizer.step()
    assert not problems.same(momenta, problems.momenta(optimizer)), "the gradients stay in the momentum"
    optimizer.zero_grad()
    _loss(model, 2, 0).backward()
    optimizer.step()


@pytest.mark.parametrize("applied", [True, False])
def test_overlap_allows_extract_exchange_apply_by_hand(applied: bool) -> None:
    model, optimizer = _warm(overlap=2)
    for step in (1, 2):
        optimizer.zero_grad()
        _loss(model, step, 0).backward()
        message = optimizer.extract()
        if applied:
            optimizer.apply(optimizer.exchange(message))
        else:
            optimizer.rollback()
    assert optimizer.state_dict()["state"][0]["step"] == (3 if applied else 1)


def test_overlap_refuses_second_backward_without_no_sync() -> None:
    model, optimizer = _warm(overlap=2)
    _loss(model, 1, 0).backward()
    with pytest.raises(RuntimeError, match="no_sync"):
        _loss(model, 1, 0).backward()
    optimizer.rollback()


def test_overlap_state_dict_raises_between_backward_and_step() -> None:
    model, optimizer = _warm(overlap=2)
    _loss(model, 1, 0).backward()
    with pytest.raises(RuntimeError, match="between extract and apply"):
        optimizer.state_dict()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"overlap": -1}, "overlap is -1"),
        ({"overlap": 1.5}, "overlap is 1.5"),
        ({"delay": 2}, "delay is 2"),
        ({"overlap": 2, "delay": 1}, "cannot be had together"),
    ],
)
def test_overlap_and_delay_refuse_invalid_values(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _optimizer(_model(), None, **settings)


def _fails_once(exchange: Exchange) -> list[int]:
    link = problems.FailsWhenDue(exchange)
    model = _model()
    optimizer = _optimizer(model, link, overlap=2, route="gather")
    marks = []
    for step in range(4):
        link.due = step == 2
        optimizer.zero_grad()
        _loss(model, step, exchange.rank).backward()
        before = optimizer.fingerprint()
        if step == 2:
            with pytest.raises(ExchangeError, match="step 2: the link is down"):
                optimizer.step()
            assert optimizer.fingerprint() == before
            continue
        optimizer.step()
        marks.append(optimizer.fingerprint())
    return marks


def test_overlap_step_raises_a_failure_of_the_background() -> None:
    marks = ranks.threads(_fails_once, 2)
    assert marks[0] == marks[1]
