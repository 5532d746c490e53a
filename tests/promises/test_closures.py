"""Closures are honoured: evaluated once, with autograd, before the exchange; and hooks fire once per step."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import problems
from demopt import DeMo


def test_closure_runs_once_before_exchange_and_returns_loss() -> None:
    order: list[str] = []

    class Noting(problems.Recorder):
        def all_gather(self, message_B: Tensor) -> Tensor:
            order.append("exchange")
            return super().all_gather(message_B)

    weight = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = DeMo([weight], lr=0.5, top_k=4096, values="float32", process_group=Noting())
    weight.grad = torch.tensor([-1.0, -1.0])

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
    assert weight.tolist() == [2.5, -1.5], "the closure's gradient is the one used"
    assert optimizer.step() is None


def test_closure_failure_sends_and_changes_nothing() -> None:
    recorder = problems.Recorder()
    optimizer = problems.demo(recorder)
    problems.set_gradients(problems.all_parameters(optimizer), 0)
    before = optimizer.fingerprint(), problems.momenta(optimizer)

    def closure() -> float:
        raise ArithmeticError("the loss failed")

    with pytest.raises(ArithmeticError, match="the loss failed"):
        optimizer.step(closure)
    assert recorder.lengths == []
    assert optimizer.fingerprint() == before[0]
    assert problems.same(problems.momenta(optimizer), before[1])
    optimizer.step()


@pytest.fixture
def counted() -> Iterator[tuple[dict[str, int], torch.nn.Module, DeMo]]:
    """A model and its optimizer with hooks of each kind, and how often each was called."""
    kinds = ["forward", "backward", "gradient", "accumulated", "before", "after", "any before", "any after"]
    counts = dict.fromkeys(kinds, 0)

    def count(name: str) -> None:
        counts[name] += 1

    model = torch.nn.Linear(6, 3, bias=False)
    optimizer = DeMo(model.parameters(), **problems.SMALL)
    model.register_forward_hook(lambda *_: count("forward"))
    model.register_full_backward_hook(lambda *_: count("backward"))
    model.weight.register_hook(lambda _: count("gradient"))
    model.weight.register_post_accumulate_grad_hook(lambda _: count("accumulated"))
    optimizer.register_step_pre_hook(lambda *_: count("before"))
    optimizer.register_step_post_hook(lambda *_: count("after"))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: count("any before")),
        register_optimizer_step_post_hook(lambda *_: count("any after")),
    ]
    yield counts, model, optimizer
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("by_closure", [False, True])
def test_hooks_fire_once_a_step(counted: tuple[dict[str, int], torch.nn.Module, DeMo], by_closure: bool) -> None:
    counts, model, optimizer = counted

    def backward() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6, requires_grad=True)).sum()
        loss.backward()
        return float(loss.detach())

    for step in (1, 2):
        if not by_closure:
            backward()
        optimizer.step(backward if by_closure else None)
        assert counts == dict.fromkeys(counts, step)


def test_step_pre_hook_may_change_gradients_and_the_step_leaves_them_unchanged() -> None:
    """Clipping in a pre-hook is in time."""
    ends = []
    for scale in (1.0, 0.0):
        optimizer = problems.demo(maximize=True)
        parameters = problems.all_parameters(optimizer)
        problems.set_gradients(parameters, 0)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        rescaled = [scale * gradient for gradient in gradients]

        def rescale(*_: object, gradients: list[Tensor] = gradients, scale: float = scale) -> None:
            for gradient in gradients:
                gradient.mul_(scale)

        optimizer.register_step_pre_hook(rescale)
        start = optimizer.fingerprint()
        optimizer.step()
        ends.append(optimizer.fingerprint() == start)
        assert problems.same(gradients, rescaled)
    assert ends == [False, True]
