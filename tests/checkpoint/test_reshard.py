"""Another number of ranks: the share that each takes over; no gradient is lost, and none counts twice."""

import functools
from collections.abc import Callable
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
from demopt.exchange import Exchange
from demopt.state import overlaps, share_of

pytestmark = pytest.mark.filterwarnings("ignore:no parameter of this optimizer has had a gradient")

SIZES = st.integers(1, 9)


@given(SIZES, SIZES)
def test_overlaps_of_every_new_rank_are_one_and_of_every_old_rank_equal(now, before):
    """A rank's momentum keeps its scale, and no old rank counts for more than another."""
    by_rank = [overlaps(rank, now, before) for rank in range(now)]
    assert all(sum(mine.values()) == 1 for mine in by_rank)
    for old in range(before):
        assert sum((mine.get(old, Fraction(0)) for mine in by_rank), Fraction(0)) == Fraction(now, before)


@functools.cache
def _states(world_size: int) -> list[dict[str, Any]]:
    """The states of all ranks after three steps."""

    def saved(exchange: Exchange) -> dict[str, Any]:
        optimizer = problems.demo(exchange, dtype=torch.float64, update="sgd")
        problems.train(optimizer, range(3), exchange.rank)
        return optimizer.state_dict()

    return ranks.threads(saved, world_size)


def _goes_on(exchange: Exchange, states: list[dict[str, Any]], reduction: str) -> tuple[list[Tensor], list[Tensor]]:
    """Loads a state and takes a step without new gradients, in which all of the momenta is sent."""
    everything = {"top_k": 16 * 16, "values": "float64", "reduction": reduction, "update": "sgd", "alpha": 1.0}
    optimizer = problems.demo(exchange, dtype=torch.float64, fingerprint_every=0, **everything)
    optimizer.load_state_dict(states[exchange.rank])
    for group in optimizer.param_groups:
        group.update(everything)
    optimizer.step()
    return [p.detach() for p in problems.all_parameters(optimizer)], problems.momenta(optimizer)


@pytest.mark.parametrize("reduction", ["mean", "senders"])
@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 3), (3, 1)])
def test_reshard_loses_no_gradient_and_counts_none_twice(reduction, before, now):
    """All momenta, sent whole, move the parameters as far before as after."""
    states = _states(before)
    old, _ = ranks.threads(_goes_on, before, states, reduction)[0]
    for new, left in ranks.threads(_goes_on, now, demopt.reshard(states, now), reduction):
        for ours, theirs in zip(new, old, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        assert all(bool((momentum == 0).all()) for momentum in left)


@pytest.mark.parametrize(
    ("skipped", "settings"), [(False, {"top_k": 24}), (True, {"top_k": 24}), (False, {"route": "owner"})], ids=str
)
def test_reshard_of_local_keeps_errors_and_pseudo_gradients_and_copies_inner_states(skipped, settings):
    """After a round that some rank dropped, the others have a start of their own. Owners' errors become ranks'."""

    def saved(exchange: Exchange) -> dict[str, Any]:
        """Two steps after a round, which is skipped because of rank 0's weights."""
        optimizer = problems.local(exchange, inner=problems.ADAMW, sync_every=4, **settings)

        def spoil(step: int) -> None:
            if skipped and step == 3 and exchange.rank == 0:
                problems.all_parameters(optimizer)[0].data[0] = torch.inf

        problems.fingerprints(optimizer, range(6), exchange.rank, spoil)
        with optimizer.shared():
            return optimizer.state_dict()

    before = ranks.threads(saved, 3)
    assert any("owner_error" in state["state"][0] for state in before) == ("route" in settings)
    assert ["start" in state["state"][0] for state in before] == [False, skipped, skipped]
    after = demopt.reshard(before, 2)
    kept: list[Callable[[dict[str, Tensor]], Tensor]] = [
        lambda entry: problems.unsent(entry, len(before)),
        lambda entry: entry.get("start", entry["global"]) - entry["local"],
    ]
    for number in range(len(problems.FEW)):
        old, new = ([state["state"][number] for state in states] for states in (before, after))
        for part in kept:
            torch.testing.assert_close(*(torch.stack([part(entry) for entry in each]).mean(0) for each in (new, old)))
        assert torch.equal(new[0]["exp_avg"], old[0]["exp_avg"])
        assert torch.equal(new[1]["exp_avg"], old[2]["exp_avg"])
        assert {int(entry["local_steps"]) for entry in new} == {2}
    # local weights that are not finite drop the steps of their rank alone
    first = before[0]["state"][0]
    for local in (first.get("start", first["global"]), first["local"] + torch.inf):
        first["local"] = local
        after.append(demopt.reshard(before, 1)[0])
    assert torch.equal(after[-1]["state"][0]["local"], after[-2]["state"][0]["local"])


def test_reshard_refuses_states_that_are_not_those_of_all_ranks():
    whole, other = _states(2)
    later = {n: {**entry, "step": entry["step"] + 1} for n, entry in other["state"].items()}
    for states, ranks_now, says in (
        ([whole, {**other, "state": later}], 3, "rank 0 and rank 1 are of different models or steps"),
        ([other, whole], 1, "was saved by rank 1; give the states of all ranks in the order"),
        ([whole], 3, r"1 states came, and states\[0\] was saved by one of 2 ranks"),
        ([], 1, "there are no states"),
        ([{"model": {}, "optimizer": whole}], 1, "something that is no optimizer's state"),
        ([{**whole, "state": [1]}], 1, "the states are damaged"),
        ([{**whole, "state": {0: {**whole["state"][0], "momentum": None}}}, other], 1, "the states are damaged"),
        ([whole], 0, "world_size is 0"),
        ([whole], "2", "world_size is '2'; give a whole number"),
    ):
        with pytest.raises((ValueError, TypeError), match=says):
            demopt.reshard(states, ranks_now)


def test_state_of_a_parameter_that_only_some_ranks_have_is_taken_or_refused():
    one, two = _states(2)
    frozen = {"exp_avg": torch.ones(2)}  # of a frozen parameter, where an inner optimizer began anew on a rank
    for old in (one, {**one, "state": {**one["state"], 9: frozen}}):
        taken = share_of({0: old, 1: two}, 0, 1, 2)["state"]
        assert taken.keys() == old["state"].keys()
    assert taken[9] == frozen
    for wrong in (None, "momentum", torch.ones(3), torch.ones(9, 256)):
        damaged = {**two["state"], 0: {**two["state"][0], "momentum": wrong}}
        with pytest.raises(ValueError, match="the state of parameter 0 is damaged in some rank"):
            share_of({0: one, 1: {**two, "state": damaged}}, 0, 1, 2)
