"""The effect of a round on weights and error: each row of the table in optim/local_weights.py is a test."""

from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Seen:
    """One parameter of one rank, at one time."""

    shared: Tensor  # the global weights
    local: Tensor
    start: Tensor  # of the pseudo-gradient
    apart: bool  # whether the start is another one than the global weights
    error: Tensor  # in the parameter's domain

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

    def local_steps(self, count: int) -> None:
        for _ in range(count):
            self.draw()
            self.optimizer.local_step()

    def draw(self) -> None:
        self.draws += 1
        self.parameter.grad = problems.draw((32, 16), self.draws, self.rank, dtype=torch.float64)

    def rounds(self, count: int) -> None:
        for _ in range(2 * count):
            self.draw()
            self.optimizer.step()

    def seen(self) -> Seen:
        entry = self.optimizer.state[self.parameter]
        group = {**SETTINGS, "transform": "dct", "chunking": "padded"}
        error = reference.unpad(oracle.dense(entry["error"], self.parameter, group), self.parameter)
        shared, local = entry["global"].clone(), self.parameter.detach().clone()
        return Seen(shared, local, entry.get("start", shared).clone(), "start" in entry, error)


def _same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_applied_round_moves_the_global_weights_and_all_go_on_from_them() -> None:
    def run(exchange: Exchange) -> tuple[Seen, Seen]:
        rank = Rank(exchange)
        rank.rounds(1)
        rank.local_steps(2)
        before = rank.seen()
        rank.optimizer.apply(rank.optimizer.exchange(rank.optimizer.extract()))
        return before, rank.seen()

    pairs = ranks.threads(run, 2)
    left = [
        before.error + before.D - 2 * after.error for before, after in pairs
    ]  # what was sent: after = b (e + D - q)
    for before, after in pairs:
        assert torch.equal(after.local, after.shared)
        assert torch.equal(after.shared, pairs[0][1].shared)
        assert not after.apart
        _same(after.shared, before.shared - sum(left) / 2)
        assert left[0].any()


@pytest.mark.parametrize("how", ["fails", "rolled back", "rank 1's D is not finite"])
def test_round_that_is_not_applied_leaves_the_pseudo_gradient_in_the_error(how: str) -> None:
    """Weights stay as they are, and the next pseudo-gradient counts from the local ones.

    A rank whose pseudo-gradient is not finite drops it, and goes on from the global weights.
    """

    def run(exchange: Exchange) -> None:
        rank = Rank(exchange)
        optimizer = rank.optimizer
        rank.rounds(1)
        rank.local_steps(2)
        is_bad = how.startswith("rank 1") and rank.rank == 1
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
            optimizer.apply(optimizer.exchange(optimizer.extract()))
            assert optimizer.stats.skipped
        after = rank.seen()
        assert torch.equal(after.shared, before.shared)
        if is_bad:
            assert torch.equal(after.local, before.shared)
            assert torch.equal(after.error, before.error)
        else:
            assert torch.equal(after.local, before.local)
            assert torch.equal(after.start, before.local)
            _same(after.error, before.error + before.D)
            with pytest.raises(RuntimeError, match="between two rounds"):
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
        rank.rounds(1)
        optimizer.apply(optimizer.exchange(optimizer.extract()))
        assert torch.equal(rank.seen().local, rank.seen().shared)
        assert bool(rank.seen().local.isfinite().all())

    ranks.threads(run, 2)


def test_sent_round_with_delay_keeps_this_rank_ahead_of_the_global_weights() -> None:
    def run(exchange: Exchange) -> None:
        rank = Rank(exchange, delay=1)
        rank.rounds(2)  # the first is applied, the second on its way
        rank.draw()
        rank.optimizer.step()
        before = rank.seen()
        rank.draw()
        rank.optimizer.step()  # takes a local step, applies the second round, sends the third
        after = rank.seen()
        D = before.D + 0.1 * rank.parameter.grad
        assert not torch.equal(after.shared, before.shared)
        _same(after.local, after.shared - D)
        assert torch.equal(after.start, after.local)
        assert rank.optimizer.replicator.in_flight

    ranks.threads(run, 2)


@pytest.mark.parametrize("how", ["fails", "rolled back", "regroup"])
def test_round_in_flight_that_ends_without_effect_leaves_everything_as_it_was(how: str) -> None:
    def run(exchange: Exchange) -> None:
        rank = Rank(exchange, delay=1)
        rank.draw()
        rank.optimizer.step()
        rank.link.due = how == "fails"
        rank.optimizer.step()  # sends a round
        rank.draw()
        rank.optimizer.step()
        before = rank.seen()
        if how == "fails":
            with pytest.raises(ExchangeError):
                rank.optimizer.flush()
        elif how == "rolled back":
            rank.optimizer.rollback()
        else:
            rank.optimizer.regroup(rank.link)
        after = rank.seen()
        assert torch.equal(after.shared, before.shared)
        assert torch.equal(after.local, before.local)
        assert torch.equal(after.start, before.start)
        assert torch.equal(after.error, before.error), "it holds the round's pseudo-gradient"
        assert after.error.any()
        assert after.D.any(), "the local step since then is still to come"

    ranks.threads(run, 2)
