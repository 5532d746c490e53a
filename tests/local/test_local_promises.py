"""What DeMo promises, LocalDeMo keeps: replicas, state, failures, gradients that are not finite, groups, schedules."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import problems
import ranks
from demopt import DeMo, ExchangeError, LocalDeMo, SettingsError
from demopt.exchange import Exchange

SETTINGS: dict[str, Any] = {"sync_every": 3, "top_k": 24, "chunk": 16}


def make(exchange: Any = None, shapes: Any = problems.FEW, **settings: Any) -> LocalDeMo:
    inner = torch.optim.AdamW(problems.parameters(shapes), lr=0.01)
    return LocalDeMo(inner, **{**SETTINGS, **settings}, process_group=exchange)


def train(optimizer: LocalDeMo, steps: range, rank: int = 0) -> list[int]:
    """Returns the fingerprint of the shared weights after each step."""
    marks = []
    for step in steps:
        problems.set_gradients(problems.all_parameters(optimizer), step, rank)
        optimizer.step()
        marks.append(optimizer.fingerprint())
    return marks


def values(optimizer: LocalDeMo) -> list[Tensor]:
    return [p.detach().clone() for p in problems.all_parameters(optimizer)]


# Replicas and rounds


def _replica(exchange: Exchange, settings: dict[str, Any]) -> tuple[list[int], list[Tensor], list[Tensor]]:
    optimizer = make(exchange, **settings)
    marks = train(optimizer, range(7), exchange.rank)
    between = values(optimizer)
    return marks + train(optimizer, range(7, 9), exchange.rank), between, values(optimizer)


@pytest.mark.parametrize("settings", [{}, {"route": "relay"}, {"values": "2-bit"}, {"outer_momentum": 0.5}], ids=str)
def test_weights_are_equal_after_a_round_and_differ_between(settings: dict[str, Any]) -> None:
    first, *others = ranks.threads(_replica, 3, settings)
    for marks, between, after in others:
        assert marks == first[0]
        assert problems.same(after, first[2])
        assert not problems.same(between, first[1])


def _over_gloo(rank: int, world_size: int, delay: int) -> list[int]:
    optimizer = make(None, delay=delay, fingerprint_every=1)
    marks = train(optimizer, range(8), rank)
    optimizer.flush()
    return [*marks, optimizer.fingerprint()]


@pytest.mark.parametrize("delay", [0, 1])
def test_shared_weights_are_equal_between_processes(delay: int) -> None:
    marks = ranks.run(_over_gloo, 3, delay)
    assert marks[0] == marks[1] == marks[2]
    assert len(set(marks[0])) >= 3


def _lengths(exchange: Exchange) -> list[int]:
    recorder = problems.Recorder(exchange)
    optimizer = make(recorder)
    found = []
    for step in range(6):
        before = len(recorder.lengths)
        train(optimizer, range(step, step + 1), exchange.rank)
        found.append(len(recorder.lengths) - before)
        assert (optimizer.stats.sent_bytes > 0) == (step in (2, 5))
    return found[1:]


def test_steps_between_rounds_use_no_network() -> None:
    for found in ranks.threads(_lengths, 2):
        assert found == [0, 1, 0, 0, 1]


def _from_other_weights(exchange: Exchange) -> list[Tensor]:
    optimizer = LocalDeMo(
        torch.optim.SGD(problems.parameters(problems.FEW, seed=exchange.rank), lr=0.0),
        **SETTINGS,
        process_group=exchange,
    )
    train(optimizer, range(1), exchange.rank)
    return values(optimizer)


@pytest.mark.filterwarnings("ignore:initial parameters")
def test_other_initial_weights_become_rank_0s_before_the_first_step() -> None:
    first, second = ranks.threads(_from_other_weights, 2)
    assert problems.same(first, second)
    assert problems.same(first, [p.detach() for p in problems.parameters(problems.FEW)])


def _other_setting(exchange: Exchange) -> str:
    optimizer = make(exchange, sync_every=3 + exchange.rank)
    with pytest.raises(SettingsError) as caught:
        train(optimizer, range(1), exchange.rank)
    return str(caught.value)


def test_another_sync_every_is_named_at_the_first_step() -> None:
    for said in ranks.threads(_other_setting, 2):
        assert "rank 1 has sync_every = 4 where rank 0 has 3" in said


def _synchronised(exchange: Exchange) -> None:
    train(make(exchange), range(1), rank=0)


def test_gradients_that_something_else_synchronises_are_noticed() -> None:
    with pytest.warns(UserWarning, match="all 2 ranks have bit-identical gradients"):
        ranks.threads(_synchronised, 2)


# State


def _resumed(exchange: Exchange, at: int, settings: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    whole = make(exchange, **settings)
    train(whole, range(at), exchange.rank)
    for sent in whole._codec._in_flight:
        sent.wait()  # the other optimizer uses the same exchange
    with whole.shared():
        weights, state = values(whole), copy.deepcopy(whole.state_dict(in_flight=True))
    found = []
    for optimizer in (whole, make(exchange, **settings)):
        if optimizer is not whole:
            with torch.no_grad():
                for parameter, value in zip(problems.all_parameters(optimizer), weights, strict=True):
                    parameter.copy_(value)
            optimizer.load_state_dict(state)
        train(optimizer, range(at, 11), exchange.rank)
        optimizer.flush()
        found.append(values(optimizer))
    return found[0], found[1]


@pytest.mark.parametrize("settings", [{}, {"delay": 1}, {"outer_momentum": 0.5}, {"route": "relay"}], ids=str)
@pytest.mark.parametrize("at", [3, 4, 6])
def test_a_resumed_run_is_the_uninterrupted_one(at: int, settings: dict[str, Any]) -> None:
    for whole, resumed in ranks.threads(_resumed, 2, at, settings):
        assert problems.same(whole, resumed)


def test_state_dict_between_rounds_warns_once_outside_shared() -> None:
    optimizer = make()
    train(optimizer, range(1))
    with optimizer.shared():
        optimizer.state_dict()
    with pytest.warns(UserWarning, match="1 steps after the last round"):
        optimizer.state_dict()
    optimizer.state_dict()


def test_shared_gives_the_weights_of_the_last_round_and_takes_them_back() -> None:
    optimizer = make()
    train(optimizer, range(3))
    after = values(optimizer)
    train(optimizer, range(3, 4))
    own = values(optimizer)
    with optimizer.shared():
        assert problems.same(values(optimizer), after)
        with optimizer.shared():
            assert problems.same(values(optimizer), after)
        with pytest.raises(RuntimeError, match=r"inside `with optimizer\.shared"):
            optimizer.step()
    assert problems.same(values(optimizer), own)
    assert not problems.same(own, after)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_goes_on_as_the_original(duplicate: Any) -> None:
    optimizer = make()
    train(optimizer, range(4))
    twin = duplicate(optimizer)
    assert train(twin, range(4, 9)) == train(optimizer, range(4, 9))
    assert problems.same(values(twin), values(optimizer))


def test_a_state_of_another_optimizer_is_refused() -> None:
    optimizer = make()
    other = torch.optim.AdamW(problems.parameters(problems.FEW))
    with pytest.raises(ValueError, match="another optimizer saved it"):
        optimizer.load_state_dict(other.state_dict())


# Failures


def _fails_once(exchange: Exchange) -> tuple[list[int], bool]:
    link = problems.FailsWhenDue(exchange)
    optimizer = make(link)
    train(optimizer, range(5), exchange.rank)
    link.due = True
    problems.set_gradients(problems.all_parameters(optimizer), 5, exchange.rank)
    before = optimizer.fingerprint()
    with pytest.raises(ExchangeError, match="the link is down"):
        optimizer.step()
    kept = optimizer.fingerprint() == before and optimizer.due
    return train(optimizer, range(6, 8), exchange.rank), kept


def test_a_failed_round_is_made_up_by_the_next() -> None:
    (first, kept), (second, also) = ranks.threads(_fails_once, 2)
    assert first == second
    assert kept
    assert also


def _rolled_back(exchange: Exchange, failed: bool) -> list[Tensor]:
    """Everything is sent, so that a round more or less must not matter, if nothing is lost or sent twice."""
    optimizer = make(exchange, sync_every=100, top_k=256, values="float64", shapes=[(32, 16), (20,)], error_decay=0.5)
    train(optimizer, range(2), exchange.rank)
    if failed:
        optimizer.extract()
        optimizer.rollback()
    train(optimizer, range(2, 4), exchange.rank)
    optimizer.apply(optimizer.exchange(optimizer.extract()))
    return values(optimizer)


def test_rollback_neither_loses_nor_doubles_a_movement() -> None:
    plain, failed = (ranks.threads(_rolled_back, 2, failed) for failed in (False, True))
    for mine, theirs in zip(failed[0], plain[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def _not_finite(exchange: Exchange, where: str) -> tuple[list[int], list[bool], bool]:
    optimizer = make(exchange)
    marks, skipped = [], []
    for step in range(9):
        parameters = problems.all_parameters(optimizer)
        problems.set_gradients(parameters, step, exchange.rank)
        if exchange.rank == 1 and step == 4:
            if where == "gradient":
                parameters[0].grad[0] = float("nan")  # type: ignore[index]
            else:
                parameters[0].data[0] = float("nan")
        optimizer.step()
        marks.append(optimizer.fingerprint())
        skipped.append(optimizer.stats.skipped)
    return marks, skipped, all(bool(torch.isfinite(value).all()) for value in values(optimizer))


@pytest.mark.parametrize("where", ["gradient", "weights"])
def test_nothing_infinite_reaches_the_shared_weights(where: str) -> None:
    (first, skipped, finite), (second, _, also) = ranks.threads(_not_finite, 2, where)
    assert first == second
    assert finite
    assert also
    assert skipped == [False] * 5 + [where == "weights"] + [False] * 3
    assert len(set(first)) == (2 if where == "weights" else 3) + 1


# Use as any optimizer


def test_schedulers_set_the_inner_rates() -> None:
    optimizer = make()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(optimizer, range(1))
    schedule.step()
    assert optimizer.inner[0].param_groups[0]["lr"] == 0.005
    assert optimizer.param_groups[0] is optimizer.inner[0].param_groups[0]


def test_a_list_of_optimizers_steps_all_of_them() -> None:
    matrix, vector = Parameter(torch.ones(4, 4)), Parameter(torch.ones(4))
    inner: list[torch.optim.Optimizer] = [torch.optim.SGD([matrix], lr=0.5), torch.optim.AdamW([vector], lr=0.1)]
    optimizer = LocalDeMo(inner, sync_every=1, top_k=4096, values="float32")
    matrix.grad, vector.grad = torch.ones(4, 4), torch.ones(4)
    optimizer.step()
    assert len(optimizer.param_groups) == 2
    assert float(matrix.detach().mean()) == pytest.approx(0.5)
    assert float(vector.detach().mean()) < 1


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    optimizer, calls = make(), []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        problems.set_gradients(problems.all_parameters(optimizer), 0)
        return 2.5

    assert optimizer.step(closure) == 2.5
    assert calls == [True]


def test_a_grad_scaler_s_infinite_step_still_counts() -> None:
    optimizer: Any = make()
    before = values(optimizer)
    problems.set_gradients(problems.all_parameters(optimizer), 0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    optimizer.step()
    assert optimizer.local_steps == 1
    assert problems.same(values(optimizer), before)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    optimizer.step()
    assert not problems.same(values(optimizer), before)


def test_bfloat16_parameters_have_float32_shared_weights() -> None:
    parameters = problems.parameters([(32, 16)], dtype=torch.bfloat16)
    optimizer = LocalDeMo(torch.optim.SGD(parameters, lr=1e-3), sync_every=2, top_k=64, chunk=16)
    train(optimizer, range(4))
    entry = optimizer.state_dict()["state"][0]
    assert entry["shared"].dtype == entry["error"].dtype == torch.float32
    assert torch.equal(entry["shared"].to(torch.bfloat16), parameters[0].detach())


def test_frozen_parameters_stay_and_late_unfreezing_works() -> None:
    optimizer = make()
    first, *_ = problems.all_parameters(optimizer)
    first.requires_grad_(False)
    before = first.detach().clone()
    train(optimizer, range(3))
    first.grad = None
    assert torch.equal(first, before)
    first.requires_grad_(True)
    train(optimizer, range(3, 6))
    assert not torch.equal(first, before)


def test_a_group_can_be_added_after_a_round() -> None:
    optimizer = make()
    train(optimizer, range(3))
    added = Parameter(torch.ones(6, 6))
    optimizer.add_param_group({"params": [added], "lr": 0.1})
    train(optimizer, range(3, 6))
    assert not torch.equal(added.detach(), torch.ones(6, 6))
    assert optimizer.inner[0].param_groups[1] is optimizer.param_groups[1]


@pytest.mark.parametrize(
    ("inner", "settings", "error", "said"),
    [
        (None, {}, TypeError, "inner is a NoneType; give a torch optimizer"),
        ([], {}, ValueError, "inner is an empty list"),
        ("demo", {}, TypeError, "which synchronises the ranks itself"),
        ("sgd", {"sync_every": 0}, ValueError, "sync_every is 0"),
        ("sgd", {"sync_every": 2.0}, ValueError, "sync_every is 2.0"),
        ("sgd", {"error_decay": 1.0}, ValueError, r"error_decay is 1.0; it must lie in \[0, 1\)"),
        ("sgd", {"topk": 3}, TypeError, "LocalDeMo has no topk; give top_k"),
        ("sgd", {"overlap": 2}, TypeError, "LocalDeMo has no overlap; give delay=1"),
        ("sgd", {"route": "owner"}, ValueError, "a movement needs its sizes; use route 'auto'"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(inner: Any, settings: dict[str, Any], error: type[Exception], said: str) -> None:
    parameters = [Parameter(torch.zeros(4, 4))]
    made = {"demo": lambda: DeMo(parameters), "sgd": lambda: torch.optim.SGD(parameters, lr=0.1)}
    with pytest.raises(error, match=said):
        LocalDeMo(made[inner]() if isinstance(inner, str) else inner, **settings)


def test_a_model_learns_in_two_processes() -> None:
    first, second = ranks.run(_learns, 2)
    assert first == second
    assert first[-1] < 0.3 * first[0]


def _learns(rank: int, world_size: int) -> list[float]:
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 1))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(problems.draw(parameter.shape, index) / 5)
    optimizer = LocalDeMo(torch.optim.AdamW(model.parameters(), lr=1e-2), sync_every=5, top_k=400)
    test, losses = problems.draw((64, 20), 7), []
    for step in range(60):
        inputs = problems.draw((16, 20), step, rank)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :3].sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if (step + 1) % 20 == 0 or step == 0:
            with optimizer.shared(), torch.no_grad():
                losses.append(float((model(test) - test[:, :3].sum(1, keepdim=True)).square().mean()))
    return losses
