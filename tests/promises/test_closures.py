"""Closures are honoured: evaluated once, with autograd, before the exchange; and hooks fire once per step."""

from collections import Counter

import pytest
import torch
from torch import Tensor

import problems
from demopt import DeMo
from demopt.codec.hyperparameters import Codec


def test_closure_runs_once_before_exchange_and_returns_loss() -> None:
    recorder, sent_before = problems.Recorder(), list[int]()
    weight = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = DeMo([weight], lr=0.5, top_k=4096, process_group=recorder, codec=Codec(values="float32"))
    weight.grad = torch.tensor([-1.0, -1.0])

    def closure() -> Tensor:
        sent_before.append(len(recorder.lengths))
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert sent_before == [0], "the closure ran once, before any exchange"
    assert recorder.lengths
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


@pytest.mark.parametrize("by_closure", [False, True])
def test_hooks_fire_once_a_step_and_a_pre_hook_may_change_gradients(by_closure: bool) -> None:
    counts: Counter[str] = Counter()
    model = torch.nn.Linear(6, 3, bias=False)
    optimizer = DeMo(model.parameters(), maximize=True, **problems.SMALL)
    model.weight.register_hook(lambda _: counts.update(["gradient"]))
    model.weight.register_post_accumulate_grad_hook(lambda _: counts.update(["accumulated"]))
    optimizer.register_step_post_hook(lambda *_: counts.update(["after"]))

    def backward() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6, requires_grad=True)).sum()
        loss.backward()
        return float(loss.detach())

    def clip(*_: object) -> None:
        counts.update(["before"])
        if model.weight.grad is not None:  # without a closure: it is in time
            model.weight.grad.zero_()

    optimizer.register_step_pre_hook(clip)
    for step in (1, 2):
        if not by_closure:
            backward()
        start = optimizer.fingerprint()
        optimizer.step(backward if by_closure else None)
        assert counts == dict.fromkeys(["gradient", "accumulated", "before", "after"], step)
        assert (optimizer.fingerprint() == start) == (not by_closure)
        assert torch.equal(model.weight.grad, torch.full((3, 6), 2.0 * by_closure)), "a step leaves gradients unchanged"
