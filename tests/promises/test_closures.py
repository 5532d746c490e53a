"""Closures are honoured: evaluated once, with autograd, before the exchange."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import problems
import ranks
from demopt import DeMo


def test_closure_runs_once_before_exchange_and_returns_loss() -> None:
    order: list[str] = []

    class Noting(problems.Recorder):
        def all_gather(self, message_B: Tensor) -> Tensor:
            order.append("exchange")
            return super().all_gather(message_B)

    weight = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = DeMo([weight], lr=0.5, process_group=Noting())

    def closure() -> Tensor:
        order.append("closure")
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert order[0] == "closure"
    assert order.count("closure") == 1
    assert "exchange" in order
    assert float(loss.detach()) == 13.0
    assert weight.tolist() != [3.0, -2.0]
    assert optimizer.step() is None


def test_closure_gradient_is_the_one_used() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = DeMo([weight], lr=1.0, top_k=4096, values="float32")
    weight.grad = torch.tensor([1.0, 1.0])

    def closure() -> float:
        weight.grad = torch.tensor([-1.0, 1.0])
        return 0.0

    optimizer.step(closure)
    assert weight.tolist() == [1.0, -1.0]


def test_closure_failure_sends_and_changes_nothing() -> None:
    recorder = problems.Recorder()
    parameters = problems.parameters(problems.FEW)
    optimizer = DeMo(parameters, **problems.SMALL, process_group=recorder)
    problems.set_gradients(parameters, 0)
    before = optimizer.fingerprint(), problems.momenta(optimizer)

    def closure() -> float:
        raise ArithmeticError("the loss failed")

    with pytest.raises(ArithmeticError, match="the loss failed"):
        optimizer.step(closure)
    assert recorder.lengths == []
    assert optimizer.fingerprint() == before[0]
    assert problems.same(problems.momenta(optimizer), before[1])
    optimizer.step()


def _train(rank: int, world_size: int, with_closure: bool) -> problems.History:
    torch.manual_seed(0)
    model = torch.nn.Linear(17, 5)
    optimizer = DeMo(model.parameters(), **problems.SMALL)
    fingerprints = []
    for step in range(3):
        data = problems.draw((8, 17), rank, step)

        def backward(data: Tensor = data) -> float:
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            return float(loss.detach())

        closure: Callable[[], float] | None = backward
        if not with_closure:
            backward()
            closure = None
        loss = optimizer.step(closure)
        assert (loss is not None) == with_closure
        fingerprints.append(optimizer.fingerprint())
    return problems.History(fingerprints, [p.detach() for p in model.parameters()], problems.momenta(optimizer))


def test_closure_steps_equal_plain_steps() -> None:
    with_closure, without = ranks.run(_train, 2, True), ranks.run(_train, 2, False)
    problems.assert_replicas(with_closure)
    assert all(problems.same_history(a, b) for a, b in zip(with_closure, without, strict=True))
