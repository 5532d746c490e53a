"""Which runs are missing, from those that are there."""

import math

import pytest

from demopt.compare.results import collect
from demopt.compare.run import Run, Source
from demopt.compare.scale import Scale
from demopt.compare.studies import Entry, Study
from demopt.compare.sweep import MOST_RATES, Plan, best_rate, missing, next_powers

ENTRY = Entry("one", "adamw", {}, lr=1e-3)
STUDY = Study("methods", "Which?", (ENTRY,))


def plan(**more):
    return Plan(STUDY, Scale(), Source("text"), **{"seeds": (0, 1), **more})


def row(run, loss):
    point = {"step": run.scale.steps, "val_loss": loss, "sent_bytes": 10, "received_bytes": 20}
    counts = {"payload_bytes": 5, "sent_bytes": 10, "received_bytes": 20, "step_seconds": 0.1}
    return {"key": run.key, "name": run.entry.name, "val_loss": loss, "curve": [point], **counts}


def carry_on(chosen, loss):
    """All runs of an entry, whose losses are what `loss(lr)` says: rows, and runs in the order of their doing."""
    rows, done = {}, []
    while todo := missing(chosen, ENTRY, rows):
        done += todo
        rows |= {run.key: row(run, loss(run.lr)) for run in todo}
    return rows, done


def test_collect_averages_bytes_over_diverged_seeds():
    chosen = plan(lr=1e-3)
    whole, short = (row(chosen.run(ENTRY, 1e-3, seed), 2.0) for seed in (0, 1))
    short["curve"][-1]["step"], short["sent_bytes"] = whole["curve"][-1]["step"] // 10, whole["sent_bytes"] / 10
    (result,) = collect(chosen, {each["key"]: each for each in (whole, short)})
    assert result.sent_bytes == pytest.approx(whole["sent_bytes"] / chosen.scale.steps)


def test_next_powers_stops_at_most_rates():
    assert len(next_powers({}, MOST_RATES)) == MOST_RATES
    assert next_powers({power: 1.0 + power for power in next_powers({}, MOST_RATES)}, MOST_RATES) == []


def test_tuning_finds_best_rate_then_adds_seeds():
    chosen = plan()
    rows, done = carry_on(chosen, lambda lr: abs(math.log(lr / 4e-3)))
    assert sorted({run.lr for run in done}) == [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]
    assert best_rate(chosen, ENTRY, rows) == 4e-3
    assert [(run.lr, run.seed) for run in done if run.seed == 1] == [(4e-3, 1)]
    assert len({run.key for run in done}) == len(done)
    (result,) = collect(chosen, rows)
    assert (result.lr, len(result.tried), result.payload_bytes) == (4e-3, 5, 5 / 300)


def test_tuning_ends_where_larger_is_always_better():
    _, done = carry_on(plan(), lambda lr: -lr)
    assert max(run.lr for run in done) == 0.032


def test_tuning_tries_smaller_rates_where_all_diverge():
    rows, done = carry_on(plan(), lambda lr: None if lr > 3e-4 else lr)
    assert min(run.lr for run in done) < 3e-4
    assert best_rate(plan(), ENTRY, rows) < 3e-4
    rows, _ = carry_on(plan(), lambda _: None)
    (result,) = collect(plan(), rows)
    assert result.mean == math.inf
    assert result.record()["mean"] is None


def test_collect_ignores_shorter_tuning_runs():
    rows, done = carry_on(plan(sweep_steps=100), lambda lr: abs(math.log(lr / 1e-3)))
    assert [run.scale.steps for run in done] == [100, 100, 100, 300, 300]
    assert len(collect(plan(sweep_steps=100), rows)) == 1


def test_tuning_leaves_a_given_rate_alone():
    _, done = carry_on(plan(lr=0.5), lambda lr: lr)
    assert [(run.lr, run.seed) for run in done] == [(0.5, 0), (0.5, 1)]
    _, done = carry_on(plan(rates=1), lambda lr: lr)
    assert [(run.lr, run.seed) for run in done] == [(1e-3, 0), (1e-3, 1)]


@pytest.mark.parametrize("rates", [1, 2, 3, 4, 5])
def test_next_powers_start_around_the_default(rates):
    powers = next_powers({}, rates)
    assert len(powers) == rates
    assert abs(sum(powers)) <= rates / 2


def test_run_key_ignores_study_and_entry_name():
    other = Entry("another name", "adamw", {}, lr=5.0)
    one, same = (Run(study, entry, 1e-3, 0, Scale(), Source("t")) for study, entry in (("a", ENTRY), ("b", other)))
    assert one.key == same.key
    assert one.key != Run("a", ENTRY, 1e-3, 1, Scale(), Source("t")).key
    assert one.key != Run("a", ENTRY, 1e-3, 0, Scale(), Source("u")).key
    assert Run("a", Entry("w", "adamw", {}, 1.0, workers=8), 1e-3, 0, Scale(), Source("t")).key != one.key
