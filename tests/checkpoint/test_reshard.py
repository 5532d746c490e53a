"""Another number of ranks: what each takes over, and that rounds go on as if nothing had happened."""

import functools
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import demopt
import problems
import ranks
from demopt import DeMo, LocalDeMo
from demopt.exchange import Exchange
from demopt.optim.reshard import parent, shares

SIZES = st.integers(1, 9)


@given(SIZES, SIZES)
def test_shares_of_every_new_rank_are_one_and_of_every_old_rank_equal(now: int, before: int) -> None:
    """A rank's momentum keeps its scale, and no old rank counts for more than another."""
    by_rank = [shares(rank, now, before) for rank in range(now)]
    assert all(sum(mine.values()) == 1 for mine in by_rank)
    for old in range(before):
        assert sum((mine.get(old, Fraction(0)) for mine in by_rank), Fraction(0)) == Fraction(now, before)


@given(SIZES)
def test_shares_of_as_many_ranks_are_their_own(count: int) -> None:
    assert [shares(rank, count, count) for rank in range(count)] == [{rank: 1} for rank in range(count)]


def test_parent_is_the_first_of_the_largest() -> None:
    assert parent({3: Fraction(1, 4), 1: Fraction(1, 2), 2: Fraction(1, 4)}) == 1
    assert parent({0: Fraction(1, 2), 1: Fraction(1, 2)}) == 0


def _save(exchange: Exchange) -> dict[str, Any]:
    parameters = problems.parameters(problems.FEW, torch.float64)
    optimizer = DeMo(parameters, **problems.SMALL, update="sgd", process_group=exchange)
    problems.train(optimizer, range(3), exchange.rank)
    return optimizer.state_dict()


@functools.cache
def _states(world_size: int) -> list[dict[str, Any]]:
    """What ranks save after three steps."""
    return ranks.threads(_save, world_size)


@pytest.mark.parametrize("now", [1, 2, 3, 4, 6])
def test_reshard_keeps_the_mean_of_the_momenta(now: int) -> None:
    before = _states(3)
    after = demopt.reshard(before, now)
    assert len(after) == now
    for number in range(len(problems.FEW)):
        mean = torch.stack([state["state"][number]["momentum"] for state in before]).mean(0)
        kept = torch.stack([state["state"][number]["momentum"] for state in after]).mean(0)
        torch.testing.assert_close(kept, mean, rtol=1e-12, atol=1e-15)
        assert {int(state["state"][number]["step"]) for state in after} == {3}


def _goes_on(exchange: Exchange, states: list[dict[str, Any]], reduction: str) -> tuple[list[Tensor], list[Tensor]]:
    """Loads a state and takes a step without new gradients, in which all of the momenta is sent."""
    everything = {"top_k": 16 * 16, "values": "float64", "reduction": reduction, "update": "sgd", "alpha": 1.0}
    optimizer = DeMo(
        problems.parameters(problems.FEW, torch.float64),
        **{**problems.SMALL, **everything},
        process_group=exchange,
        fingerprint_every=0,
    )
    optimizer.load_state_dict(states[exchange.rank])
    for group in optimizer.param_groups:
        group.update(everything)
    optimizer.step()
    return [p.detach() for p in problems.all_parameters(optimizer)], problems.momenta(optimizer)


@pytest.mark.parametrize("reduction", ["mean", "senders", "root"])
@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 4), (3, 2), (2, 3), (3, 1), (1, 3)])
def test_reshard_loses_no_gradient_and_counts_none_twice(reduction: str, before: int, now: int) -> None:
    """What all momenta move the parameters by, sent whole, is the same before and after."""
    states = _states(before)
    old, _ = ranks.threads(_goes_on, before, states, reduction)[0]
    for new, left in ranks.threads(_goes_on, now, demopt.reshard(states, now), reduction):
        for ours, theirs in zip(new, old, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        assert all(bool((momentum == 0).all()) for momentum in left)


def _relayed(exchange: Exchange, states: list[dict[str, Any]] | None) -> tuple[dict[str, Any], list[Tensor]]:
    optimizer = DeMo(
        [torch.nn.Parameter(problems.draw(shape, 5)) for shape in ((64, 64), (16, 80))],
        **{**problems.SMALL, "update": "sgd", "route": "relay", "relay_top_k": 2},
        process_group=exchange,
    )
    if states is not None:
        optimizer.load_state_dict(states[exchange.rank])
    else:
        problems.train(optimizer, range(3), exchange.rank)
    kept = [optimizer.state[p]["relay"].clone() for p in problems.all_parameters(optimizer)]
    return optimizer.state_dict(), kept


@pytest.mark.parametrize(("before", "now"), [(2, 3), (3, 2), (3, 1)])
def test_reshard_keeps_what_owners_keep_back(before: int, now: int) -> None:
    """Owners hold the chunks of all ranks once, however many owners there are."""
    old = ranks.threads(_relayed, before, None)
    new = ranks.threads(_relayed, now, demopt.reshard([state for state, _ in old], now))
    for number in range(2):
        whole = torch.cat([kept[number] for _, kept in old])
        assert bool(whole.any())
        assert torch.equal(torch.cat([kept[number] for _, kept in new]), whole)


def _save_local(exchange: Exchange) -> dict[str, Any]:
    """Saves two steps after a round."""
    parameters = problems.parameters(problems.FEW)
    optimizer = LocalDeMo(
        torch.optim.AdamW(parameters, lr=0.1), sync_every=4, chunk=16, top_k=24, process_group=exchange
    )
    for step in range(6):
        problems.set_gradients(parameters, step, exchange.rank)
        optimizer.step()
    with optimizer.shared():
        return optimizer.state_dict()


def test_reshard_of_local_keeps_errors_and_movements_and_copies_inner_states() -> None:
    before = ranks.threads(_save_local, 3)
    after = demopt.reshard(before, 2)
    for number in range(len(problems.FEW)):
        old, new = ([state["state"][number] for state in states] for states in (before, after))
        for name in ("error", "own"):
            mean = torch.stack([entry[name] for entry in old]).mean(0)
            torch.testing.assert_close(torch.stack([entry[name] for entry in new]).mean(0), mean)
        assert torch.equal(new[0]["exp_avg"], old[0]["exp_avg"])
        assert torch.equal(new[1]["exp_avg"], old[2]["exp_avg"])
        assert {int(entry["local_steps"]) for entry in new} == {2}


def test_reshard_refuses_what_is_not_of_all_ranks_of_one_run() -> None:
    whole, other = _states(2)
    later = {n: {**entry, "step": entry["step"] + 1} for n, entry in other["state"].items()}
    with pytest.raises(ValueError, match="rank 0 and rank 1 are of different models or steps"):
        demopt.reshard([whole, {**other, "state": later}], 3)
    with pytest.raises(ValueError, match="rank 1 holds a round in flight; call flush"):
        demopt.reshard([whole, {**other, "in_flight": {}}], 1)
    with pytest.raises(ValueError, match="was saved by rank 1; give the states of all ranks in the order"):
        demopt.reshard([other, whole], 1)
    with pytest.raises(ValueError, match="there are no states"):
        demopt.reshard([], 1)
    with pytest.raises(ValueError, match="world_size is 0"):
        demopt.reshard([whole], 0)
