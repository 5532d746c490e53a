"""extract, exchange, apply and rollback; detached rounds; and the stats of a step."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import problems
import ranks
from demopt import DeMo, ExchangeError, LocalDeMo, MessageError, Stats
from demopt.exchange import Delay, Exchange, SingleRank, thread_exchanges
from oracles import reference


class Unplugged(SingleRank):
    """Fails while `broken`."""

    def __init__(self) -> None:
        self.broken = True

    def all_gather(self, message_B: Tensor) -> Tensor:
        if self.broken:
            raise ExchangeError("the cable is out")
        return super().all_gather(message_B)


def _optimizer(exchange: Exchange | None = None, **more: Any) -> DeMo:
    settings = {**problems.SMALL, "values": "float64", "weight_decay": 0.1, "route": "gather", **more}
    return DeMo(problems.parameters(problems.FEW, torch.float64), **settings, process_group=exchange)


def test_step_equals_extract_exchange_apply() -> None:
    whole, cut = _optimizer(), _optimizer()
    for step in range(3):
        problems.train(whole, [step])
        problems.set_gradients(problems.all_parameters(cut), step)
        cut.apply(cut.exchange(cut.extract()))
    assert whole.fingerprint() == cut.fingerprint()
    assert problems.same(problems.momenta(whole), problems.momenta(cut))


def test_extract_and_apply_need_no_network_and_extract_changes_no_parameter() -> None:
    optimizer, plain = _optimizer(Unplugged()), _optimizer()
    for step in range(2):
        problems.set_gradients(problems.all_parameters(optimizer), step)
        before = optimizer.fingerprint()
        message = optimizer.extract()
        assert (message.dtype, message.dim()) == (torch.uint8, 1)
        assert optimizer.fingerprint() == before
        optimizer.apply(message.unsqueeze(0))
    problems.train(plain, range(2))
    assert optimizer.fingerprint() == plain.fingerprint()


def test_extract_message_length_ignores_data() -> None:
    lengths = set()
    for scale in (0.0, 1e-30, 1.0, 1e30):
        optimizer = _optimizer(values="float32")
        for parameter in problems.all_parameters(optimizer):
            parameter.grad = scale * problems.draw(parameter.shape, 1, dtype=torch.float64)
        lengths.add(optimizer.extract().numel())
    assert len(lengths) == 1


# Nothing leaves the momentum before apply


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("settings", [{}, {"alpha": 0.2, "values": "sign", "exact": None}], ids=str)
def test_after_rollback_the_momentum_is_exactly_b_z_plus_s_t_g(
    settings: dict[str, Any], dtype: torch.dtype, kernels: str
) -> None:
    optimizer = DeMo(problems.parameters(problems.FEW, dtype), **problems.SMALL, **settings, kernels=kernels)
    problems.train(optimizer, range(2))
    parameters, group = problems.all_parameters(optimizer), optimizer.param_groups[0]
    before = problems.momenta(optimizer)
    problems.set_gradients(parameters, 2)
    optimizer.extract()
    extracted = problems.momenta(optimizer)
    optimizer.rollback()
    assert problems.same(problems.momenta(optimizer), extracted), "extract took nothing out, rollback put nothing back"
    for parameter, old in zip(parameters, before, strict=True):
        want = reference.accumulate(oracle.dense(old, parameter, group), parameter.grad, group)
        got = oracle.dense(optimizer.state[parameter]["momentum"], parameter, group)
        tolerance = 1e-12 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def test_vetoed_round_is_sent_later() -> None:
    """Extract, roll back, then a step without a gradient: the residual goes out, decayed once more."""
    vetoed, scaled = _optimizer(update="sgd"), _optimizer(update="sgd")
    problems.set_gradients(problems.all_parameters(vetoed), 0)
    vetoed.extract()
    vetoed.rollback()
    vetoed.rollback()
    vetoed.zero_grad()
    vetoed.step()
    problems.set_gradients(problems.all_parameters(scaled), 0)
    for parameter in problems.all_parameters(scaled):
        assert parameter.grad is not None
        parameter.grad.mul_(problems.SMALL["momentum_decay"])
    scaled.step()
    for got, want in zip(problems.all_parameters(vetoed), problems.all_parameters(scaled), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_failed_exchange_is_undone_and_training_goes_on() -> None:
    exchange = Unplugged()
    optimizer, twin = _optimizer(exchange), _optimizer()
    problems.set_gradients(problems.all_parameters(optimizer), 0)
    before = optimizer.fingerprint()
    with pytest.raises(ExchangeError, match="step 0: the cable is out"):
        optimizer.step()
    assert optimizer.fingerprint() == before
    problems.set_gradients(problems.all_parameters(twin), 0)
    twin.extract()
    twin.rollback()
    assert problems.same(problems.momenta(optimizer), problems.momenta(twin))
    exchange.broken = False
    assert problems.same_history(problems.train(optimizer, range(1, 3)), problems.train(twin, range(1, 3)))


def _with_random_failures(exchange: Exchange) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What was applied, the momenta, and the sum of all gradients of this rank, for each parameter."""
    link, failures = problems.FailsWhenDue(exchange), torch.Generator().manual_seed(4)
    linear = {"gradient_scale": "lr", "momentum_decay": 1 - 1e-15, "reduction": "mean", "update": "sgd"}
    parameters = problems.parameters(problems.FEW, torch.float64)
    optimizer = DeMo(parameters, **{**problems.SMALL, **linear, "values": "2-bit"}, process_group=link)
    group, lr = optimizer.param_groups[0], problems.SMALL["lr"]
    start = [parameter.detach().clone() for parameter in parameters]
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for step in range(30):
        problems.set_gradients(parameters, step, exchange.rank)
        for each, parameter in zip(total, parameters, strict=True):
            assert parameter.grad is not None
            each += lr * parameter.grad
        fate = int(torch.randint(4, (1,), generator=failures))
        if fate == 0:
            link.due = True
            with pytest.raises(ExchangeError):
                optimizer.step()
        elif fate == 1:
            optimizer.extract()
            optimizer.rollback()
        else:
            optimizer.step()
    applied = [(begun - p.detach()) / lr for begun, p in zip(start, parameters, strict=True)]
    momenta = [reference.unpad(oracle.dense(optimizer.state[p]["momentum"], p, group), p) for p in parameters]
    return applied, momenta, total


