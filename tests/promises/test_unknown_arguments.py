"""Unknown arguments and impossible values are refused by name; a mistyped name is answered with the one meant."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import demopt
import problems
from demopt import DeMo, LocalDeMo
from demopt.exchange import SingleRank


def _demo(**settings: Any) -> DeMo:
    return DeMo([Parameter(torch.zeros(4, 4))], **settings)


def _group(**settings: Any) -> DeMo:
    return DeMo([{"params": [Parameter(torch.zeros(4, 4))], **settings}])


def _added(**settings: Any) -> None:
    optimizer = _demo()
    try:
        optimizer.add_param_group({"params": [Parameter(torch.zeros(4, 4))], **settings})
    except Exception:
        assert len(optimizer.param_groups) == 1
        raise


def _local(**settings: Any) -> LocalDeMo:
    return LocalDeMo(torch.optim.SGD([Parameter(torch.zeros(4, 4))], lr=0.1), **settings)


@pytest.mark.parametrize("make", [_demo, _group, _added, _local])
def test_unknown_arguments_are_refused_by_name(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="'topk'"):
        make(topk=8)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: DeMo([], chunks=32), "did you mean 'chunk'"),
        (lambda: DeMo([], route="owner"), "DeMo has no argument 'route'; it always has gather"),
        (lambda: LocalDeMo(None, alpha=0.2), "LocalDeMo has no argument 'alpha'; all that was sent"),  # type: ignore[arg-type]
        (lambda: DeMo([], topk=8), "did you mean 'top_k'"),
        (lambda: DeMo([], codec="sign"), "codec is 'sign'; give a demopt.Codec"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_moved_are_told_where_they_went(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        call()


def test_settings_of_the_codec_may_be_given_by_their_own_names() -> None:
    with_names, with_codec = (
        DeMo([Parameter(torch.zeros(4, 4))], process_group=SingleRank(), **given)
        for given in ({"chunk": 32, "values": "2-bit"}, {"codec": demopt.Codec(chunk=32, values="2-bit")})
    )
    settings = [{k: v for k, v in each.param_groups[0].items() if k != "params"} for each in (with_names, with_codec)]
    assert settings[0] == settings[1]
    assert settings[0]["chunk"] == 32


def test_group_has_a_codec_of_its_own() -> None:
    codec = demopt.Codec(chunk=2, values="2-bit")
    optimizer = _group(codec=codec, top_k=3)
    first = optimizer.param_groups[0]
    assert (first["chunk"], first["values"], first["top_k"], first["transform"]) == (2, "2-bit", 3, "dct")
    assert "codec" not in first
    with pytest.raises(TypeError, match="codec"):
        _added(codec="sign")


def test_unknown_argument_of_a_group_is_told_from_those_that_hold_for_all() -> None:
    says = {"topk": r"; did you mean 'top_k'\?", "zzz": "; known are lr, momentum_decay"}
    for_all = ("process_group", "kernels", "fingerprint_every")
    says |= dict.fromkeys(for_all, ", which holds for all: give it to DeMo")
    for name, said in says.items():
        with pytest.raises(TypeError, match=f"a parameter group of DeMo has no '{name}'{said}"):
            _group(**{name: 1})


BAD: list[tuple[str, Any, str]] = [
    ("lr", -0.1, r"-0\.1"),
    ("lr", float("nan"), "nan"),
    ("lr", torch.ones(2), "give a number"),
    ("momentum_decay", 1.0, r"1\.0"),
    ("alpha", 0.0, r"0\.0"),
    ("weight_decay", -1.0, r"-1\.0"),
    ("top_k", 0, "0"),
    ("top_k", True, "True"),
    ("top_k", 4097, "a 64 x 64 chunk has 4096 coefficients"),
    ("chunk", 5, "top_k is 32, but a 5 x 5 chunk has 25 coefficients"),
    ("chunk", 64.0, r"64\.0"),
    ("transform", "hadamard", "'dct', 'identity'"),
    ("update", "adam", "'sgd', 'nesterov', 'signum'"),
    ("reduction", "sum", "'senders', 'mean'"),
    ("values", "float8", "'float64', 'float32', '2-bit', 'sign'"),
    ("gradient_scale", "sum", "'ema', 'lr'$"),
    ("chunking", "exact", "'padded', 'divisor'"),
    ("maximize", "yes", "yes"),
]


@pytest.mark.parametrize(("name", "value", "says"), BAD, ids=[f"{name}={value}" for name, value, _ in BAD])
def test_demo_refuses_impossible_values_by_name(name: str, value: Any, says: str) -> None:
    for make in (_demo, _group, _added):
        with pytest.raises((ValueError, TypeError), match=name) as caught:
            make(**{name: value})
        assert caught.match(says)


@pytest.mark.parametrize("what", ["gloo", 2, []], ids=str)
def test_process_group_of_another_type_is_refused(what: Any) -> None:
    """Not for a missing attribute deep inside."""
    with pytest.raises((ValueError, TypeError), match="process_group"):
        problems.demo(what)


@pytest.mark.parametrize(
    "settings",
    [
        *({"lr": 0.0}, {"lr": 1}, {"lr": torch.tensor(0.1)}, {"momentum_decay": 0.0}, {"alpha": 1.0}),
        *({"chunk": 1, "top_k": 1}, {"top_k": 4096}, {"chunk": 5000, "top_k": 3}, demopt.V1, demopt.V2),
    ],
    ids=str,
)
def test_demo_accepts_presets_and_extreme_settings(settings: dict[str, Any]) -> None:
    problems.train(DeMo(problems.parameters(problems.FEW), **settings), range(2))


@pytest.mark.parametrize(
    ("make", "name", "value", "meant"),
    [
        (_demo, "reduction", "sender", "senders"),
        (_local, "values", "2bit", "2-bit"),
        (_local, "route", "Gathr", "gather"),
        (_local, "kernels", "trch", "torch"),
        (_demo, "update", "Lyon(beta1=0.9)", "lion"),
    ],
)
def test_values_of_settings_are_suggested(make: Callable[..., Any], name: str, value: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*; choose one of .*; did you mean '{meant}'\\?$"):
        make(**{name: value})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("trian", "id you mean 'train'?"),
        ("train --stpes 3", "--steps"),  # in words that differ from one version of typer to another
        ("train --values 2bit", "did you mean '2-bit'?"),
        ("train --config settings.json", "did you mean 'sync_every'?"),
        ("train --tracker wanbd", "did you mean 'wandb'?"),
        ("plan --preset smal", "did you mean 'small'?"),
    ],
)
def test_the_command_line_suggests(
    monkeypatch: pytest.MonkeyPatch, command: Callable[..., str], tmp_path: Path, words: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("settings.json").write_text('{"sync-every": 3}')
    assert told in command(*words.split(), code=2)
