"""Hyper-parameters live in param_groups: impossible changes are refused, and learning-rate schedules work.

Beside the oracle, optim/test_oracle_property.py has groups with settings of their own, and optim/test_state_machine.py
changes settings (lr = 0 included), freezes parameters and adds groups in random order.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import Parameter, UninitializedParameter
from torch.optim import lr_scheduler

import problems
from demopt import DeMo, LocalDeMo
from demopt.codec.hyperparameters import Codec


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("chunk", 8), ("transform", "identity"), ("chunking", "divisor")),  # which momenta depend on
        *(("top_k", 0), ("lr", -1.0), ("momentum_decay", 1.0), ("update", "adam"), ("exact", 0)),
        *((name, {name: value}) for name, value in (("top_k", 0), ("topk", 3))),  # of a group more
        ("complex", {"params": [Parameter(torch.zeros(3, dtype=torch.cfloat))]}),
        ("float8", {"params": [Parameter(torch.zeros(3, dtype=torch.float8_e5m2))]}),
        ("lazy module", {"params": [UninitializedParameter()]}),
    ],
)
def test_impossible_change_or_group_is_refused_before_sending_and_leaves_no_trace(name, value):
    recorder = problems.Recorder()
    optimizer, twin = problems.demo(recorder), problems.demo()
    for each in (optimizer, twin):
        problems.train(each, range(1))
    before = dict(optimizer.param_groups[0])
    change: Callable[[], object] = optimizer.step
    if isinstance(value, dict):
        change = partial(optimizer.add_param_group, {"params": [Parameter(torch.zeros(3))], **value})
    else:
        optimizer.param_groups[0][name] = value
    with problems.unchanged(optimizer, recorder), pytest.raises((ValueError, TypeError), match=name):
        change()
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0] |= before
    assert problems.same_history(problems.train(optimizer, range(1, 3)), problems.train(twin, range(1, 3)))


SCHEDULERS: dict[str, Callable[[DeMo], Any]] = {
    "warm-up from zero": lambda o: lr_scheduler.LambdaLR(o, lambda step: step / 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=6, cycle_momentum=False),
    "a chain": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, gamma=0.9)], milestones=[2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_lr_schedulers_set_the_rate_of_each_step(name):
    scheduled, by_hand, rates = problems.demo(), problems.demo(), []
    scheduler = SCHEDULERS[name](scheduled)
    for step in range(5):
        rates.append(scheduled.param_groups[0]["lr"])
        by_hand.param_groups[0]["lr"] = rates[-1]
        assert problems.same_history(problems.train(scheduled, [step]), problems.train(by_hand, [step]))
        problems.warned(scheduler.step)  # torch's own warnings
    assert len(set(rates)) > 1


def test_schedulers_that_cycle_momentum_change_that_of_an_inner_optimizer_and_find_none_in_demo():
    optimizer = problems.local(inner=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), error_decay=0.5)
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    assert optimizer.inner[0].param_groups[0]["momentum"] == 0.95
    assert optimizer.replicator.groups[0]["momentum_decay"] == 0.5
    assert optimizer.replicator.groups[0]["lr"] == 1.0
    with pytest.raises(ValueError, match="momentum"):
        lr_scheduler.OneCycleLR(problems.demo(), max_lr=0.1, total_steps=6)


def test_numbers_of_numpy_count_as_numbers_and_are_saved_as_plain_ones():
    numpy = pytest.importorskip("numpy")
    whole, real = numpy.int64, numpy.float32
    few, codec = problems.parameters(problems.FEW), Codec(chunk=whole(16))
    optimizer = DeMo(few, lr=real(0.25), top_k=whole(24), fingerprint_every=whole(2), codec=codec)
    problems.set_gradients(few, 0)
    optimizer.step()
    assert problems.by_file(optimizer.state_dict())["param_groups"][0]["lr"] == 0.25
    inner = torch.optim.SGD(few, lr=0.1)
    local = LocalDeMo(inner, sync_every=whole(1), delay=whole(1), samples=whole(3), outer_lr=real(0.5))
    local.step()
    local.flush()
    assert (local.sync_every, local.samples) == (1, 3)


@pytest.mark.parametrize("route", ["gather", "auto"])
def test_messages_longer_than_a_header_can_state_are_refused_at_construction(route):
    """Signs of 40 billion coefficients; on "meta", where they take no memory."""
    parameter = Parameter(torch.empty(200_000, 200_000, device="meta"))
    with pytest.raises(ValueError, match=r"a message would have 5,0.* bytes, and its header counts up to 4,294,967"):
        LocalDeMo(torch.optim.SGD([parameter], lr=0.1), route=route, process_group=problems.OneOf(0, 4))
