"""Unknown arguments and impossible values are refused by name."""

from typing import Any

import pytest
import torch
from torch.nn import Parameter

import demopt
import problems
from demopt import DeMo, LocalDeMo


def _weight() -> Parameter:
    return Parameter(torch.zeros(4, 4))


def test_unknown_arguments_are_refused_by_name() -> None:
    optimizer = DeMo([_weight()])
    for make in (
        lambda: DeMo([_weight()], topk=8),  # type: ignore[call-arg]
        lambda: LocalDeMo(torch.optim.SGD([_weight()]), topk=8),  # type: ignore[call-arg]
        lambda: DeMo([{"params": [_weight()], "topk": 8}]),
        lambda: optimizer.add_param_group({"params": [_weight()], "topk": 8}),
    ):
        with pytest.raises(TypeError, match="'topk'"):
            make()
    assert len(optimizer.param_groups) == 1
    with pytest.raises(TypeError, match=r"a parameter group of DeMo has no 'topk'; did you mean 'top_k'\?"):
        DeMo([{"params": [_weight()], "topk": 8}])
    with pytest.raises(TypeError, match="has no 'zzz'; known are lr, momentum_decay"):
        DeMo([{"params": [_weight()], "zzz": 8}])


@pytest.mark.parametrize("name", ["process_group", "route", "kernels", "fingerprint_every"])
def test_groups_refuse_arguments_that_hold_for_all(name: str) -> None:
    with pytest.raises(TypeError, match=f"has no '{name}', which holds for all: give it to DeMo"):
        DeMo([{"params": [_weight()], name: 1}])


BAD: list[tuple[str, Any, str]] = [
    ("lr", -0.1, r"-0\.1"),
    ("lr", float("nan"), "nan"),
    ("lr", "fast", "fast"),
    ("lr", torch.ones(2), "give a number"),
    ("momentum_decay", 1.0, r"1\.0"),
    ("alpha", 0.0, r"0\.0"),
    ("alpha", 1.1, r"1\.1"),
    ("weight_decay", -1.0, r"-1\.0"),
    ("top_k", 0, "0"),
    ("top_k", 2.5, r"2\.5"),
    ("top_k", True, "True"),
    ("top_k", 4097, "a 64 x 64 chunk has 4096 coefficients"),
    ("chunk", 5, "top_k is 32, but a 5 x 5 chunk has 25 coefficients"),
    ("chunk", 64.0, r"64\.0"),
    ("transform", "fft", "'dct', 'hadamard', 'random', 'identity'"),
    ("update", "adam", "'sgd', 'nesterov', 'signum'"),
    ("reduction", "sum", "'senders', 'mean'"),
    ("values", "float8", "'float32', 'bfloat16'"),
    ("gradient_scale", "v1", "'ema', 'lr'"),
    ("chunking", "exact", "'padded', 'divisor'"),
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


def test_process_group_of_another_type_is_refused() -> None:
    """At the first step at the latest, and not for a missing attribute deep inside."""
    for what in ("gloo", 2, object()):
        with pytest.raises((ValueError, TypeError), match="process_group"):
            _step_twice(DeMo(problems.parameters(problems.FEW), process_group=what))


def _step_twice(optimizer: DeMo) -> None:
    """The first attempt leaves nothing half done: the second fails in the same way."""
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
        {"momentum_decay": 0.0},
        {"alpha": 1.0},
        {"chunk": 1, "top_k": 1},
        {"top_k": 4096},
        {"chunk": 5000, "top_k": 3},
        {"lr": torch.tensor(0.1)},
        {"lr": 1},
    ):
        problems.train(DeMo(problems.parameters(problems.FEW), **settings), range(2))


def test_demo_refuses_an_empty_list() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        DeMo([])
