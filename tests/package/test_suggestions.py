"""A mistyped name is answered with the one that was meant, wherever a name of a list is wanted."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import demopt
from demopt import cli

WEIGHT = Parameter(torch.zeros(4, 4))


def _demo(**settings: Any) -> demopt.DeMo:
    return demopt.DeMo([WEIGHT], **settings)


def _local(**settings: Any) -> demopt.LocalDeMo:
    return demopt.LocalDeMo(torch.optim.SGD([WEIGHT], lr=0.1), **settings)


@pytest.mark.parametrize("make", [_demo, _local])
@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("transform", "dtc", "dct"),
        ("reduction", "sender", "senders"),
        ("values", "2bit", "2-bit"),
        ("route", "Gathr", "gather"),
        ("kernels", "trch", "torch"),
    ],
)
def test_values_of_settings_are_suggested(make: Callable[..., Any], name: str, value: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is '{value}'; choose one of .*; did you mean '{meant}'\\?$"):
        make(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [("gradient_scale", "emma", "ema"), ("chunking", "padding", "padded"), ("update", "Lyon(beta1=0.9)", "lion")],
)
def test_values_of_settings_of_demo_are_suggested(name: str, value: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{meant}'\\?$"):
        _demo(**{name: value})


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("trian", "train"),
        ("train --stpes 3", "--steps"),
        ("train --preset smal", "small"),
        ("train --optimizer moun", "muon"),
        ("train --device gpu-cuda", "cuda"),
        ("train --values int-8", "int8"),
        ("train --config settings.json", "sync_every"),
        ("train --tracker wanbd", "wandb"),
        ("plan --preset smal", "small"),
        ("doctor --preset smal", "small"),
    ],
)
def test_the_command_line_suggests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, meant: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("settings.json").write_text('{"sync-every": 3}')
    monkeypatch.setattr(sys, "argv", ["demopt", *words.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    told = capsys.readouterr().err
    assert (end.value.code, told.count("\n")) == (2, 1), told
    assert f"id you mean '{meant}'?" in told
