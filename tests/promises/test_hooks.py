"""Hooks fire once per step."""

from collections.abc import Iterator

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import problems
from demopt import DeMo


@pytest.fixture
def counted() -> Iterator[tuple[dict[str, int], torch.nn.Module, DeMo]]:
    counts = dict.fromkeys(
        ["forward", "backward", "gradient", "accumulated", "before", "after", "any before", "any after"], 0
    )

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


def test_hooks_fire_once_a_step(counted: tuple[dict[str, int], torch.nn.Module, DeMo]) -> None:
    counts, model, optimizer = counted
    for step in (1, 2):
        optimizer.zero_grad()
        model(torch.ones(2, 6, requires_grad=True)).sum().backward()
        optimizer.step()
        assert counts == dict.fromkeys(counts, step)


def test_hooks_fire_once_a_step_with_closure(counted: tuple[dict[str, int], torch.nn.Module, DeMo]) -> None:
    counts, model, optimizer = counted

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6, requires_grad=True)).sum()
        loss.backward()
        return float(loss.detach())

    for step in (1, 2):
        optimizer.step(closure)
        assert counts == dict.fromkeys(counts, step)


def test_step_pre_hook_may_change_gradients() -> None:
    """Clipping in a pre-hook is in time."""
    ends = []
    for scale in (1.0, 0.0):
        parameters = problems.parameters(problems.FEW)
        optimizer = DeMo(parameters, **problems.SMALL)

        def rescale(*_: object, parameters: list[torch.nn.Parameter] = parameters, scale: float = scale) -> None:
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(scale)

        optimizer.register_step_pre_hook(rescale)
        start = optimizer.fingerprint()
        ends.append(problems.train(optimizer, range(1)).fingerprints[0] == start)
    assert ends == [False, True]


def test_step_leaves_gradients_unchanged() -> None:
    parameters = problems.parameters(problems.FEW)
    optimizer = DeMo(parameters, **problems.SMALL, maximize=True)
    problems.set_gradients(parameters, 0)
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    optimizer.step()
    assert problems.same([p.grad for p in parameters if p.grad is not None], before)
