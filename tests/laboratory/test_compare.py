"""`python -m laboratory.compare`: the tuning rule, the store, the figures, and the command from start to report."""

import math
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.testing

from laboratory.compare.__main__ import compare
from laboratory.compare.figures import collect
from laboratory.compare.run import Row, Run, Scale, Source
from laboratory.compare.store import append_row, read_rows
from laboratory.compare.studies import Entry, Study
from laboratory.compare.tuning import MOST_RATES, Plan, best_rate, missing, next_powers

ENTRY = Entry("one", "adamw", {}, lr=1e-3)
STUDY = Study("methods", "Which?", (ENTRY,))
TEXT = Path(sysconfig.get_path("stdlib"), "calendar.py")
TINY = Scale(steps=6, workers=2, batch=2, layers=1, width=32, sequence=16, warmup=2, eval_sequences=4)


def plan(**more: Any) -> Plan:
    return Plan(STUDY, Scale(), Source("text"), **{"seeds": (0, 1), **more})


def row(run: Run, loss: float | None) -> Row:
    point = {"step": run.scale.steps, "val_loss": loss, "sent_bytes": 10, "received_bytes": 20}
    counts = {"payload_bytes": 5, "sent_bytes": 10, "received_bytes": 20, "step_seconds": 0.1}
    return {"key": run.key, "name": run.entry.name, "command": "", "val_loss": loss, "curve": [point], **counts}


def carry_on(chosen: Plan, loss: Callable[[float], float | None]) -> tuple[dict[str, Row], list[Run]]:
    """All runs of a plan, whose losses are `loss(lr)`: rows, and runs in the order of their doing."""
    rows: dict[str, Row] = {}
    done: list[Run] = []
    while todo := missing(chosen, rows):
        done += todo
        rows |= {run.key: row(run, loss(run.lr)) for run in todo}
    return rows, done


# The tuning rule


def test_tuning_finds_the_best_rate_then_adds_seeds() -> None:
    rows, done = carry_on(plan(), lambda lr: abs(math.log(lr / 4e-3)))
    assert sorted({run.lr for run in done}) == [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]
    assert best_rate(plan(), ENTRY, rows) == 4e-3
    assert [(run.lr, run.seed) for run in done if run.seed == 1] == [(4e-3, 1)]
    assert len({run.key for run in done}) == len(done)
    (figures,) = collect(plan(), rows)
    assert (figures.lr, figures.payload_bytes) == (4e-3, 5 / 300)


def test_tuning_ends_where_larger_is_always_better() -> None:
    _, done = carry_on(plan(), lambda lr: -lr)
    assert max(run.lr for run in done) == 0.032


def test_tuning_tries_smaller_rates_where_all_diverge() -> None:
    rows, done = carry_on(plan(), lambda lr: None if lr > 3e-4 else lr)
    assert min(run.lr for run in done) < 3e-4
    assert (best_rate(plan(), ENTRY, rows) or 1.0) < 3e-4
    rows, _ = carry_on(plan(), lambda _: None)
    (figures,) = collect(plan(), rows)
    assert figures.mean == math.inf


def test_tuning_leaves_a_given_rate_alone() -> None:
    _, done = carry_on(plan(lr=0.5), lambda lr: lr)
    assert [(run.lr, run.seed) for run in done] == [(0.5, 0), (0.5, 1)]
    _, done = carry_on(plan(rates=1), lambda lr: lr)
    assert [(run.lr, run.seed) for run in done] == [(1e-3, 0), (1e-3, 1)]


@pytest.mark.parametrize("rates", range(1, MOST_RATES + 1))
def test_next_powers_start_around_the_default(rates: int) -> None:
    powers = next_powers({}, rates)
    assert len(powers) == rates
    assert abs(sum(powers)) <= rates / 2
    if rates == MOST_RATES:
        assert next_powers({power: 1.0 + power for power in powers}, rates) == []


def test_a_run_is_known_by_all_that_determines_it() -> None:
    one = Run("a", ENTRY, 1e-3, 0, Scale(), Source("t"))
    assert one.key == Run("b", Entry("another name", "adamw", {}, lr=5.0), 1e-3, 0, Scale(), Source("t", ("x",))).key
    others = [
        Run("a", ENTRY, 1e-3, 1, Scale(), Source("t")),
        Run("a", ENTRY, 2e-3, 0, Scale(), Source("t")),
        Run("a", ENTRY, 1e-3, 0, Scale(clip=0.5), Source("t")),
        Run("a", ENTRY, 1e-3, 0, Scale(), Source("u")),
        Run("a", Entry("one", "adamw", {"weight_decay": 0.0}, 1e-3), 1e-3, 0, Scale(), Source("t")),
        Run("a", Entry("one", "adamw", {}, 1e-3, workers=8), 1e-3, 0, Scale(), Source("t")),
    ]
    assert len({run.key for run in (one, *others)}) == 1 + len(others)


# Figures


