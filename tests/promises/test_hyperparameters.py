"""Hyper-parameters live in param_groups; groups, freezing and learning-rate schedules work, lr = 0 included."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import lr_scheduler

import oracle
import problems
import ranks
from demopt import DeMo

GROUPS: list[dict[str, Any]] = [
    {"lr": 0.5, "weight_decay": 0.2},
    {"top_k": 3, "update": "sgd", "momentum_decay": 0.5},
    {"chunk": 4, "top_k": 5, "transform": "hadamard", "alpha": 0.5, "maximize": True, "reduction": "mean"},
    {"gradient_scale": "lr", "chunking": "divisor", "values": "bfloat16", "transform": "identity", "update": "sgd"},
]


def _gradients(optimizer: DeMo, step: int, world_size: int) -> list[list[torch.Tensor | None]]:
    """The gradients that `problems.set_gradients` gives each rank."""
    numbered = list(enumerate(problems.all_parameters(optimizer)))
    return [[problems.draw(p.shape, 9, step, r, i, dtype=p.dtype) for i, p in numbered] for r in range(world_size)]


def _assert_follows(optimizer: DeMo, truth: oracle.Oracle) -> None:
    for number, parameter in enumerate(problems.all_parameters(optimizer)):
        settled = ~truth.undecided[number]
        torch.testing.assert_close(
            parameter.detach()[settled], truth.parameters[number][settled], rtol=1e-10, atol=1e-10
        )


def _follow(optimizer: DeMo, truth: oracle.Oracle, steps: range) -> None:
    for step in steps:
        truth.step(_gradients(optimizer, step, 1))
        problems.train(optimizer, [step])
        _assert_follows(optimizer, truth)


def test_param_groups_apply_every_setting_per_group() -> None:
    groups = [{"params": problems.parameters(problems.FEW, torch.float64, seed=n), **g} for n, g in enumerate(GROUPS)]
    optimizer = DeMo(groups, **{**problems.SMALL, "values": "float64"})
    for group, given in zip(optimizer.param_groups, GROUPS, strict=True):
        assert all(group[name] == value for name, value in given.items())
        assert group["lr"] == given.get("lr", problems.SMALL["lr"])
    _follow(optimizer, oracle.Oracle(optimizer.param_groups, 1), range(4))


@pytest.mark.parametrize(
    "name", ["lr", "weight_decay", "top_k", "momentum_decay", "alpha", "update", "reduction", "maximize"]
)
def test_param_group_setting_can_change_between_steps(name: str) -> None:
    values = {"lr": 0.3, "weight_decay": 0.1, "top_k": 3, "momentum_decay": 0.2, "alpha": 0.3, "update": "sgd"}
    value = {**values, "reduction": "root", "maximize": True}[name]
    optimizer = DeMo(problems.parameters(problems.FEW, torch.float64), **problems.SMALL, values="float64")
    truth = oracle.Oracle(optimizer.param_groups, 1)
    _follow(optimizer, truth, range(2))
    optimizer.param_groups[0][name] = value
    _follow(optimizer, truth, range(2, 4))


@pytest.mark.parametrize(("name", "value"), [("chunk", 8), ("transform", "identity"), ("chunking", "divisor")])
def test_param_group_layout_setting_cannot_change(name: str, value: Any) -> None:
    recorder = problems.Recorder()
    optimizer = DeMo(problems.parameters(problems.FEW), **problems.SMALL, process_group=recorder)
    problems.train(optimizer, range(1))
    before = optimizer.fingerprint(), problems.momenta(optimizer), len(recorder.lengths)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=name):
        optimizer.step()
    assert (optimizer.fingerprint(), len(recorder.lengths)) == (before[0], before[2])
    assert problems.same(problems.momenta(optimizer), before[1])


@pytest.mark.parametrize(("name", "value"), [("top_k", 0), ("lr", -1.0), ("momentum_decay", 1.0), ("update", "adam")])
def test_param_group_refuses_invalid_change(name: str, value: Any) -> None:
    optimizer = DeMo(problems.parameters(problems.FEW), **problems.SMALL)
    problems.train(optimizer, range(1))
    before = optimizer.fingerprint(), problems.momenta(optimizer)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=name):
        optimizer.step()
    assert optimizer.fingerprint() == before[0]
    assert problems.same(problems.momenta(optimizer), before[1])


@pytest.mark.parametrize("done", [0, 2])
def test_add_param_group_keeps_momenta_and_starts_at_zero(done: int) -> None:
    optimizer = DeMo(problems.parameters(problems.FEW, torch.float64), **problems.SMALL, values="float64")
    problems.train(optimizer, range(done))
    before = problems.momenta(optimizer)
    late = problems.parameters([(16, 16), (5,)], torch.float64, seed=4)
    optimizer.add_param_group({"params": late, "lr": 0.5})
    assert all(set(optimizer.state[p]) == {"momentum", "step", "saved_by"} for p in late)
    assert problems.same(problems.momenta(optimizer)[: len(before)], before)
    truth = oracle.Oracle(optimizer.param_groups, 1)
    for number, parameter in enumerate(problems.all_parameters(optimizer)[: len(before)]):
        truth.momenta[0][number] = oracle.dense(before[number], parameter, optimizer.param_groups[0])
    _follow(optimizer, truth, range(done, done + 3))


def test_add_param_group_refusal_leaves_no_trace() -> None:
    optimizer = DeMo(problems.parameters(problems.FEW), **problems.SMALL)
    problems.train(optimizer, range(1))
    bad = [
        {"params": [Parameter(torch.zeros(3))], "top_k": 0},
        {"params": [Parameter(torch.zeros(3))], "topk": 3},
        {"params": [Parameter(torch.zeros(3, dtype=torch.complex64))]},
    ]
    for group in bad:
        with pytest.raises((ValueError, TypeError)):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    problems.train(optimizer, range(1, 3))


def test_step_goes_on_once_refused_setting_is_restored() -> None:
    """The route refuses some settings late, when it is chosen anew."""
    optimizer, twin = (DeMo(problems.parameters(problems.FEW), **problems.SMALL, route="owner") for _ in range(2))
    problems.train(optimizer, range(1))
    before = optimizer.param_groups[0]["update"]
    optimizer.param_groups[0] |= {"update": "sgd", "top_k": 5}
    with pytest.raises(ValueError, match="route"):
        optimizer.step()
    optimizer.param_groups[0] |= {"update": before, "top_k": problems.SMALL["top_k"]}
    problems.train(twin, range(1))
    assert problems.same_history(problems.train(optimizer, range(1, 3)), problems.train(twin, range(1, 3)))


def test_add_param_group_refused_by_route_leaves_no_trace() -> None:
    optimizer, twin = (DeMo(problems.parameters(problems.FEW), **problems.SMALL, route="owner") for _ in range(2))
    problems.train(optimizer, range(1))
    with pytest.raises(ValueError, match="route 'owner'"):
        optimizer.add_param_group({"params": [Parameter(torch.zeros(3))], "update": "sgd"})
    problems.train(twin, range(1))
    assert problems.same_history(problems.train(optimizer, range(1, 3)), problems.train(twin, range(1, 3)))


def test_frozen_parameter_is_untouched_until_it_is_unfrozen() -> None:
    """No weight decay, no momentum, no bytes while it is frozen; then as if it were new."""
    parameters = problems.parameters(problems.FEW, torch.float64)
    parameters[1].requires_grad_(False)
    optimizer = DeMo(parameters, **problems.SMALL, weight_decay=0.5, values="float64")
    frozen = parameters[1].detach().clone()
    truth = oracle.Oracle(optimizer.param_groups, 1)
    _follow(optimizer, truth, range(2))  # with a stale gradient on the frozen one
    short = optimizer.stats.payload_bytes
    assert torch.equal(parameters[1], frozen)
    assert parameters[1] not in optimizer.state
    parameters[1].requires_grad_(True)
    _follow(optimizer, truth, range(2, 4))
    assert not torch.equal(parameters[1], frozen)
    assert optimizer.stats.payload_bytes > short


def test_frozen_parameter_keeps_its_momentum() -> None:
    optimizer = DeMo(problems.parameters(problems.FEW, torch.float64), **problems.SMALL, values="float64")
    truth = oracle.Oracle(optimizer.param_groups, 1)
    _follow(optimizer, truth, range(2))
    parameter = problems.all_parameters(optimizer)[0]
    parameter.requires_grad_(False)
    _follow(optimizer, truth, range(2, 4))
    parameter.requires_grad_(True)
    _follow(optimizer, truth, range(4, 6))


def test_step_with_all_frozen_changes_nothing() -> None:
    optimizer = DeMo(problems.parameters(problems.FEW), **problems.SMALL)
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
    optimizer = DeMo(
        problems.parameters(problems.FEW, torch.float64),
        **{**problems.SMALL, "lr": 0.0},
        update=update,
        gradient_scale=gradient_scale,
        weight_decay=0.1,
        values="float64",
    )
    start = optimizer.fingerprint()
    truth = oracle.Oracle(optimizer.param_groups, 1)
    _follow(optimizer, truth, range(2))
    assert optimizer.fingerprint() == start
    assert not optimizer.stats.skipped
    optimizer.param_groups[0]["lr"] = 0.1
    _follow(optimizer, truth, range(2, 4))
    assert optimizer.fingerprint() != start


SCHEDULERS: dict[str, Callable[[DeMo], Any]] = {
    "warm-up from zero": lambda o: lr_scheduler.LambdaLR(o, lambda step: step / 3),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=6, cycle_momentum=False),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.0, max_lr=0.1, step_size_up=2, cycle_momentum=False),
    "a chain": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, gamma=0.9)], milestones=[2]
    ),
}


def _scheduled(rank: int, world_size: int, name: str) -> tuple[problems.History, list[Any], list[float]]:
    parameters = problems.parameters(problems.FEW, torch.float64)
    optimizer = DeMo(parameters, **problems.SMALL, values="float64", update="sgd")
    scheduler = SCHEDULERS[name](optimizer)
    truth = oracle.Oracle(optimizer.param_groups, world_size)
    fingerprints, rates = [], []
    for step in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        truth.step(_gradients(optimizer, step, world_size))
        fingerprints += problems.train(optimizer, [step], rank).fingerprints
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning if name != "a chain" else UserWarning)
            scheduler.step()
    history = problems.History(fingerprints, [p.detach() for p in parameters], problems.momenta(optimizer))
    return history, truth.parameters, rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_lr_schedulers_drive_updates_as_in_oracle(name: str) -> None:
    results = ranks.run(_scheduled, 2, name)
    problems.assert_replicas([history for history, _, _ in results])
    history, expected, rates = results[0]
    assert len(set(rates)) > 1
    for got, want in zip(history.parameters, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def _add_and_unfreeze(rank: int, world_size: int) -> problems.History:
    parameters = problems.parameters(problems.FEW)
    parameters[0].requires_grad_(False)
    optimizer = DeMo(parameters, **problems.SMALL)
    fingerprints = problems.train(optimizer, range(2), rank).fingerprints
    parameters[0].requires_grad_(True)
    fingerprints += problems.train(optimizer, range(2, 4), rank).fingerprints
    optimizer.add_param_group({"params": problems.parameters([(9, 9)], seed=3), "top_k": 50})
    optimizer.param_groups[0]["top_k"] = 7
    last = problems.train(optimizer, range(4, 6), rank)
    return problems.History(fingerprints + last.fingerprints, last.parameters, last.momenta)


def test_add_param_group_and_unfreezing_keep_replicas_equal() -> None:
    problems.assert_replicas(ranks.run(_add_and_unfreeze, 3))
