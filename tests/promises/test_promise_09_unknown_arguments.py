"""Promise 9: unknown arguments are refused by name.

Forbidden: `**kwargs` that swallow a misspelled setting, and values that fail steps later or not at all.
"""

from typing import Any

import pytest
import torch
from torch.nn import Parameter

import demopt
import problems
from demopt import DeMo


def _weight() -> Parameter:
    return Parameter(torch.zeros(4, 4))


@pytest.mark.parametrize("name", ["topk", "learning_rate", "betas", "compression_decay", "nesterov"])
def test_demo_refuses_unknown_arguments(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        DeMo([_weight()], **{name: 1})


@pytest.mark.parametrize("name", ["topk", "learning_rate", "betas", "process_group"])
def test_demo_refuses_unknown_group_keys(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        DeMo([{"params": [_weight()], name: 1}])
    optimizer = DeMo([_weight()])
    with pytest.raises(TypeError, match=name):
        optimizer.add_param_group({"params": [_weight()], name: 1})


BAD: list[tuple[str, Any, str]] = [
    ("lr", -0.1, r"-0\.1"),
    ("lr", float("nan"), "nan"),
    ("lr", float("inf"), "inf"),
    ("lr", "fast", "fast"),
    ("lr", None, "None"),
    ("momentum", 1.0, r"1\.0"),
    ("momentum", -0.1, r"-0\.1"),
    ("alpha", 0.0, r"0\.0"),
    ("alpha", 1.1, r"1\.1"),
    ("weight_decay", -1.0, r"-1\.0"),
    ("top_k", 0, "0"),
    ("top_k", -3, "-3"),
    ("top_k", 2.5, r"2\.5"),
    ("top_k", True, "True"),
    ("chunk", 0, "0"),
    ("chunk", 64.0, r"64\.0"),
    ("transform", "fft", "'dct', 'hadamard', 'random', 'identity'"),
    ("update", "adam", "'sgd', 'nesterov', 'signum'"),
    ("reduction", "sum", "'senders', 'mean'"),
    ("values", "float8", "'float32', 'bfloat16'"),
    ("gradient_scale", "v1", "'ema', 'lr'"),
    ("chunking", "exact", "'padded', 'divisor'"),
    ("maximize", 1, "1"),
    ("maximize", "yes", "yes"),
]


@pytest.mark.parametrize(("name", "value", "says"), BAD, ids=[f"{name}={value}" for name, value, _ in BAD])
def test_demo_refuses_impossible_values_by_name(name: str, value: Any, says: str) -> None:
    for make in (
        lambda: DeMo([_weight()], **{name: value}),
        lambda: DeMo([{"params": [_weight()], name: value}]),
        lambda: DeMo([_weight()]).add_param_group({"params": [_weight()], name: value}),
    ):
        with pytest.raises((ValueError, TypeError), match=name) as caught:
            make()
        assert caught.match(says)


def test_process_group_of_wrong_type_is_refused() -> None:
    """At the latest at the first step; not by a missing attribute far inside."""
    for what in ("gloo", 2, object()):
        with pytest.raises((ValueError, TypeError), match="process_group"):
            _step_twice(DeMo(problems.parameters(problems.FEW), process_group=what))


def _step_twice(optimizer: DeMo) -> None:
    """The second attempt fails as the first did: the first left nothing half done."""
    with pytest.raises((ValueError, TypeError), match="process_group"):
        problems.train(optimizer, range(1))
    optimizer.state_dict()
    problems.train(optimizer, range(1))


@pytest.mark.parametrize("preset", [demopt.V1, demopt.V2])
def test_presets_are_valid_arguments(preset: dict[str, Any]) -> None:
    optimizer = DeMo([_weight()], lr=0.1, **preset)
    assert all(optimizer.param_groups[0][name] == value for name, value in preset.items())
    DeMo([_weight()], lr=0.1, **{**preset, "top_k": 7})


def test_demo_accepts_extreme_settings() -> None:
    for settings in (
        {"lr": 0.0},
        {"momentum": 0.0},
        {"alpha": 1.0},
        {"chunk": 1, "top_k": 1},
        {"top_k": 10**9},
        {"chunk": 5000, "top_k": 3},
        {"lr": torch.tensor(0.1)},
        {"lr": 1},
    ):
        problems.train(DeMo(problems.parameters(problems.FEW), **settings), range(2))


def test_demo_refuses_empty_and_integer_parameters() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        DeMo([])
    with pytest.raises(TypeError, match="int64"):
        DeMo([torch.zeros(3, dtype=torch.int64)])
