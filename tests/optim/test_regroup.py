"""`DeMo.regroup`: training goes on among other ranks, and what a rank had not sent yet stays its own."""

import os
import threading
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import problems
import ranks
from demopt import DeMo, ExchangeError
from demopt.exchange import Exchange, SingleRank, thread_exchanges

ROUTES = ["gather", "owner", "relay"]
GONE_SECONDS = 2.0  # how long ranks wait for one that has left


class Regrouped(NamedTuple):
    """What one rank saw."""

    untouched: bool  # regroup left all bits of momenta and parameters as they were
    marks: list[int]  # fingerprints after each later step


def _optimizer(exchange: Exchange, seed: int = 0, **settings: Any) -> DeMo:
    return DeMo(problems.parameters(problems.FEW, seed=seed), **{**problems.SMALL, **settings}, process_group=exchange)


def _regroup(optimizer: DeMo, exchange: Exchange) -> bool:
    """Regroups; returns whether momenta and parameters kept all their bits."""
    momenta, mark = problems.momenta(optimizer), optimizer.fingerprint()
    optimizer.regroup(exchange)
    return problems.same(problems.momenta(optimizer), momenta) and optimizer.fingerprint() == mark


def _assert_replicas(regrouped: list[Regrouped], steps: int) -> None:
    """All ranks had the same fingerprints, another one after each step."""
    for rank in regrouped:
        assert rank.marks == regrouped[0].marks
    assert len(set(regrouped[0].marks)) == steps


def _shrink(exchange: Exchange, settings: dict[str, Any], leaver: int, fewer: list[Exchange]) -> Regrouped | None:
    optimizer = _optimizer(exchange, **settings)
    problems.train(optimizer, range(3), exchange.rank)
    if exchange.rank == leaver:
        return None
    other = fewer[exchange.rank - (exchange.rank > leaver)]
    untouched = _regroup(optimizer, other)
    return Regrouped(untouched, problems.train(optimizer, range(3, 6), other.rank).fingerprints)


@pytest.mark.parametrize("leaver", [0, 2])  # the ranks after it get new numbers
@pytest.mark.parametrize(
    "settings",
    [*({"route": route} for route in ROUTES), {"update": "adamw"}, {"fingerprint_every": 1}],
    ids=lambda settings: str(next(iter(settings.values()))),
)
def test_regroup_without_a_rank_that_left_keeps_momenta_and_replicas(settings: dict[str, Any], leaver: int) -> None:
    stayed = [one for one in ranks.threads(_shrink, 3, settings, leaver, thread_exchanges(2)) if one is not None]
    assert len(stayed) == 2
    assert all(one.untouched for one in stayed)
    _assert_replicas(stayed, steps=3)


def _after_an_error(exchange: Exchange, settings: dict[str, Any], fewer: list[Exchange]) -> Regrouped | None:
    optimizer = _optimizer(exchange, **settings)
    problems.train(optimizer, range(3), exchange.rank)
    if exchange.rank == 2:
        return None
    with pytest.raises(ExchangeError):
        problems.train(optimizer, range(3, 5), exchange.rank)  # with delay, the second step gets the error
    untouched = _regroup(optimizer, fewer[exchange.rank])
    marks = problems.train(optimizer, range(5, 8), exchange.rank).fingerprints
    optimizer.flush()
    return Regrouped(untouched, [*marks[optimizer._options.delay :], optimizer.fingerprint()])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("delay", [0, 1])
def test_regroup_after_an_exchange_error_keeps_momenta_and_replicas(route: str, delay: int) -> None:
    settings = {"route": route, "delay": delay}
    *stayed, _ = ranks.threads(_after_an_error, 3, settings, thread_exchanges(2), timeout=GONE_SECONDS)
    assert all(one.untouched for one in stayed)
    _assert_replicas(stayed, steps=3)


def _same_ranks(exchange: Exchange, again: list[Exchange]) -> Regrouped:
    link = problems.FailsWhenDue(exchange)
    optimizer = _optimizer(link, route="gather")
    problems.train(optimizer, range(2), exchange.rank)
    link.due = True
    with pytest.raises(ExchangeError, match="the link is down"):
        problems.train(optimizer, [2], exchange.rank)
    untouched = _regroup(optimizer, again[exchange.rank])
    return Regrouped(untouched, problems.train(optimizer, range(3, 6), exchange.rank).fingerprints)


def test_regroup_of_the_same_ranks_over_a_new_exchange_keeps_momenta_and_replicas() -> None:
    same = ranks.threads(_same_ranks, 2, thread_exchanges(2))
    assert all(one.untouched for one in same)
    _assert_replicas(same, steps=3)


def _with_everything_sent_put_back(optimizer: DeMo) -> list[Tensor]:
    """The momenta as they were before the round in flight took its coefficients out."""
    (sent,) = optimizer._in_flight
    (outgoing,), (route,) = sent.outgoing, sent.plan.routes
    assert outgoing is not None
    wanted: dict[int, Tensor] = {}
    for chunk_group, selected in zip(route.chunk_groups, outgoing.selected, strict=True):
        whole = chunk_group.flat_momentum.scatter(1, selected.positions, selected.values)
        wanted |= {id(parameter): rows for parameter, rows in chunk_group.rows(whole)}
    return [wanted[id(parameter)] for parameter in problems.all_parameters(optimizer)]


