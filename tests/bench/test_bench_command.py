"""`demopt bench` as a command, with real processes: what it writes, and a line for every mistake."""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import forked
from demopt import cli
from demopt.bench import against
from demopt.train.config import InputError

OTHER = '''
import os
import torch
import torch.distributed as dist

class Other(torch.optim.SGD):
    """One that talks to other ranks, and so needs a process group even where it is alone."""
    def __init__(self, params, lr, fail=False):
        super().__init__(params, lr=lr)
        self.fail = fail
    def step(self, closure=None):
        if self.fail and dist.get_rank() == 1:
            raise RuntimeError("the other one is broken")
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.grad)
        super().step(closure)

class NoOptimizer:
    pass
'''
SHAPES = '[[96, 64], {"name": "bias", "shape": [50]}]'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bench")
    (made / "other.py").write_text(OTHER)
    (made / "shapes.json").write_text(SHAPES)
    return made


def run(folder: Path, *flags: object, code: int = 0) -> str:
    """What the command prints, on stderr where it fails. The workers are processes of their own."""
    told = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    with (
        contextlib.nullcontext() if code else forked.workers(),
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(told["stdout"]),
        contextlib.redirect_stderr(told["stderr"]),
    ):
        patch.chdir(folder)
        patch.setenv("COLUMNS", "80")
        patch.setattr(sys, "argv", ["demopt", "bench", *map(str, flags)])
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert end.value.code == code, told["stderr"].getvalue()
    return told["stderr" if code else "stdout"].getvalue()


@pytest.fixture(scope="module")
def quick(folder: Path) -> tuple[dict[str, Any], str]:
    """Both studies with two workers, and an optimizer from a file: the JSON and what was shown."""
    flags = ["--quick", "--workers", 2, "--rounds", 2, "--shapes", folder / "shapes.json"]
    flags += ["--demo", "values=sign", "--demo", "values=float32,top_k=8", "--bandwidth", "100Mbit"]
    shown = run(folder, *flags, "--against", folder / "other.py:Other", "--out", "results/bench.json")
    return json.loads((folder / "results" / "bench.json").read_text()), shown


def test_bench_json_says_what_ran_on_what(quick: tuple[dict[str, Any], str], folder: Path) -> None:
    data, _ = quick
    assert data["command"].startswith("demopt bench --quick --workers 2 --rounds 2 --shapes shapes.json")
    assert str(folder) not in json.dumps(data)
    assert data["versions"]["torch"] == torch.__version__
    assert data["device"]["cores"] >= 1
    assert data["device"]["cpu"]
    assert data["date"].endswith("+00:00")
    assert data["model"] == {"name": "shapes.json", "parameters": 96 * 64 + 50, "tensors": 2}


def test_bench_json_has_every_figure_of_a_step(quick: tuple[dict[str, Any], str]) -> None:
    (run,) = quick[0]["runs"]
    rows = {row["name"]: row for row in run["step"]["methods"]}
    demo, fused, other = rows["DeMo values=sign"], rows["AdamW fused"], rows["other.py:Other"]
    assert list(rows)[1] == "DeMo values=float32,top_k=8"
    for row in rows.values():
        assert len(row["seconds"]) == 2
        assert row["min"] <= row["median"] <= row["max"]
        assert set(row["ratios"]) == {"AdamW fused", "other.py:Other"}
        assert row["floor_seconds"] > 0
    assert {name: len(times) for name, times in demo["stages"].items()} == {"extract": 2, "exchange": 2, "apply": 2}
    assert (demo["collectives"], fused["collectives"], other["collectives"]) == (1, 0, 2)
    assert demo["received_bytes"] == demo["payload_bytes"]
    a_round, none, muon = rows["LocalDeMo, round"], rows["LocalDeMo, none"], rows["Muon"]
    assert a_round["stages"].keys() == demo["stages"].keys()
    assert (a_round["collectives"], none["collectives"], muon["collectives"]) == (1, 0, 0)
    assert a_round["received_bytes"] == a_round["payload_bytes"] > none["payload_bytes"] == 0
    assert none["stages"] == muon["stages"] == {}
    assert demo["network_floor_seconds"] == pytest.approx(8 * demo["received_bytes"] / 1e8)
    assert other["received_bytes"] == 4 * (96 * 64 + 50)
    assert fused["extra_memory_percent"] == pytest.approx(100, abs=1)  # two moments, of which one counts
    assert demo["extra_memory_bytes"] > 0
    assert other["extra_memory_percent"] == pytest.approx(-100, abs=1)  # no momentum at all


def test_bench_json_has_every_figure_of_training(quick: tuple[dict[str, Any], str]) -> None:
    (run,) = quick[0]["runs"]
    measured = run["train"]
    rows = {row["name"]: row for row in measured["methods"]}
    assert {"DeMo values=sign", "AdamW-DDP", "PowerSGD-DDP", "other.py:Other"} <= set(rows)
    for row in rows.values():
        assert len(row["seconds"]) == 2
        assert row["tokens_per_second"] == pytest.approx(measured["tokens_per_step"] / row["median"])
        assert row["ratios"]["AdamW-DDP"] > 0
    dense = 4 * measured["parameters"]
    assert rows["AdamW-DDP"]["received_bytes"] == dense  # 2 (W - 1) / W of it
    assert rows["DeMo values=sign"]["received_bytes"] < rows["PowerSGD-DDP"]["received_bytes"] < dense / 10
    assert rows["PowerSGD-DDP"]["collectives"] == rows["AdamW-DDP"]["collectives"] + 2


