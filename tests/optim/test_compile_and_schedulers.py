"""torch.compile around models and around `step`; schedulers change learning rates alone, not DeMo's decay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

import problems
from demopt import DeMo, LocalDeMo
from demopt.exchange import SingleRank

STEPS = 4


def _trained(kind: str, compiled: str, backend: str = "eager") -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Callable[..., Any] = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    parameters = list(model.parameters())  # type: ignore[attr-defined]
    optimizer: Any = DeMo(parameters, **problems.SMALL, process_group=SingleRank())
    if kind == "LocalDeMo":
        optimizer = LocalDeMo(torch.optim.SGD(parameters, lr=0.1), sync_every=2, process_group=SingleRank())
    if compiled == "model":
        model = torch.compile(model, backend=backend)
    step = torch.compile(optimizer.step, backend=backend) if compiled == "step" else optimizer.step

    def train(number: int) -> None:
        optimizer.zero_grad()
        model(problems.draw((5, 16), number)).square().mean().backward()
        step()

    if compiled == "loop":
        train = torch.compile(train, backend=backend)
    for number in range(STEPS):
        train(number)
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
@pytest.mark.parametrize("compiled", ["model", "step", "loop"])
def test_torch_compile_changes_nothing(kind: str, compiled: str) -> None:
    torch._dynamo.reset()
    assert problems.same(_trained(kind, compiled), _trained(kind, "nothing"))


def test_model_compiled_ahead_of_time_trains() -> None:
    torch._dynamo.reset()
    for ours, plain in zip(_trained("DeMo", "model", "aot_eager"), _trained("DeMo", "nothing"), strict=True):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_schedulers_that_cycle_momentum_leave_demo_alone(name: str) -> None:
    """They cycle "momentum" or "betas" of torch's optimizers; DeMo has neither, and they say so."""
    settings = {**problems.SMALL, "momentum_decay": 0.97}
    optimizer = DeMo(problems.parameters(problems.FEW), **settings, process_group=SingleRank())
    if name == "OneCycleLR":
        make: Any = lambda **more: OneCycleLR(optimizer, max_lr=0.1, total_steps=8, **more)  # noqa: E731
    else:
        make = lambda **more: CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=2, **more)  # noqa: E731
    with pytest.raises(ValueError, match="momentum"):
        make()
    scheduler, rates = make(cycle_momentum=False), set()
    for step in range(4):
        problems.train(optimizer, [step])
        rates.add(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert len(rates) > 1
    assert optimizer.param_groups[0]["momentum_decay"] == 0.97


def test_schedulers_of_local_demo_change_its_inner_optimizer_alone() -> None:
    inner = torch.optim.SGD(problems.parameters(problems.FEW), lr=0.1, momentum=0.9)
    optimizer = LocalDeMo(inner, sync_every=1, error_decay=0.5, process_group=SingleRank())
    OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    assert inner.param_groups[0]["momentum"] == 0.95
    assert optimizer.replicator.groups[0]["momentum_decay"] == 0.5
    assert optimizer.replicator.groups[0]["lr"] == 1.0


def test_lambda_scheduler_with_lr_0_moves_nothing_and_keeps_the_gradient() -> None:
    optimizer = DeMo(problems.parameters(problems.FEW), **problems.SMALL, process_group=SingleRank())
    scheduler = LambdaLR(optimizer, lambda step: float(step > 0))
    before = optimizer.fingerprint()
    problems.train(optimizer, [0])
    assert optimizer.fingerprint() == before
    assert any(momentum.any() for momentum in problems.momenta(optimizer))
    scheduler.step()
    problems.train(optimizer, [1])
    assert optimizer.fingerprint() != before
