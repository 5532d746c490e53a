"""Signs of all coefficients: nothing is lost whatever becomes of a round, on both routes and with unequal samples.

A round takes from the ranks' errors, and the owner's, what it applies. So of each parameter

    mean(e) + E - mean over the ranks of what they have moved so far + (start - global)

stays zero: e the ranks' errors, E the owners', weighted as the round weighs its messages.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import oracle
import problems
import ranks
from demopt import LocalDeMo
from demopt.exchange import Exchange, Threads
from demopt.replicator.owner import Owner

SHAPES = [(64, 48), (80, 16), (96,), ()]  # whole chunks of 16: what a round moves in the padding of others is dropped
H = 2
Account = list[tuple[Tensor, Tensor, Tensor]]  # of each parameter: unsent, moved by this rank, applied by all


def _optimizer(exchange: Exchange | None, parameters: list[Parameter], **more: Any) -> LocalDeMo:
    inner = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return LocalDeMo(inner, sync_every=H, process_group=exchange, chunk=16, **more)


def _rounds(optimizer: LocalDeMo, moved: list[Tensor], rounds: range, rank: int) -> None:
    """Trains; adds this rank's pseudo-gradients to `moved`."""
    parameters = problems.all_parameters(optimizer)
    for number in rounds:
        start = problems.values(optimizer)
        for step in range(H):
            problems.set_gradients(parameters, number * H + step, rank)
            optimizer.local_step()
        for total, before, p in zip(moved, start, parameters, strict=True):
            total += before.double() - p.detach().double()
        optimizer.apply(optimizer.exchange(optimizer.extract()))


def _account(optimizer: LocalDeMo, moved: list[Tensor]) -> Account:
    group, world_size, found = optimizer.replicator.groups[0], optimizer.replicator.rank_and_size[1], []
    parameters = problems.all_parameters(optimizer)
    starts = problems.parameters(SHAPES, parameters[0].dtype)
    for parameter, start, movement in zip(parameters, starts, moved, strict=True):
        unsent = oracle.dense(problems.unsent(optimizer.state[parameter], world_size).double(), parameter, group)
        applied = start.detach().double() - parameter.detach().double()
        found.append((unsent.reshape(parameter.shape), movement.clone(), applied))
    return found


def _assert_kept(accounts: list[Account], weights: list[int], tolerance: float = 1e-9) -> None:
    for of_ranks in zip(*accounts, strict=True):
        unsent, moved = (
            sum(weight * each[part] for weight, each in zip(weights, of_ranks, strict=True)) / sum(weights)
            for part in (0, 1)
        )
        applied = of_ranks[0][2]
        torch.testing.assert_close(unsent + applied, moved, rtol=0, atol=tolerance)
        assert float(applied.abs().max()) > 0.005


def _zeros() -> list[Tensor]:
    return [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]


def _train(exchange: Exchange, route: str, samples: list[int], dtype: torch.dtype) -> tuple[int, Account]:
    """Every other rank is without kernels: the bits are the same."""
    kernels, moved = ["auto", "torch"][exchange.rank % 2], _zeros()
    settings = {"route": route, "kernels": kernels, "samples": samples[exchange.rank]}
    optimizer = _optimizer(exchange, problems.parameters(SHAPES, dtype), **settings)
    _rounds(optimizer, moved, range(4), exchange.rank)
    assert optimizer.stats.route == f"{route}: as asked"
    both = optimizer.replicator.wiring().route.bytes_each_way
    assert (optimizer.stats.sent_bytes, optimizer.stats.received_bytes) == (both, both)
    return optimizer.fingerprint(), _account(optimizer, moved)


@pytest.mark.parametrize("route", ["gather", "owner"])
@pytest.mark.parametrize("samples", [[1], [8, 8, 8], [3, 1], [5, 2, 1, 8, 8]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounds_apply_the_weighted_mean_and_lose_nothing(route: str, samples: list[int], dtype: torch.dtype) -> None:
    found = ranks.threads(_train, len(samples), route, samples, dtype)
    assert len({mark for mark, _ in found}) == 1
    if route == "gather" or len(set(samples)) == 1:
        # in float32 messages are decoded in integers, with bases of 8 bits: what that rounds off is not fed back
        _assert_kept([account for _, account in found], samples, 1e-9 if dtype == torch.float64 else 2e-2)


def test_owners_hand_over_their_errors() -> None:
    """Ranks get other numbers, so that other ranks own the chunks; then route "gather", without owners."""

    def regrouped(exchange: Exchange, turned: list[Exchange]) -> list[Account]:
        optimizer, moved = _optimizer(exchange, problems.parameters(SHAPES, torch.float64), route="owner"), _zeros()
        _rounds(optimizer, moved, range(2), exchange.rank)
        assert isinstance(optimizer.replicator.wiring().route, Owner)
        optimizer.regroup(turned[exchange.rank])
        accounts = [_account(optimizer, moved)]
        _rounds(optimizer, moved, range(2, 4), exchange.rank)
        accounts.append(_account(optimizer, moved))
        optimizer.replicator.options = replace(optimizer.replicator.options, route="gather")
        _rounds(optimizer, moved, range(4, 5), exchange.rank)
        assert not any("owner_error" in entry for entry in optimizer.state.values())
        return [*accounts, _account(optimizer, moved)]

    one, two, three = Threads(3, 60.0).exchanges
    for accounts in zip(*ranks.threads(regrouped, 3, [two, three, one]), strict=True):
        _assert_kept(list(accounts), [1, 1, 1])


def test_an_owner_that_goes_on_among_fewer_ranks_sends_its_error_once() -> None:
    def regrouped(exchange: Exchange, fewer: list[Exchange]) -> None:
        optimizer = _optimizer(exchange, problems.parameters(SHAPES, torch.float64), route="owner")
        _rounds(optimizer, _zeros(), range(2), exchange.rank)
        if exchange.rank == 2:
            return
        before = [{name: value.clone() for name, value in entry.items()} for entry in optimizer.state.values()]
        assert any(entry["owner_error"].any() for entry in before if "owner_error" in entry)
        optimizer.regroup(fewer[exchange.rank])
        optimizer.replicator.wiring()
        for old, new in zip(before, optimizer.state.values(), strict=True):
            if "owner_error" in old:  # in the next rounds' means over 2 it counts as before
                start = int(old["owner_start"])
                old["error"][start : start + len(old["owner_error"])] += 2 * old["owner_error"]
            torch.testing.assert_close(new["error"], old["error"])

    ranks.threads(regrouped, 3, Threads(2, 60.0).exchanges)


def test_an_extraction_that_fails_leaves_local_steps_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is between extract and apply then: a state can be saved, and `rollback` forgets nothing."""
    parameters = problems.parameters(SHAPES)
    optimizer = _optimizer(None, parameters)
    problems.set_gradients(parameters, 0)
    optimizer.local_step()
    local = problems.values(optimizer)
    with monkeypatch.context() as broken:
        broken.setattr("demopt.replicator.replicator.compress", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.extract()
    optimizer.rollback()
    with optimizer.shared():
        optimizer.state_dict()
    assert problems.same(problems.values(optimizer), local)
