"""A round that is set aside: its message goes to other ranks as it was extracted, and counts once."""

import weakref
from typing import Any

import pytest
import torch

import demopt
import ranks
from demopt.errors import MessageError
from demopt.exchange import Exchange, SingleRank, thread_exchanges

Weights = torch.nn.Parameter


def _demo(weights: Weights, **settings: Any) -> demopt.DeMo:
    return demopt.DeMo([weights], lr=0.1, update="sgd", **settings)


def _local(weights: Weights, **settings: Any) -> demopt.LocalDeMo:
    return demopt.LocalDeMo(torch.optim.SGD([weights], lr=0.5), sync_every=2, top_k=4, **settings)


def _start(make: Any, seed: int = 0, **settings: Any) -> tuple[Any, Weights]:
    weights = Weights(torch.randn(20, 12, generator=torch.Generator().manual_seed(0)))  # ranks are threads
    weights.grad = torch.randn(20, 12, generator=torch.Generator().manual_seed(seed))
    optimizer = make(weights, **settings)
    if isinstance(optimizer, demopt.LocalDeMo):
        optimizer.local_step()
    return optimizer, weights


def _outcome(optimizer: Any, weights: Weights) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"][0]
    return [weights.detach().clone(), state.get("momentum", state.get("error")).clone()]


@pytest.mark.parametrize("make", [_demo, _local])
@pytest.mark.filterwarnings("ignore:the state was saved")
def test_check_refuses_what_apply_would_refuse_and_changes_nothing(make: Any) -> None:
    optimizer, weights = _start(make, process_group=SingleRank())
    messages = optimizer.exchange(optimizer.extract()).clone()
    messages[0, -1] ^= 1
    before = weights.detach().clone()
    with pytest.raises(MessageError):
        optimizer.check(messages)
    assert torch.equal(weights, before)
    messages[0, -1] ^= 1
    optimizer.check(messages)
    assert torch.equal(weights, before)
    messages[0, -1] ^= 1  # after it was checked
    with pytest.raises(MessageError):
        optimizer.apply(messages)


def test_apply_refuses_damaged_messages_after_a_check_of_others() -> None:
    """Torch counts changes of a tensor, and both counts are equal here: it is another tensor."""
    optimizer, _ = _start(_demo, process_group=SingleRank())
    messages = optimizer.exchange(optimizer.extract()).clone()
    others = messages.clone()
    others[0, -1] ^= 1
    while messages._version != others._version:
        min(messages, others, key=lambda each: each._version).add_(0)
    optimizer.check(messages)
    with pytest.raises(MessageError):
        optimizer.apply(others)


@pytest.mark.parametrize("make", [_demo, _local])
def test_a_resumed_round_among_fewer_ranks_is_the_round_that_they_would_have_had(make: Any) -> None:
    fewer = thread_exchanges(2)

    def lose_one(exchange: Exchange) -> list[torch.Tensor]:
        optimizer, weights = _start(make, exchange.rank, process_group=exchange)
        optimizer.extract()
        aside = optimizer.set_aside()
        if exchange.rank == 2:
            return []
        optimizer.regroup(fewer[exchange.rank])
        optimizer.apply(optimizer.exchange(optimizer.resume(aside)))
        return _outcome(optimizer, weights)

    def calm(exchange: Exchange) -> list[torch.Tensor]:
        optimizer, weights = _start(make, exchange.rank, process_group=exchange)
        optimizer.apply(optimizer.exchange(optimizer.extract()))
        return _outcome(optimizer, weights)

    for one, other in zip(ranks.threads(lose_one, 3)[:2], ranks.threads(calm, 2), strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def test_a_resumed_round_still_says_that_a_gradient_was_not_finite() -> None:
    def resumed(exchange: Exchange) -> bool:
        optimizer, weights = _start(_demo, exchange.rank, process_group=exchange)
        before = weights.detach().clone()
        if exchange.rank == 1:
            assert weights.grad is not None
            weights.grad[3, 4] = float("nan")
        optimizer.extract()
        aside = optimizer.set_aside()
        optimizer.regroup(exchange)
        optimizer.apply(optimizer.exchange(optimizer.resume(aside)))
        return optimizer.stats.skipped and torch.equal(weights, before)

    assert ranks.threads(resumed, 2) == [True, True]


@pytest.mark.parametrize("make", [_demo, _local])
def test_a_resumed_round_that_is_rolled_back_leaves_everything_as_it_was(make: Any) -> None:
    optimizer, weights = _start(make, process_group=SingleRank())
    other, same = _start(make, process_group=SingleRank())
    optimizer.extract()
    aside = optimizer.set_aside()
    optimizer.regroup(SingleRank())
    optimizer.resume(aside)
    optimizer.rollback()
    other.extract()
    other.rollback()
    for resumed in (optimizer, other):
        resumed.apply(resumed.exchange(resumed.extract()))
    torch.testing.assert_close(_outcome(optimizer, weights), _outcome(other, same), rtol=0, atol=0)


def test_a_settled_round_is_gone_from_the_momentum() -> None:
    optimizer, weights = _start(_demo, process_group=SingleRank())
    applied, same = _start(_demo, process_group=SingleRank())
    optimizer.extract()
    optimizer.settle(optimizer.set_aside())
    applied.apply(applied.exchange(applied.extract()))
    assert torch.equal(_outcome(optimizer, weights)[1], _outcome(applied, same)[1])


@pytest.mark.parametrize("make", [_demo, _local])
def test_forget_empties_what_is_this_ranks_own(make: Any) -> None:
    optimizer, weights = _start(make, process_group=SingleRank())
    optimizer.apply(optimizer.exchange(optimizer.extract()))
    assert _outcome(optimizer, weights)[1].any()
    optimizer.forget()
    assert not _outcome(optimizer, weights)[1].any()


def test_a_round_in_the_background_cannot_be_set_aside() -> None:
    optimizer, _ = _start(_demo, delay=1, process_group=SingleRank())
    optimizer.extract()
    with pytest.raises(ValueError, match="delay=0"):
        optimizer.set_aside()
    optimizer.rollback()


@pytest.mark.parametrize("end", ["resume", "settle"])
def test_a_movement_that_was_set_aside_is_let_go(end: str) -> None:
    """It is as large as the model."""
    optimizer, _ = _start(_local, process_group=SingleRank())
    optimizer.extract()
    movement = weakref.ref(optimizer._weights.movement[0])
    aside = optimizer.set_aside()
    optimizer.regroup(SingleRank())
    if end == "settle":
        optimizer.settle(aside)
    else:
        optimizer.apply(optimizer.exchange(optimizer.resume(aside)))
    assert movement() is None


def test_an_extraction_that_is_refused_lets_go_of_its_movement() -> None:
    optimizer, _ = _start(_local, process_group=SingleRank(), delay=1)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"call flush\(\)"):
        optimizer.extract()
    assert optimizer._weights.movement == [None]
