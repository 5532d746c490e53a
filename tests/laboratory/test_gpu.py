"""`make gpu`: without a GPU it says so; its parts run on a CPU, small."""

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from laboratory import gpu

APP = typer.Typer()
APP.command()(gpu.main)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path: Path) -> None:
    done = CliRunner().invoke(APP, ["--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "no GPU is here" in done.output
    assert not list(tmp_path.iterdir())


def test_all_parts_run_and_are_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(APP, ["--device", "cpu", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert len(done.output.splitlines()) == 5
    told = json.loads((tmp_path / "gpu-cpu.json").read_text())
    assert set(gpu.PARTS) <= set(told)
    assert "DeMo, bfloat16" in told["bits"]["equal"]
    assert len(told["300M"]["seconds"]) == 10
    assert told["bench"]["124M"]["milliseconds"].keys() == told["bench"]["1B"]["milliseconds"].keys()


def test_a_size_that_does_not_fit_is_skipped_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "free_bytes", lambda _: 10**6)
    found = gpu.steps(torch.device("cpu"), quick=True)
    assert "GB are free" in found["1B"]["skipped"]
    assert "skipped" in gpu.PARTS["bench"][1](found)
