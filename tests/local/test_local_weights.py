"""The effect of a round on weights and error: each row of the table in optim/local_weights.py is a test."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import oracle
import problems
import ranks
from demopt import ExchangeError, LocalDeMo
from demopt.exchange import Exchange
from oracles import reference

SETTINGS: dict[str, Any] = {
    "sync_every": 2, "top_k": 20, "chunk": 16, "values": "float64", "error_decay": 0.5, "reduction": "mean",
}  # fmt: skip


class Seen(NamedTuple):
    """One rank's matrix at one time: its global and local weights, the start of D, and the error in its domain."""

    shared: Tensor
    local: Tensor
    start: Tensor
    error: Tensor

    @property
    def D(self) -> Tensor:  # noqa: N802
        return self.start - self.local


class Rank:
    """A LocalDeMo of one matrix over a link that can fail."""

    def __init__(self, exchange: Exchange, delay: int = 0) -> None:
        self.rank, self.draws = exchange.rank, 0
        (self.parameter,) = problems.parameters([(32, 16)], torch.float64)
        self.link = problems.FailsWhenDue(exchange)
        inner = torch.optim.SGD([self.parameter], lr=0.1)
        self.optimizer = LocalDeMo(inner, **SETTINGS, delay=delay, process_group=self.link)

    def steps(self, count: int, local: bool = False) -> None:
        for _ in range(count):
            self.draws += 1
            self.parameter.grad = problems.draw((32, 16), self.draws, self.rank, dtype=torch.float64)
            (self.optimizer.local_step if local else self.optimizer.step)()

    def round_by_hand(self) -> None:
        self.optimizer.apply(self.optimizer.exchange(self.optimizer.extract()))

    def seen(self) -> Seen:
        entry = self.optimizer.state[self.parameter]
        group = {**SETTINGS, "transform": "dct", "chunking": "padded"}
        error = reference.unpad(oracle.dense(entry["error"], self.parameter, group), self.parameter)
        shared = entry["global"].clone()
        return Seen(shared, self.parameter.detach().clone(), entry.get("start", shared).clone(), error)


def _same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_applied_round_moves_the_global_weights_and_all_go_on_from_them() -> None:
    def run(exchange: Exchange) -> tuple[Seen, Seen]:
        rank = Rank(exchange)
        rank.steps(2)
        rank.steps(2, local=True)
        before = rank.seen()
        rank.round_by_hand()
        assert "start" not in rank.optimizer.state[rank.parameter]
        return before, rank.seen()

    pairs = ranks.threads(run, 2)
    sent = [before.error + before.D - 2 * after.error for before, after in pairs]  # after = b (e + D - q)
    assert sent[0].any()
    for before, after in pairs:
        assert torch.equal(after.local, after.shared)
        assert torch.equal(after.shared, pairs[0][1].shared)
        _same(after.shared, before.shared - sum(sent) / 2)


@pytest.mark.parametrize("how", ["fails", "rolled back", "rank 1's D is not finite"])
def test_round_that_is_not_applied_leaves_the_pseudo_gradient_in_the_error(how: str) -> None:
    """Weights stay as they are, and the next pseudo-gradient counts from the local ones.

    A rank whose pseudo-gradient is not finite drops it, and goes on from the global weights.
    """

    def run(exchange: Exchange) -> None:
        rank = Rank(exchange)
        optimizer, is_bad = rank.optimizer, how.startswith("rank 1") and exchange.rank == 1
        rank.steps(2)
        rank.steps(2, local=True)
        if is_bad:
            with torch.no_grad():
                rank.parameter[3, 4] = torch.nan
        before = rank.seen()
        if how == "fails":
            rank.link.due, rank.parameter.grad = True, None  # no gradient, no further movement
            with pytest.raises(ExchangeError):
                optimizer.step()
            assert optimizer.due
        elif how == "rolled back":
            optimizer.extract()
            optimizer.rollback()
        else:
            rank.round_by_hand()
            assert optimizer.stats.skipped
        after = rank.seen()
        assert torch.equal(after.shared, before.shared)
        assert torch.equal(after.local, before.shared if is_bad else before.local)
        assert torch.equal(after.start, after.local)
        _same(after.error, before.error if is_bad else before.error + before.D)
        rank.steps(2)
        rank.round_by_hand()
        assert torch.equal(rank.seen().local, rank.seen().shared)
        assert bool(rank.seen().local.isfinite().all())

    ranks.threads(run, 2)


def test_sent_round_with_delay_keeps_this_rank_ahead_of_the_global_weights() -> None:
    def run(exchange: Exchange) -> None:
        rank = Rank(exchange, delay=1)
        rank.steps(5)  # the first round is applied, the second on its way
        before = rank.seen()
        rank.steps(1)  # takes a local step, applies the second round, sends the third
        after = rank.seen()
        assert rank.parameter.grad is not None
        assert not torch.equal(after.shared, before.shared)
        _same(after.local, after.shared - (before.D + 0.1 * rank.parameter.grad))
        assert torch.equal(after.start, after.local)
        assert rank.optimizer.replicator.in_flight

    ranks.threads(run, 2)


@pytest.mark.parametrize("how", ["fails", "rolled back", "regroup"])
def test_round_in_flight_that_ends_without_effect_leaves_everything_as_it_was(how: str) -> None:
    def run(exchange: Exchange) -> None:
        rank = Rank(exchange, delay=1)
        rank.steps(1)
        rank.link.due = how == "fails"
        rank.steps(2)  # sends a round, and takes a local step
        before = rank.seen()
        if how == "fails":
            with pytest.raises(ExchangeError):
                rank.optimizer.flush()
        elif how == "rolled back":
            rank.optimizer.rollback()
        else:
            rank.optimizer.regroup(rank.link)
        after = rank.seen()
        assert all(map(torch.equal, after, before)), "the error holds the round's pseudo-gradient"
        assert after.error.any()
        assert after.D.any(), "the local step since then is still to come"

    ranks.threads(run, 2)