def test_no_gradient_is_lost_or_counted_twice_over_random_failures() -> None:
    """With a linear rule and no decay, W times the applied updates plus all momenta is the sum of all gradients."""
    of_ranks = ranks.threads(_with_random_failures, 3)
    for number in range(len(problems.FEW)):
        applied = 3 * of_ranks[0][0][number]
        left = sum(momenta[number] for _, momenta, _ in of_ranks)
        assert applied.any()
        torch.testing.assert_close(applied + left, sum(total[number] for *_, total in of_ranks), rtol=0, atol=1e-10)


def test_extract_twice_raises_with_advice() -> None:
    optimizer = _optimizer()
    problems.set_gradients(problems.all_parameters(optimizer), 0)
    optimizer.extract()
    for forbidden in (optimizer.extract, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="apply or rollback first"):
            forbidden()
    optimizer.rollback()
    optimizer.extract()


# Replay: a rank that extracted nothing


@pytest.mark.parametrize("route", ["gather", "owner"])
def test_rank_that_extracted_nothing_follows_by_apply_alone(route: str) -> None:
    """Its parameters become those of the ranks that trained; its momentum stays as it was."""

    def run(exchange: Exchange) -> tuple[list[Tensor], int]:
        optimizer, results = _optimizer(exchange, route=route), []
        for step in range(3):
            problems.set_gradients(problems.all_parameters(optimizer), step, exchange.rank)
            results.append(optimizer.exchange(optimizer.extract()).clone())
            optimizer.apply(results[-1])
        return results, optimizer.fingerprint(state=True)

    results, mark = ranks.threads(run, 2)[0]
    watcher = _optimizer(thread_exchanges(2)[1], route=route)
    for messages in results:
        damaged = messages.clone()
        damaged[0, -1] ^= 1
        with pytest.raises(MessageError):
            watcher.apply(damaged)
        watcher.apply(messages)
    assert watcher.fingerprint(state=True) == mark
    assert not any(momentum.any() for momentum in problems.momenta(watcher))
    watcher.state_dict()


