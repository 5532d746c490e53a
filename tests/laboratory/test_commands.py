"""The laboratory's commands: compare, from the tuning rule to the report; gpu, here without a GPU; bench."""

import itertools
import json
import math
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
import typer.testing
from typer.testing import CliRunner

from laboratory import bench, gpu
from laboratory.compare.__main__ import compare
from laboratory.compare.figures import collect
from laboratory.compare.jobs import read_text
from laboratory.compare.run import Run, Scale, Source, carry_out
from laboratory.compare.store import read_rows
from laboratory.compare.studies import Entry, Study
from laboratory.compare.tuning import Plan, best_rate, missing
from laboratory.simulation.experiment import Experiment

ENTRY = Entry("one", "adamw", {}, lr=1e-3)
STUDY = Study("methods", "Which?", (ENTRY,))
SOURCE = Source("text")
TEXT = Path(sysconfig.get_path("stdlib"), "calendar.py")
TINY = Scale(steps=6, workers=2, batch=2, layers=1, width=32, sequence=16, warmup=2, eval_sequences=4)


def plan(**more):
    return Plan(STUDY, Scale(), SOURCE, **{"seeds": (0, 1), **more})


def row(run, loss):
    point = {"step": run.scale.steps, "val_loss": loss, "sent_bytes": 10, "received_bytes": 20}
    counts = {"payload_bytes": 5, "sent_bytes": 10, "received_bytes": 20}
    return {"key": run.key, "name": run.entry.name, "command": "", "val_loss": loss, "curve": [point], **counts}


def carry_on(chosen, loss):
    """All runs of a plan, with losses `loss(lr)`: the rows, and the runs in the order in which they were done."""
    rows, done = {}, []
    while todo := missing(chosen, rows):
        done += todo
        rows |= {run.key: row(run, loss(run.lr)) for run in todo}
    return rows, done


def test_tuning_finds_the_best_rate_then_adds_seeds():
    rows, done = carry_on(plan(), lambda lr: abs(math.log(lr / 4e-3)))
    assert sorted({run.lr for run in done}) == [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]
    assert best_rate(plan(), ENTRY, rows) == 4e-3
    assert [(run.lr, run.seed) for run in done if run.seed == 1] == [(4e-3, 1)]
    assert len({run.key for run in done}) == len(done)


@pytest.mark.parametrize(("more", "lr"), [({"lr": 0.5}, 0.5), ({"rates": 1}, 1e-3)])
def test_tuning_leaves_a_given_rate_alone(more, lr):
    _, done = carry_on(plan(**more), lambda lr: lr)
    assert [(run.lr, run.seed) for run in done] == [(lr, 0), (lr, 1)]


def test_a_run_is_known_by_all_that_determines_it():
    facts = {"study": "a", "entry": ENTRY, "lr": 1e-3, "seed": 0, "scale": Scale(), "source": SOURCE}
    same = {"study": "b", "entry": replace(ENTRY, name="another", lr=5.0), "source": replace(SOURCE, paths=("x",))}
    assert Run(**facts).key == Run(**{**facts, **same}).key
    others = [
        {"seed": 1}, {"lr": 2e-3}, {"scale": Scale(clip=0.5)}, {"source": Source("u")},
        {"entry": replace(ENTRY, settings={"weight_decay": 0.0})}, {"scale": Scale(workers=8)},
    ]  # fmt: skip
    assert len({Run(**{**facts, **other}).key for other in ({}, *others)}) == 1 + len(others)


@pytest.mark.parametrize("diverged", [False, True])
def test_figures_are_means_and_spreads_over_seeds_and_bytes_per_step(diverged):
    chosen = plan(lr=1e-3)
    runs = missing(chosen, {})
    rows = {run.key: row(run, loss) for run, loss in zip(runs, (1.0, None if diverged else 2.0), strict=True)}
    if diverged:  # after a tenth of the steps
        short = rows[runs[1].key]
        short["curve"][-1]["step"], short["payload_bytes"] = 30, 0.5
    (figures,) = collect(chosen, rows)
    assert figures.payload_bytes == pytest.approx(5 / 300)
    assert figures.mean == (math.inf if diverged else 1.5)
    assert math.isnan(figures.spread) if diverged else round(figures.spread, 3) == 0.707
    assert collect(chosen, {runs[0].key: row(runs[0], 1.0)}) == []  # one seed is missing