def test_figures_are_means_and_spreads_over_seeds() -> None:
    chosen = plan(lr=1e-3)
    runs = missing(chosen, {})
    (figures,) = collect(chosen, {run.key: row(run, loss) for run, loss in zip(runs, (1.0, 2.0), strict=True)})
    assert (figures.mean, round(figures.spread, 3)) == (1.5, 0.707)
    assert figures.seconds_on_link == pytest.approx(0.1 + 8 * 20 / 300 / 1e8)
    assert collect(chosen, {runs[0].key: row(runs[0], 1.0)}) == []  # one seed is missing


def test_bytes_of_a_diverged_seed_count_per_step_too() -> None:
    chosen = plan(lr=1e-3)
    whole, short = (row(run, loss) for run, loss in zip(missing(chosen, {}), (2.0, None), strict=True))
    short["curve"][-1]["step"], short["sent_bytes"] = 30, whole["sent_bytes"] / 10
    (figures,) = collect(chosen, {each["key"]: each for each in (whole, short)})
    assert figures.sent_bytes == pytest.approx(whole["sent_bytes"] / 300)
    assert (figures.mean, math.isnan(figures.spread)) == (math.inf, True)


# The store


def test_the_store_skips_lines_that_are_no_runs(tmp_path: Path) -> None:
    file, whole = tmp_path / "runs.jsonl", row(plan().run(ENTRY, 1e-3, 0), 1.0)
    file.write_text('7\n{"key": "a"}\n{"key"')  # the last line is torn
    append_row(file, whole)
    for damage in ({"curve": []}, {"val_loss": "x"}, {"sent_bytes": True}, {"key": 3}, {"step_seconds": None}):
        append_row(file, {**whole, "key": "b", **damage})
    assert read_rows(file) == {whole["key"]: whole}


# The command


def run_command(*words: str) -> typer.testing.Result:
    app = typer.Typer()
    app.command()(compare)
    threads = torch.get_num_threads()
    result = typer.testing.CliRunner().invoke(app, [*words, "--data", str(TEXT)])
    torch.set_num_threads(threads)
    return result


STUDY_WORDS = ["--study", "reduction", "--seeds", "0,1", "--rates", "1", *TINY.flags()]


def test_the_command_leaves_runs_table_and_picture_and_goes_on(tmp_path: Path) -> None:
    assert run_command(*STUDY_WORDS, "--out", str(tmp_path)).exit_code == 0
    rows = read_rows(tmp_path / "runs.jsonl")
    assert sorted((each["name"], each["seed"]) for each in rows.values()) == [
        (name, seed) for name in ("reduction mean", "reduction senders") for seed in (0, 1)
    ]
    for each in rows.values():
        assert [point["step"] for point in each["curve"]] == list(range(TINY.steps + 1))
        assert each["curve"][-1]["sent_bytes"] == each["sent_bytes"] > 0
        assert str(TEXT.parent) not in str(each)  # folders are private
    table = (tmp_path / "reduction.md").read_text()
    assert "| reduction senders | " in table
    assert (tmp_path / "reduction.png").stat().st_size > 1000
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    (tmp_path / "runs.jsonl").write_text("\n".join([*lines[:-1], lines[-1][:50]]))
    assert run_command(*STUDY_WORDS, "--out", str(tmp_path)).exit_code == 0
    again = read_rows(tmp_path / "runs.jsonl")
    assert {key: each["curve"] for key, each in again.items()} == {key: each["curve"] for key, each in rows.items()}
    assert (tmp_path / "runs.jsonl").read_text().splitlines()[: len(lines) - 1] == lines[:-1]


@pytest.mark.nightly
def test_two_jobs_find_the_same(tmp_path: Path) -> None:
    for jobs in ("1", "2"):
        assert run_command(*STUDY_WORDS, "--jobs", jobs, "--out", str(tmp_path / jobs)).exit_code == 0
    one, two = (read_rows(tmp_path / jobs / "runs.jsonl") for jobs in ("1", "2"))
    assert {key: each["curve"] for key, each in one.items()} == {key: each["curve"] for key, each in two.items()}


def test_a_diverged_run_ends_early_and_is_named(tmp_path: Path) -> None:
    words = ["--only", "sgd", "--seeds", "0", "--lr", "1e30", *TINY.flags(), "--out", str(tmp_path)]
    assert run_command(*words).exit_code == 0
    (only,) = read_rows(tmp_path / "runs.jsonl").values()
    assert only["val_loss"] is None
    assert "| sgd | diverged |" in (tmp_path / "methods.md").read_text()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--study", "moons"], "--study is 'moons'"),
        (["--only", "adam"], "--only is 'adam'"),
        (["--seeds", "0,x"], "--seeds is '0,x'"),
        (["--steps", "0"], "--steps is 0"),
        (["--width", "100"], "--width is 100"),
        (["--rates", "12"], "--rates is 12"),
        (["--lr", "nan"], "--lr is nan"),
        (["--data", "no/such/file"], "no/such/file"),
    ],
)
def test_mistakes_are_named(flags: list[str], named: str) -> None:
    result = run_command(*flags)
    assert result.exit_code == 2
    assert named in result.output
