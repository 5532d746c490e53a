"""Hyper-parameters live in param_groups; groups, freezing and learning-rate schedules work, lr = 0 included.

optim/test_state_machine.py changes settings, freezes parameters and adds groups in random order, beside the oracle.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import lr_scheduler

import oracle
import problems
import ranks
from demopt import DeMo, LocalDeMo
from demopt.exchange import SingleRank

GROUPS: list[dict[str, Any]] = [
    {"lr": 0.5, "weight_decay": 0.2},
    {"top_k": 3, "update": "sgd", "momentum_decay": 0.5},
    {"chunk": 4, "top_k": 5, "transform": "hadamard", "alpha": 0.5, "maximize": True, "reduction": "mean"},
    {"gradient_scale": "lr", "chunking": "divisor", "values": "bfloat16", "transform": "identity", "update": "sgd"},
]


def _follow(optimizer: DeMo, truth: oracle.Oracle, steps: range) -> None:
    """Steps both, and compares parameters."""
    for step in steps:
        truth.step(problems.gradients_of_ranks(problems.all_parameters(optimizer), step, 1))
        problems.train(optimizer, [step])
        for got, wanted, undecided in zip(problems.values(optimizer), truth.parameters, truth.undecided, strict=True):
            torch.testing.assert_close(got[~undecided], wanted[~undecided], rtol=1e-10, atol=1e-10)


def test_param_groups_apply_every_setting_per_group() -> None:
    groups = [{"params": problems.parameters(problems.FEW, torch.float64, seed=n), **g} for n, g in enumerate(GROUPS)]
    optimizer = DeMo(groups, **{**problems.SMALL, "values": "float64"})
    for group, given in zip(optimizer.param_groups, GROUPS, strict=True):
        assert all(group[name] == value for name, value in given.items())
        assert group["lr"] == given.get("lr", problems.SMALL["lr"])
    _follow(optimizer, oracle.Oracle(optimizer.param_groups, 1), range(4))


@pytest.mark.parametrize(("name", "value"), [("update", "sgd"), ("reduction", "root"), ("maximize", True)])
def test_param_group_setting_can_change_between_steps(name: str, value: Any) -> None:
    optimizer = problems.demo(dtype=torch.float64, values="float64")
    truth = oracle.Oracle(optimizer.param_groups, 1)
    _follow(optimizer, truth, range(2))
    optimizer.param_groups[0][name] = value
    _follow(optimizer, truth, range(2, 4))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("chunk", 8), ("transform", "identity"), ("chunking", "divisor")),  # which momenta depend on
        *(("top_k", 0), ("lr", -1.0), ("momentum_decay", 1.0), ("update", "adam")),
    ],
)
def test_param_group_refuses_impossible_change_before_sending(name: str, value: Any) -> None:
    recorder = problems.Recorder()
    optimizer = problems.demo(recorder)
    problems.train(optimizer, range(1))
    before = optimizer.fingerprint(), problems.momenta(optimizer), len(recorder.lengths)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=name):
        optimizer.step()
    assert (optimizer.fingerprint(), len(recorder.lengths)) == (before[0], before[2])
    assert problems.same(problems.momenta(optimizer), before[1])


@pytest.mark.parametrize(
    "bad", [{"top_k": 0}, {"topk": 3}, {"update": "sgd"}, {"params": [Parameter(torch.zeros(3, dtype=torch.cfloat))]}]
)
def test_add_param_group_refusal_leaves_no_trace(bad: dict[str, Any]) -> None:
    """Route "owner" refuses update "sgd"."""
    optimizer, twin = problems.demo(route="owner"), problems.demo(route="owner")
    for each in (optimizer, twin):
        problems.train(each, range(1))
    with pytest.raises((ValueError, TypeError)):
        optimizer.add_param_group({"params": [Parameter(torch.zeros(3))], **bad})
    assert len(optimizer.param_groups) == 1
    assert problems.same_history(problems.train(optimizer, range(1, 3)), problems.train(twin, range(1, 3)))


def test_step_goes_on_once_refused_setting_is_restored() -> None:
    """The route refuses some settings late, when it is chosen anew."""
    optimizer, twin = problems.demo(route="owner"), problems.demo(route="owner")
    for each in (optimizer, twin):
        problems.train(each, range(1))
    before = dict(optimizer.param_groups[0])
    optimizer.param_groups[0] |= {"update": "sgd", "top_k": 5}
    with pytest.raises(ValueError, match="route"):
        optimizer.step()
    optimizer.param_groups[0] |= before
    assert problems.same_history(problems.train(optimizer, range(1, 3)), problems.train(twin, range(1, 3)))


def test_step_with_all_frozen_changes_nothing() -> None:
    optimizer = problems.demo()
    for parameter in problems.all_parameters(optimizer):
        parameter.requires_grad_(False)
    before = optimizer.fingerprint()
    optimizer.step()
    assert optimizer.fingerprint() == before
    assert optimizer.stats.kept == 0


# Learning rates


@pytest.mark.parametrize("gradient_scale", ["ema", "lr"])
@pytest.mark.parametrize("update", ["sgd", "signum"])
def test_lr_zero_moves_nothing_and_breaks_nothing(gradient_scale: str, update: str) -> None:
    settings: dict[str, Any] = {"lr": 0.0, "weight_decay": 0.1, "values": "float64"}
    optimizer = problems.demo(dtype=torch.float64, update=update, gradient_scale=gradient_scale, **settings)
    start = optimizer.fingerprint()
    truth = oracle.Oracle(optimizer.param_groups, 1)
    _follow(optimizer, truth, range(2))
    assert optimizer.fingerprint() == start
    assert not optimizer.stats.skipped
    optimizer.param_groups[0]["lr"] = 0.1
    _follow(optimizer, truth, range(2, 4))
    assert optimizer.fingerprint() != start


CYCLES = {
    "OneCycleLR": lambda o, **more: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=6, **more),
    "CyclicLR": lambda o, **more: lr_scheduler.CyclicLR(o, base_lr=0.0, max_lr=0.1, step_size_up=2, **more),
}
SCHEDULERS: dict[str, Callable[[DeMo], Any]] = {
    "warm-up from zero": lambda o: lr_scheduler.LambdaLR(o, lambda step: step / 3),
    **{name: lambda o, make=make: make(o, cycle_momentum=False) for name, make in CYCLES.items()},
    "a chain": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, gamma=0.9)], milestones=[2]
    ),
}


def _scheduled(rank: int, world_size: int, name: str) -> tuple[problems.History, list[Any], list[float]]:
    optimizer = problems.demo(dtype=torch.float64, values="float64", update="sgd")
    scheduler = SCHEDULERS[name](optimizer)
    truth = oracle.Oracle(optimizer.param_groups, world_size)
    fingerprints, rates = [], []
    for step in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        truth.step(problems.gradients_of_ranks(problems.all_parameters(optimizer), step, world_size))
        history = problems.train(optimizer, [step], rank)
        fingerprints += history.fingerprints
        problems.warned(scheduler.step)  # torch's own warnings
    return problems.History(fingerprints, history.parameters, history.momenta), truth.parameters, rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_lr_schedulers_drive_updates_as_in_oracle(name: str) -> None:
    results = ranks.run(_scheduled, 2, name)
    problems.assert_replicas([history for history, _, _ in results])
    history, expected, rates = results[0]
    assert len(set(rates)) > 1
    for got, want in zip(history.parameters, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CYCLES)
def test_schedulers_that_cycle_momentum_find_none_in_demo(name: str) -> None:
    """They cycle "momentum" or "betas" of torch's optimizers; DeMo has neither, and they say so."""
    with pytest.raises(ValueError, match="momentum"):
        CYCLES[name](problems.demo())


def test_schedulers_of_local_demo_change_its_inner_optimizer_alone() -> None:
    inner = torch.optim.SGD(problems.parameters(problems.FEW), lr=0.1, momentum=0.9)
    optimizer = LocalDeMo(inner, sync_every=1, error_decay=0.5, process_group=SingleRank())
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    assert inner.param_groups[0]["momentum"] == 0.95
    assert optimizer.replicator.groups[0]["momentum_decay"] == 0.5
    assert optimizer.replicator.groups[0]["lr"] == 1.0