def test_bench_tables_name_the_run_and_fit_80_columns(quick: tuple[dict[str, Any], str]) -> None:
    shown = quick[1]
    assert max(map(len, shown.splitlines())) <= 80
    assert "step, shapes.json, 6,194 parameters, 2 workers x " in shown
    assert "train, tiny, " in shown
    assert "…" not in shown
    assert shown.rstrip().endswith("Every sample is in results/bench.json")


def test_bench_with_one_worker_runs_demo_without_group(folder: Path) -> None:
    flags = ["--shapes", "shapes.json", "--rounds", 1, "--no-foreach", "--against", "other.py:Other"]
    shown = run(folder, *flags)
    (path,) = (folder / "runs" / "bench").glob("*.json")
    assert f"Every sample is in runs/bench/{path.name}" in shown
    (found,) = json.loads(path.read_text())["runs"]
    rows = {row["name"]: row for row in found["step"]["methods"]}
    assert set(rows) == {
        "DeMo values=sign",
        "LocalDeMo, round",
        "LocalDeMo, none",
        "Muon",
        "AdamW fused",
        "other.py:Other",
    }
    assert rows["DeMo values=sign"]["collectives"] == 0
    assert rows["DeMo values=sign"]["payload_bytes"] > 64
    assert rows["other.py:Other"]["collectives"] == 2
    assert rows["other.py:Other"]["received_bytes"] == 0


def test_bench_trains_a_model_with_muon(folder: Path) -> None:
    flags = ["--study", "train", "--demo", "update=muon", "--preset", "tiny", "--data", __file__, "--rounds", 1]
    run(folder, *flags, "--out", "muon.json")
    (found,) = json.loads((folder / "muon.json").read_text())["runs"]
    assert found["train"]["methods"][0]["name"] == "DeMo update=muon"


def test_bench_names_the_rank_that_failed(folder: Path) -> None:
    flags = ["--shapes", "shapes.json", "--workers", 2, "--against", "other.py:Other", "--against-args", "fail=true"]
    told = run(folder, *flags, "--out", "failed.json", code=1)
    assert "demopt: rank 1 failed; nothing was written" in told
    assert "RuntimeError: the other one is broken" in told
    assert not (folder / "failed.json").exists()


def test_bench_constructor_error_prints_one_line(folder: Path) -> None:
    flags = ["--shapes", "shapes.json", "--against", "other.py:Other", "--against-args", "depth=3"]
    told = run(folder, *flags, code=2).splitlines()
    assert told[-1].startswith("demopt: --against other.py:Other: TypeError: ")
    assert "depth" in told[-1]
    assert len(told) == 2  # the first says that it measures


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("other.py:NoOptimizer", "other.py has no torch optimizer NoOptimizer"),
        ("other.py:Missing", "other.py has no torch optimizer Missing"),
        ("broken.py:Other", "broken.py:Other: ZeroDivisionError: division by zero"),
        ("shapes.json:Other", "shapes.json is no Python file"),
        ("none.py:Other", "there is no file"),
        ("other.py", "wanted FILE:CLASS"),
    ],
)
def test_against_load_refuses_unusable_classes(folder: Path, name: str, told: str) -> None:
    (folder / "broken.py").write_text("1 / 0")
    with pytest.raises(InputError, match=told):
        against.load(str(folder / name))


def test_against_make_builds_a_class_from_a_file(folder: Path) -> None:
    parameter = Parameter(torch.zeros(2))
    made = against.make(f"{folder}/other.py:Other", [parameter], 0.5, {"fail": True})
    assert made.param_groups[0]["lr"] == 0.5
    assert made.fail  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--study", "all"], "--study is 'all', wanted one of step, train"),
        (["--shapes", "large"], "--shapes is 'large', wanted one of gpt2"),
        (["--shapes", "bad.json"], "--shapes bad.json: entry 2: [3, -1] is no shape"),
        (["--demo", "values"], "--demo is 'values', wanted NAME=VALUE"),
        (["--demo", "values=morse"], "--demo values=morse: values is 'morse'"),
        (["--demo", "topk=3"], "topk"),
        (["--demo", "update=muon"], "use --study train"),
        (["--local", "topk=8"], "--local topk=8: LocalDeMo has no topk; give top_k=..."),
        (["--local", "sync_every=8"], "--local sync_every=8: "),
        (["--local", "top_k=8", "--no-muon"], "--local is for LocalDeMo"),
        (["--demo", "", "--demo", ""], "--demo: the same value is given twice"),
        (["--against", "none.py:Other"], "there is no file none.py"),
        (["--against-args", "a=1"], "give --against FILE:CLASS too"),
        (["--workers", "0"], "--workers is 0, wanted 1 to 64"),
        (["--rounds", "0"], "--rounds is 0, wanted at least 1"),
        (["--bandwidth", "fast"], "--bandwidth is 'fast', wanted bits a second"),
        (["--device", "tpu"], "--device is 'tpu', wanted one of auto, cpu, cuda"),
        (["--timeout", "nan"], "--timeout is nan, wanted at least 1 second"),
        (["--study", "train", "--preset", "huge"], "--preset is 'huge', wanted one of tiny"),
        (["--shapes", "immense.json"], "GB are free; give fewer --workers"),
        (["--out", "."], "--out . is a folder"),
    ],
)
def test_bench_mistakes_print_one_line(folder: Path, flags: list[str], told: str) -> None:
    (folder / "bad.json").write_text("[[2], [3, -1]]")
    (folder / "immense.json").write_text("[[1000000000, 1000]]")
    line = run(folder, *flags, code=2)
    assert line.startswith("demopt: ")
    assert line.count("\n") == 1
    assert told in line