def _in_flight(exchange: Exchange, route: str, fewer: list[Exchange]) -> tuple[bool, bool, Regrouped] | None:
    optimizer = _optimizer(exchange, route=route, delay=1)
    problems.train(optimizer, range(2), exchange.rank)
    if exchange.rank == 2:
        return None
    problems.train(optimizer, [2], exchange.rank)  # rank 2 never sends its message of this step
    outgoing, wanted = optimizer._in_flight[0].outgoing[0], _with_everything_sent_put_back(optimizer)
    assert outgoing is not None
    assert outgoing.work is not None
    mark = optimizer.fingerprint()
    optimizer.regroup(fewer[exchange.rank])
    put_back = problems.same(problems.momenta(optimizer), wanted)
    waited = outgoing.work.done()
    untouched = optimizer.fingerprint() == mark
    marks = problems.train(optimizer, range(3, 6), exchange.rank).fingerprints
    optimizer.flush()
    return put_back, waited, Regrouped(untouched, [*marks[1:], optimizer.fingerprint()])


@pytest.mark.parametrize("route", ROUTES)
def test_regroup_puts_the_round_in_flight_back_and_does_not_wait_for_it(route: str) -> None:
    *stayed, _ = ranks.threads(_in_flight, 3, route, thread_exchanges(2))
    for put_back, waited, regrouped in stayed:
        assert put_back
        assert not waited
        assert regrouped.untouched  # its parameters
    _assert_replicas([regrouped for _, _, regrouped in stayed], steps=3)


def _grow(exchange: Exchange, fewer: list[Exchange]) -> tuple[bool, Regrouped]:
    """Rank 2 has trained alone from other weights, equally long. A step with lr 0 shows whose weights it takes."""
    mine = fewer[exchange.rank] if exchange.rank < 2 else SingleRank()
    optimizer = _optimizer(mine, seed=int(exchange.rank == 2))
    problems.train(optimizer, range(2), exchange.rank)
    mark = optimizer.fingerprint()
    untouched = _regroup(optimizer, exchange)
    rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.0
    problems.train(optimizer, [2], exchange.rank)
    kept = optimizer.fingerprint() == mark
    optimizer.param_groups[0]["lr"] = rate
    marks = problems.train(optimizer, range(3, 6), exchange.rank).fingerprints
    return kept, Regrouped(untouched, marks)


@pytest.mark.filterwarnings("ignore:initial parameters")
def test_regroup_with_a_rank_that_joins_gives_it_the_weights_of_rank_0() -> None:
    grown = ranks.threads(_grow, 3, thread_exchanges(2))
    assert [kept for kept, _ in grown] == [True, True, False]
    assert all(regrouped.untouched for _, regrouped in grown)
    _assert_replicas([regrouped for _, regrouped in grown], steps=3)


def _join_later(exchange: Exchange, fewer: list[Exchange]) -> Regrouped:
    if exchange.rank == 2:
        optimizer, untouched = _optimizer(exchange, seed=1), True
    else:
        optimizer = _optimizer(fewer[exchange.rank])
        problems.train(optimizer, range(2), exchange.rank)
        untouched = _regroup(optimizer, exchange)
    before = problems.momenta(optimizer)
    optimizer.resync(0)
    untouched = untouched and problems.same(problems.momenta(optimizer), before)
    return Regrouped(untouched, problems.train(optimizer, range(2, 5), exchange.rank).fingerprints)


def test_resync_after_regroup_gives_a_new_optimizer_the_step_of_the_others() -> None:
    grown = ranks.threads(_join_later, 3, thread_exchanges(2))
    assert all(one.untouched for one in grown)
    _assert_replicas(grown, steps=3)


def _handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return sum(thread.name == "demopt exchange" for thread in threading.enumerate())


def _again_and_again(rank: int, world_size: int) -> tuple[list[int], bool]:
    """Open handles of a process whose optimizers exchange in the background, after each regroup of one of them."""
    optimizer, other = (_optimizer(None, overlap=2) for _ in range(2))
    handles = []
    for step in range(8):
        for each in (optimizer, other):
            each.zero_grad()
            torch.stack([(p * (rank + step + 1)).sum() for p in problems.all_parameters(each)]).sum().backward()
            each.step()
        if step % 2:  # a first step sends nothing in the background
            groups = {id(each._session.exchange.inner._group) for each in (optimizer, other)}  # type: ignore[attr-defined]
            assert _threads() == 2
            optimizer.regroup(None)
            dist.barrier()
            handles.append(_handles())
            while _threads() > 1:  # the other optimizer's; one that ends may need a moment
                time.sleep(0.01)
    return handles, len(groups) == 2


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open handles as Linux tells them")
def test_regroup_again_and_again_opens_nothing_anew_and_leaves_no_thread() -> None:
    for handles, apart in ranks.run(_again_and_again, 2):
        assert len(set(handles)) == 1, handles
        assert apart, "two optimizers at once share no group"
