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


#: Keyword, value, and what the answer must say.
WRONG: list[tuple[str, Any, str]] = [
    ("betas", (0.9, 0.95), "momentum=... is the decay of its momentum; update=demopt.AdamW(beta2=...)"),
    ("beta", 0.9, "update=demopt.Nesterov(beta=...)"),
    ("beta1", 0.9, "update=demopt.Lion(beta1=...)"),
    ("beta2", 0.99, "update=demopt.AdamW(beta2=...)"),
    ("eps", 1e-8, "update=demopt.AdamW(eps=...)"),
    ("nesterov", True, "update=demopt.Nesterov(beta=...)"),
    ("dampening", 0.1, "gradient_scale"),
    ("fused", True, "leave fused out"),
    ("foreach", True, "leave foreach out"),
    ("capturable", True, "leave capturable out"),
    ("differentiable", True, "leave differentiable out"),
    ("amsgrad", True, "leave amsgrad out"),
    ("ns_steps", 5, "five"),
    ("topk", 1, "give top_k=..."),
    ("learning_rate", 0.1, "give lr=..."),
    ("compression_topk", 32, "give top_k=..."),
    ("compression_chunk", 64, "give chunk=..."),
    ("compression_decay", 0.999, "give momentum=...; demopt.V1"),
    ("momentun", 0.9, "did you mean 'momentum'?"),
    ("weight_decays", 0.1, "did you mean 'weight_decay'?"),
    ("zzz", None, "known are "),
]


@pytest.mark.parametrize(("name", "value", "says"), WRONG, ids=[name for name, _, _ in WRONG])
def test_unknown_arguments_are_told_what_to_give_instead(name: str, value: Any, says: str) -> None:
    optimizer = DeMo([_weight()])
    for where, make in (
        ("DeMo", lambda: DeMo([_weight()], **{name: value})),
        ("a parameter group of DeMo", lambda: DeMo([{"params": [_weight()], name: value}])),
        ("a parameter group of DeMo", lambda: optimizer.add_param_group({"params": [_weight()], name: value})),
    ):
        with pytest.raises(TypeError) as caught:
            make()
        assert str(caught.value).startswith(f"{where} has no {name}; ")
        assert says in str(caught.value)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["process_group", "route", "overlap", "delay", "fingerprint_every"])
def test_groups_do_not_take_what_holds_for_all(name: str) -> None:
    with pytest.raises(TypeError, match=f"has no {name}, which holds for all: give it to DeMo"):
        DeMo([{"params": [_weight()], name: 1}])


def test_an_option_misspelled_is_suggested() -> None:
    with pytest.raises(TypeError, match=r"DeMo has no proces_group; did you mean 'process_group'\?"):
        DeMo([_weight()], proces_group=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("off", [False, None])
@pytest.mark.parametrize("name", ["fused", "foreach", "capturable", "differentiable", "amsgrad"])
def test_switches_that_frameworks_pass_off_are_taken(name: str, off: bool | None) -> None:
    """They ask for nothing, and leave no trace in groups or checkpoints."""
    given: dict[str, Any] = {"params": [_weight()], name: off}
    optimizer = DeMo([given], **{name: off})
    optimizer.add_param_group({"params": [_weight()], name: off})
    assert not any(name in group for group in [*optimizer.param_groups, *optimizer.state_dict()["param_groups"]])
    assert name not in optimizer.defaults
    assert name in given


BAD: list[tuple[str, Any, str]] = [
    ("lr", -0.1, r"-0\.1"),
    ("lr", float("nan"), "nan"),
    ("lr", float("inf"), "inf"),
    ("lr", "fast", "fast"),
    ("lr", None, "None"),
    ("lr", torch.ones(2), "give a number"),
    ("momentum", 1.0, r"1\.0"),
    ("momentum", -0.1, r"-0\.1"),
    ("alpha", 0.0, r"0\.0"),
    ("alpha", 1.1, r"1\.1"),
    ("weight_decay", -1.0, r"-1\.0"),
    ("top_k", 0, "0"),
    ("top_k", -3, "-3"),
    ("top_k", 2.5, r"2\.5"),
    ("top_k", True, "True"),
    ("top_k", 4097, "a 64 x 64 chunk has 4096 coefficients"),
    ("chunk", 5, "top_k is 32, but a 5 x 5 chunk has 25 coefficients"),
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
        {"top_k": 4096},
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