def test_refused_replay_leaves_no_round_open() -> None:
    optimizer = _optimizer()
    with pytest.raises(MessageError):
        optimizer.apply(torch.zeros(1, 64, dtype=torch.uint8))
    optimizer.state_dict()
    problems.train(optimizer, range(1))


# Detached rounds

Made = tuple[Any, torch.nn.Parameter]


def _demo(parameter: torch.nn.Parameter, exchange: Exchange) -> DeMo:
    return DeMo([parameter], lr=0.1, update="sgd", process_group=exchange)


def _local(parameter: torch.nn.Parameter, exchange: Exchange) -> LocalDeMo:
    return LocalDeMo(torch.optim.SGD([parameter], lr=0.5), sync_every=2, top_k=4, process_group=exchange)


def _made(make: Callable[..., Any], exchange: Exchange, seed: int = 0) -> Made:
    (parameter,) = problems.parameters([(20, 12)])
    parameter.grad = problems.draw((20, 12), seed)
    optimizer = make(parameter, exchange)
    if isinstance(optimizer, LocalDeMo):
        optimizer.local_step()
    return optimizer, parameter


def _outcome(optimizer: Any, parameter: torch.nn.Parameter) -> list[Tensor]:
    state = optimizer.state[parameter]
    return [parameter.detach().clone(), state.get("momentum", state.get("error")).clone()]


@pytest.mark.parametrize("make", [_demo, _local])
def test_check_refuses_like_apply_and_changes_nothing(make: Callable[..., Any]) -> None:
    optimizer, parameter = _made(make, SingleRank())
    messages = optimizer.exchange(optimizer.extract()).clone()
    before, others = _outcome(optimizer, parameter), messages.clone()
    messages[0, -1] ^= 1
    with pytest.raises(MessageError):
        optimizer.replicator.check(messages)
    messages[0, -1] ^= 1
    optimizer.replicator.check(messages)
    messages[0, -1] ^= 1  # after it was checked
    with pytest.raises(MessageError):
        optimizer.apply(messages)
    messages[0, -1] ^= 1
    others[0, -1] ^= 1
    while messages._version != others._version:
        min(messages, others, key=lambda each: each._version).add_(0)
    optimizer.replicator.check(messages)
    with pytest.raises(MessageError):  # another tensor, changed as often
        optimizer.apply(others)
    assert problems.same(_outcome(optimizer, parameter), before)


@pytest.mark.parametrize("make", [_demo, _local])
def test_attached_round_among_fewer_ranks_is_the_round_that_they_would_have_had(make: Callable[..., Any]) -> None:
    fewer = thread_exchanges(2)

    def lose_one(exchange: Exchange) -> list[Tensor]:
        optimizer, parameter = _made(make, exchange, exchange.rank)
        optimizer.extract()
        detached = optimizer.replicator.detach_round()
        if exchange.rank == 2:
            return []
        optimizer.regroup(fewer[exchange.rank])
        optimizer.apply(optimizer.exchange(optimizer.replicator.attach_round(detached)))
        return _outcome(optimizer, parameter)

    def calm(exchange: Exchange) -> list[Tensor]:
        optimizer, parameter = _made(make, exchange, exchange.rank)
        optimizer.apply(optimizer.exchange(optimizer.extract()))
        return _outcome(optimizer, parameter)

    for one, other in zip(ranks.threads(lose_one, 3)[:2], ranks.threads(calm, 2), strict=True):
        assert problems.same(one, other)


