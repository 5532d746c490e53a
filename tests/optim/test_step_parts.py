"""extract, exchange, apply and rollback, and the figures that they leave."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import problems
import ranks
from demopt import DeMo, ExchangeError, Stats
from demopt.exchange import Delay, Exchange, SingleRank


class _Unplugged(SingleRank):
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


def test_extract_and_apply_need_no_network() -> None:
    optimizer, plain = _optimizer(_Unplugged()), _optimizer()
    for step in range(2):
        problems.set_gradients(problems.all_parameters(optimizer), step)
        optimizer.apply(optimizer.extract().unsqueeze(0))
    problems.train(plain, range(2))
    assert optimizer.fingerprint() == plain.fingerprint()


def test_extract_changes_no_parameter() -> None:
    optimizer = _optimizer()
    before = optimizer.fingerprint()
    problems.set_gradients(problems.all_parameters(optimizer), 0)
    message = optimizer.extract()
    assert optimizer.fingerprint() == before
    assert (message.dtype, message.dim()) == (torch.uint8, 1)


@pytest.mark.parametrize("values", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("alpha", [1.0, 0.2])
def test_rollback_restores_the_momentum_exactly(values: str, alpha: float) -> None:
    """Bit for bit what accumulating alone gives, which K = all and a hair of alpha show: M = b M + s G."""
    optimizer = _optimizer(values=values, alpha=alpha)
    problems.train(optimizer, range(2))
    parameters = problems.all_parameters(optimizer)
    group = optimizer.param_groups[0]
    problems.set_gradients(parameters, 2)
    want = []
    for parameter in parameters:
        accumulated = oracle.dense(optimizer.state[parameter]["momentum"], parameter, group)
        truth = oracle.Oracle([{**group, "params": [parameter], "lr": 0.0, "alpha": 0.0}], 1)
        truth.momenta = [[accumulated]]
        truth.step([[parameter.grad]])
        want.append(truth.momenta[0][0])
    optimizer.extract()
    sent = problems.momenta(optimizer)
    optimizer.rollback()
    for parameter, momentum, after in zip(parameters, want, sent, strict=True):
        got = oracle.dense(optimizer.state[parameter]["momentum"], parameter, group)
        torch.testing.assert_close(got, momentum, rtol=1e-12, atol=1e-14)
        assert not torch.equal(optimizer.state[parameter]["momentum"], after)


def test_rollback_without_extract_does_nothing() -> None:
    optimizer = _optimizer()
    problems.train(optimizer, range(1))
    before = problems.momenta(optimizer)
    optimizer.rollback()
    optimizer.rollback()
    assert problems.same(problems.momenta(optimizer), before)
    problems.set_gradients(problems.all_parameters(optimizer), 1)
    optimizer.extract()
    optimizer.rollback()
    once = problems.momenta(optimizer)
    optimizer.rollback()
    assert problems.same(problems.momenta(optimizer), once)


def test_rollback_leaves_a_vetoed_round_to_be_sent_later() -> None:
    """Extract, roll back, then go on without a gradient: what was not sent goes out, decayed once more."""
    vetoed, delayed = _optimizer(update="sgd"), _optimizer(update="sgd")
    problems.set_gradients(problems.all_parameters(vetoed), 0)
    vetoed.extract()
    vetoed.rollback()
    vetoed.zero_grad()
    vetoed.step()
    problems.set_gradients(problems.all_parameters(delayed), 0)
    for parameter in problems.all_parameters(delayed):
        assert parameter.grad is not None
        parameter.grad.mul_(problems.SMALL["momentum"])
    delayed.step()
    for got, want in zip(problems.all_parameters(vetoed), problems.all_parameters(delayed), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_step_rolls_back_a_failed_exchange_and_goes_on() -> None:
    exchange = _Unplugged()
    optimizer = _optimizer(exchange)
    problems.set_gradients(problems.all_parameters(optimizer), 0)
    before = optimizer.fingerprint()
    with pytest.raises(ExchangeError, match="step 0: the cable is out"):
        optimizer.step()
    assert optimizer.fingerprint() == before
    twin = _optimizer()
    problems.set_gradients(problems.all_parameters(twin), 0)
    twin.extract()
    twin.rollback()
    assert problems.same(problems.momenta(optimizer), problems.momenta(twin))
    exchange.broken = False
    assert problems.same_history(problems.train(optimizer, range(1, 3)), problems.train(twin, range(1, 3)))


def test_extract_twice_raises_with_advice() -> None:
    optimizer = _optimizer()
    problems.set_gradients(problems.all_parameters(optimizer), 0)
    optimizer.extract()
    with pytest.raises(RuntimeError, match="apply or rollback first"):
        optimizer.extract()
    optimizer.rollback()
    optimizer.extract()


# Figures


def _figures(rank: int, world_size: int) -> list[dict[str, Any]]:
    optimizer = _optimizer(values="float32")
    found = []
    for step in range(3):
        problems.train(optimizer, [step], rank)
        found.append(dict(optimizer.stats))
    return found


def test_stats_over_gloo_agree_on_all_ranks() -> None:
    for of_rank in ranks.run(_figures, 3):
        payload = of_rank[0]["payload_bytes"]
        for figures in of_rank:
            assert figures["payload_bytes"] == payload
            assert figures["kept"] == of_rank[0]["kept"] > 0
            assert figures["skipped"] is False
            assert set(figures["seconds"]) == {"extract", "exchange", "apply"}
            assert all(seconds > 0 for seconds in figures["seconds"].values())
        for figures in of_rank[1:]:
            assert figures["sent_bytes"] == figures["received_bytes"] == 2 * payload


def test_stats_is_a_mapping() -> None:
    stats = Stats(payload_bytes=10)
    assert stats["payload_bytes"] == 10
    assert "kept" in stats
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
    assert stats["kept"] == stats.kept
    # 32x16: two full chunks, 24 each; 17x19: four of 9x10, 8 each; 20: two of 1x10, 1 each; one element
    assert stats.kept == 2 * 24 + 4 * 8 + 2 * 1 + 1
    assert stats.payload_bytes < 64 + stats.kept * 5 + 16
    with pytest.raises(KeyError, match="bytes"):
        stats["bytes"]


def test_stats_seconds_count_a_slow_link_as_exchange() -> None:
    optimizer = _optimizer(Delay(SingleRank(), latency_seconds=0.05))
    begun = time.perf_counter()
    problems.train(optimizer, range(1))
    assert optimizer.stats.seconds["exchange"] >= 0.05
    assert sum(optimizer.stats.seconds.values()) <= time.perf_counter() - begun, "no other stage counts the wait too"


def test_extract_message_length_ignores_data() -> None:
    lengths = set()
    for scale in (0.0, 1e-30, 1.0, 1e30):
        optimizer = _optimizer(values="float32")
        for parameter in problems.all_parameters(optimizer):
            parameter.grad = scale * problems.draw(parameter.shape, 1, dtype=torch.float64)
        lengths.add(optimizer.extract().numel())
    assert len(lengths) == 1