def run_command(*words):
    app = typer.Typer()
    app.command()(compare)
    threads = torch.get_num_threads()
    result = typer.testing.CliRunner().invoke(app, [*words, "--data", str(TEXT)])
    torch.set_num_threads(threads)
    return result


STUDY_WORDS = ["--study", "race", "--seeds", "0,1", "--rates", "1", *TINY.flags()]
STUDY_WORDS += ["--only", "AdamW-DDP", "--only", "DeMo"]


def test_the_command_leaves_runs_and_table_and_goes_on(tmp_path):
    assert run_command(*STUDY_WORDS, "--out", str(tmp_path)).exit_code == 0
    rows = read_rows(tmp_path / "runs.jsonl")
    runs = itertools.product(("AdamW-DDP", "DeMo"), (0, 1))
    assert sorted((each["name"], each["seed"]) for each in rows.values()) == [*runs]
    for each in rows.values():
        assert [point["step"] for point in each["curve"]] == list(range(TINY.steps + 1))
        assert each["curve"][-1]["sent_bytes"] == each["sent_bytes"] > 0
        assert str(TEXT.parent) not in str(each)  # folders are private
    assert "| DeMo | " in (tmp_path / "race.md").read_text()
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    (tmp_path / "runs.jsonl").write_text("\n".join([*lines[:-1], lines[-1][:50]]))
    assert run_command(*STUDY_WORDS, "--out", str(tmp_path)).exit_code == 0
    again = read_rows(tmp_path / "runs.jsonl")
    assert {key: each["curve"] for key, each in again.items()} == {key: each["curve"] for key, each in rows.items()}
    assert (tmp_path / "runs.jsonl").read_text().splitlines()[: len(lines) - 1] == lines[:-1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("muon", {"momentum": 0.9}),
        ("local", {"sync_every": 2, "momentum": 0.9, "route": "owner", "outer_momentum": 0.5}),
        ("local", {"sync_every": 3, "inner": "adamw", "route": "gather"}),
    ],
)
def test_an_interrupted_run_goes_on_to_the_same_record(method, settings, tmp_path, monkeypatch):
    scale = replace(TINY, steps=20)
    corpus = read_text((str(TEXT),), scale)
    run = Run("methods", Entry("one", method, settings, 1e-2), 1e-2, 0, scale, Source(corpus.fingerprint))
    whole = carry_out(run, corpus, torch.device("cpu"))
    steps, original = [], Experiment.step

    def step(self, number):
        steps.append(number)
        if steps.count(13) == 1 and number == 13:
            raise KeyboardInterrupt
        return original(self, number)

    monkeypatch.setattr(Experiment, "step", step)
    with pytest.raises(KeyboardInterrupt):
        carry_out(run, corpus, torch.device("cpu"), tmp_path)
    assert carry_out(run, corpus, torch.device("cpu"), tmp_path) | {"seconds": 0} == whole | {"seconds": 0}
    assert steps == [*range(1, 14), *range(13, 21)]
    assert not list(tmp_path.iterdir())


def test_a_diverged_run_ends_early_and_is_named(tmp_path):
    words = ["--only", "muon", "--seeds", "0", "--lr", "1e30", *TINY.flags()]
    assert run_command(*words, "--out", str(tmp_path)).exit_code == 0
    (only,) = read_rows(tmp_path / "runs.jsonl").values()
    assert only["val_loss"] is None
    assert "| muon | diverged |" in (tmp_path / "one-bit.md").read_text()


@pytest.mark.parametrize(("flag", "value"), [("--study", "x"), ("--only", "adam"), ("--width", "100"), ("--lr", "nan")])
def test_mistakes_are_named(flag, value):
    assert f"{flag} is " in run_command(flag, value).output


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
