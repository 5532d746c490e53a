"""`make gpu`: without a GPU it says so; its parts run on a CPU, small. `python -m laboratory.bench` likewise."""

import json
import subprocess
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

from laboratory import bench, gpu

APP = typer.Typer()
APP.command()(gpu.main)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path):
    done = CliRunner().invoke(APP, ["--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "no GPU is here" in done.output
    assert not list(tmp_path.iterdir())


def test_all_parts_run_and_are_written(tmp_path):
    done = CliRunner().invoke(APP, ["--device", "cpu", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert len(done.output.splitlines()) == 5
    told = json.loads((tmp_path / "gpu-cpu.json").read_text())
    assert set(gpu.PARTS) <= set(told)
    assert "DeMo, bfloat16" in told["bits"]["equal"]
    assert len(told["300M"]["seconds"]) == 10
    assert told["bench"]["124M"]["milliseconds"].keys() == told["bench"]["1B"]["milliseconds"].keys()


@pytest.mark.nightly
def test_bench_measures_every_method_with_one_process_and_with_two(tmp_path):
    (tmp_path / "shapes.json").write_text("[[64, 64], [256, 8], [64]]")
    words = ["--shapes", str(tmp_path / "shapes.json"), "--rounds", "2", "--warmup", "0"]
    command = [sys.executable, "-m", "laboratory.bench", *words, "--out", str(tmp_path / "out.json")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    assert "Warning" not in done.stderr
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["parameters"] == 64 * 64 + 256 * 8 + 64
    assert [run["workers"] for run in told["runs"]] == [1, 2]
    for run in told["runs"]:
        rows = {row["name"]: row for row in run["methods"]}
        assert list(rows) == list(bench.METHODS)
        assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows.values())
        assert rows[bench.BASE]["ratio"] == 1.0
        assert rows["LocalDeMo, no round"]["payload_bytes"] == 0 < rows["LocalDeMo, round"]["payload_bytes"]
        assert rows["DeMo"]["sent_bytes"] == (run["workers"] - 1) * rows["DeMo"]["payload_bytes"]
        moments = 2 * 4 * told["parameters"]
        assert moments <= rows[bench.BASE]["held_bytes"] <= 1.2 * moments + 1000
        assert len(rows["DeMo"]["stages"]) == 2
