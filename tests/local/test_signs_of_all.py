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
from demopt.exchange import Exchange, thread_exchanges
from demopt.exchange.interface import gather_values
from demopt.replicator.owner import TwoWay

SHAPES = [(64, 48), (80, 16), (96,), ()]  # whole chunks of 16: what a round moves in the padding of others is dropped
H = 2
ROUTES = pytest.mark.parametrize("route", ["gather", "owner"])


def _optimizer(exchange: Exchange | None, parameters: list[Parameter], **more: Any) -> LocalDeMo:
    inner = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return LocalDeMo(inner, sync_every=H, chunk=16, process_group=exchange, **more)


def _rounds(optimizer: LocalDeMo, parameters: list[Parameter], rounds: range, rank: int) -> list[Tensor]:
    """Trains; returns this rank's pseudo-gradients, summed over the rounds that were applied."""
    moved = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    for number in rounds:
        start = [p.detach().double().clone() for p in parameters]
        for step in range(H):
            problems.set_gradients(parameters, number * H + step, rank)
            optimizer.local_step()
        for total, before, p in zip(moved, start, parameters, strict=True):
            total += before - p.detach().double()
        optimizer.apply(optimizer.exchange(optimizer.extract()))
    return moved


def _unsent(optimizer: LocalDeMo, parameters: list[Parameter]) -> list[Tensor]:
    group, world_size, found = optimizer.replicator.groups[0], optimizer.replicator.rank_and_size[1], []
    for parameter in parameters:
        error = problems.unsent(optimizer.state[parameter], world_size).double()
        found.append(oracle.dense(error, parameter, group).reshape(parameter.shape))
    return found


def _mean(exchange: Exchange, tensors: list[Tensor], weight: int) -> list[Tensor]:
    flat = torch.cat([tensor.flatten() for tensor in tensors]) * weight
    rows = exchange.all_gather(flat.view(torch.uint8)).view(torch.float64)
    total = sum(gather_values(exchange, weight, torch.device("cpu")))
    parts = (rows.sum(0) / total).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _assert_kept(exchange: Exchange, optimizer: LocalDeMo, moved: list[Tensor], weight: int = 1) -> None:
    parameters = optimizer.param_groups[0]["params"]
    starts = problems.parameters(SHAPES, parameters[0].dtype)
    # in float32 messages are decoded in integers, with bases of 8 bits: what that rounds off is not fed back
    tolerance = 1e-9 if parameters[0].dtype == torch.float64 else 2e-2
    unsent, sent = (_mean(exchange, each, weight) for each in (_unsent(optimizer, parameters), moved))
    for start, parameter, error, movement in zip(starts, parameters, unsent, sent, strict=True):
        applied = start.detach().double() - parameter.detach().double()
        torch.testing.assert_close(error + applied, movement, rtol=0, atol=tolerance)
        assert float(applied.abs().max()) > 0.005


def _train(exchange: Exchange, route: str, samples: list[int], dtype: torch.dtype) -> int:
    """Every other rank is without kernels: the bits are the same."""
    parameters, kernels = problems.parameters(SHAPES, dtype), ["auto", "torch"][exchange.rank % 2]
    optimizer = _optimizer(exchange, parameters, route=route, kernels=kernels, samples=samples[exchange.rank])
    moved = _rounds(optimizer, parameters, range(4), exchange.rank)
    assert optimizer.stats.route == f"{route}: as asked"
    both = optimizer.replicator.plan().route.bytes_each_way
    assert (optimizer.stats.sent_bytes, optimizer.stats.received_bytes) == (both, both)
    if route == "gather" or len(set(samples)) == 1:
        _assert_kept(exchange, optimizer, moved, samples[exchange.rank])
    return optimizer.fingerprint()


@ROUTES
@pytest.mark.parametrize("samples", [[1], [8, 8, 8], [3, 1], [5, 2, 1, 8, 8]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounds_apply_the_weighted_mean_and_lose_nothing(route: str, samples: list[int], dtype: torch.dtype) -> None:
    assert len(set(ranks.threads(_train, len(samples), route, samples, dtype))) == 1


def _regrouped(exchange: Exchange, turned: list[Exchange]) -> int:
    """Ranks get other numbers, so that other ranks own the chunks; then route "gather", without owners."""
    parameters = problems.parameters(SHAPES, torch.float64)
    optimizer = _optimizer(exchange, parameters, route="owner")
    moved = _rounds(optimizer, parameters, range(2), exchange.rank)
    assert isinstance(optimizer.replicator.plan().route, TwoWay)
    optimizer.regroup(turned[exchange.rank])
    _assert_kept(exchange, optimizer, moved)
    again = _rounds(optimizer, parameters, range(2, 4), exchange.rank)
    moved = [one + other for one, other in zip(moved, again, strict=True)]
    _assert_kept(exchange, optimizer, moved)
    optimizer.replicator.options = replace(optimizer.replicator.options, route="gather")
    again = _rounds(optimizer, parameters, range(4, 5), exchange.rank)
    assert "owner_error" not in optimizer.state[parameters[0]]
    _assert_kept(exchange, optimizer, [one + other for one, other in zip(moved, again, strict=True)])
    return optimizer.fingerprint()


def test_owners_hand_over_their_errors() -> None:
    one, two, three = thread_exchanges(3)
    assert len(set(ranks.threads(_regrouped, 3, [two, three, one]))) == 1


def test_an_extraction_that_fails_leaves_local_steps_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is between extract and apply then: a state can be saved, and `rollback` forgets nothing."""
    parameters = problems.parameters(SHAPES)
    optimizer = _optimizer(None, parameters)
    problems.set_gradients(parameters, 0)
    optimizer.local_step()
    local = [parameter.detach().clone() for parameter in parameters]
    with monkeypatch.context() as broken:
        broken.setattr("demopt.replicator.replicator.compress", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.extract()
    optimizer.rollback()
    with optimizer.shared():
        optimizer.state_dict()
    assert problems.same(parameters, local)