def test_attached_round_still_says_that_a_gradient_was_not_finite() -> None:
    def attached(exchange: Exchange) -> bool:
        optimizer, parameter = _made(_demo, exchange, exchange.rank)
        before = parameter.detach().clone()
        if exchange.rank == 1:
            assert parameter.grad is not None
            parameter.grad[3, 4] = float("nan")
        optimizer.extract()
        detached = optimizer.replicator.detach_round()
        optimizer.regroup(exchange)
        optimizer.apply(optimizer.exchange(optimizer.replicator.attach_round(detached)))
        return optimizer.stats.skipped and torch.equal(parameter, before)

    assert ranks.threads(attached, 2) == [True, True]


@pytest.mark.parametrize("make", [_demo, _local])
def test_attached_round_that_is_rolled_back_is_sent_later(make: Callable[..., Any]) -> None:
    found = []
    for detach in (True, False):
        optimizer, parameter = _made(make, SingleRank())
        optimizer.extract()
        if detach:
            detached = optimizer.replicator.detach_round()
            optimizer.regroup(SingleRank())
            optimizer.replicator.attach_round(detached)
        optimizer.rollback()
        optimizer.apply(optimizer.exchange(optimizer.extract()))
        found.append(_outcome(optimizer, parameter))
    assert problems.same(*found)


@pytest.mark.parametrize("make", [_demo, _local])
def test_round_marked_as_applied_has_left_the_momentum(make: Callable[..., Any]) -> None:
    (marked, one), (applied, other) = _made(make, SingleRank()), _made(make, SingleRank())
    marked.extract()
    marked.replicator.mark_applied(marked.replicator.detach_round())
    applied.apply(applied.exchange(applied.extract()))
    assert torch.equal(_outcome(marked, one)[1], _outcome(applied, other)[1])
    applied.replicator.forget()
    assert not _outcome(applied, other)[1].any()


def test_round_in_the_background_cannot_be_detached() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    inner = torch.optim.SGD([parameter], lr=0.1)
    optimizer = LocalDeMo(inner, delay=1, process_group=SingleRank())
    optimizer.extract()
    with pytest.raises(ValueError, match="delay=0"):
        optimizer.replicator.detach_round()


# Stats


def _stats_of_steps(rank: int, world_size: int) -> list[dict[str, Any]]:
    optimizer, found = _optimizer(values="float32"), []
    for step in range(3):
        problems.train(optimizer, [step], rank)
        found.append(dict(optimizer.stats))
    return found


def test_stats_over_gloo_agree_on_all_ranks() -> None:
    for of_rank in ranks.run(_stats_of_steps, 3):
        payload = of_rank[0]["payload_bytes"]
        for stats in of_rank:
            assert stats["payload_bytes"] == payload
            assert stats["kept"] == of_rank[0]["kept"] > 0
            assert stats["skipped"] is False
            assert set(stats["seconds"]) == {"extract", "exchange", "apply"}
            assert stats["sent_bytes"] == stats["received_bytes"] == 2 * payload


def test_stats_is_a_mapping() -> None:
    stats = Stats(payload_bytes=10)
    assert stats["payload_bytes"] == 10
    assert "lr" not in stats
    assert dict(stats) == vars(stats)
    with pytest.raises(KeyError):
        stats["lr"]


def test_stats_of_a_single_rank_count_kept_and_payload() -> None:
    optimizer = _optimizer(values="float32")
    assert dict(optimizer.stats)["payload_bytes"] == 0
    problems.train(optimizer, range(1))
    stats = optimizer.stats
    assert (stats.sent_bytes, stats.received_bytes) == (0, 0)
    # 32x16: two full chunks, 24 each; 17x19: four of 9x10, 8 each; 20: two of 1x10, 1 each; one element
    assert stats.kept == 2 * 24 + 4 * 8 + 2 * 1 + 1
    assert stats.payload_bytes < 64 + stats.kept * 5 + 16


def test_stats_seconds_count_a_slow_link_as_exchange() -> None:
    optimizer = _optimizer(Delay(SingleRank(), latency_seconds=0.05))
    begun = time.perf_counter()
    problems.train(optimizer, range(1))
    assert optimizer.stats.seconds["exchange"] >= 0.05
    assert sum(optimizer.stats.seconds.values()) <= time.perf_counter() - begun, "no other stage counts the wait too"
