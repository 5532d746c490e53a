"""torch.compile around models and around `step`, and schedulers that would cycle a momentum.

Forbidden: a crash of dynamo, other numbers than without it, a momentum that changes because a default said so.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

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


# Schedulers that cycle momentum


def _schedule(optimizer: torch.optim.Optimizer, name: str, **asked: float) -> LRScheduler:
    if name == "OneCycleLR":
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=8, **asked)
    return CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=2, **asked)


def _momenta(optimizer: DeMo, scheduler: LRScheduler) -> tuple[list[float], list[str]]:
    """The momentum of each step, and what was said."""
    momenta, rates = [], set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            problems.set_gradients(problems.all_parameters(optimizer), step)
            optimizer.step()
            momenta.append(optimizer.param_groups[0]["momentum"])
            rates.add(optimizer.param_groups[0]["lr"])
            scheduler.step()
    assert len(rates) > 1, "the learning rate is cycled"
    return momenta, [str(each.message) for each in caught]


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_schedulers_do_not_cycle_momentum_unasked(name: str) -> None:
    settings = {**problems.SMALL, "momentum": 0.97}
    optimizer = DeMo(problems.parameters(problems.FEW), **settings, process_group=SingleRank())
    scheduler = _schedule(optimizer, name)
    momenta, said = _momenta(optimizer, scheduler)
    assert momenta == [0.97] * 4
    assert len(said) == 1
    assert "cycle_momentum=False" in said[0]
    assert optimizer.state_dict()["param_groups"][0]["momentum"] == 0.97


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_schedulers_cycle_momentum_where_they_are_asked_to(name: str) -> None:
    optimizer = DeMo(problems.parameters(problems.FEW), **problems.SMALL, process_group=SingleRank())
    momenta, said = _momenta(optimizer, _schedule(optimizer, name, base_momentum=0.9, max_momentum=0.98))
    assert momenta[0] == 0.98
    assert 0.9 <= min(momenta) < 0.98
    assert said == []


def test_schedulers_of_local_demo_change_its_inner_optimizer_alone() -> None:
    inner = torch.optim.SGD(problems.parameters(problems.FEW), lr=0.1, momentum=0.9)
    optimizer = LocalDeMo(inner, sync_every=1, error_decay=0.5, process_group=SingleRank())
    OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    assert inner.param_groups[0]["momentum"] == 0.95
    assert optimizer._codec.param_groups[0]["momentum"] == 0.5
