"""`demopt plan` as a command: tables, verdicts, and a line for every mistake."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from demopt.plan.costs import Call, make_plan, of_count
from demopt.plan.network import LOSS, Link, judge, sent_bytes, trips
from demopt.train.config import TrainConfig, resolve


def test_table_shows_received_bytes_by_workers(command: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = command("plan", "--preset", "demo-300m", "--workers", 2, "--workers", 64)
    assert shown.startswith("demo-300m: 319,946,752 parameters\n")
    rows = [line.split() for line in shown.splitlines() if line.split()[:1] in (["2"], ["64"])]
    assert rows == [["2", "1,280", "640", "3.23", "8.02"], ["64", "2,520", "1,260", "204", "15.8"]]
    assert "1,280 MB of memory" in shown
    assert "give --bandwidth" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_config_of_a_run_gives_both_optimizers_their_settings(command: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"preset": "tiny", "optimizer": "local", "sync_every": 7, "top_k": 99}))
    shown = command("plan", "--config", file, "--workers", 2)
    assert "LocalDeMo: top-k 99," in shown
    assert "a round every 7 steps" in shown
    assert "DeMo: top-k 32," in shown
    assert "update rule (muon)" in shown
    assert "a round every 3 steps" in command("plan", "--config", file, "--workers", 2, "--sync-every", 3)


# Seconds


def test_link_takes_bytes_and_round_trips() -> None:
    far, near = Link(1e9, 0.1), Link(1e9, 0.0)
    gather, reduce = Call("all_gather", 10_000), Call("all_reduce", 10_000_000, times=2)
    assert near.seconds([gather], 4) == pytest.approx(8 * 30_000 / 1e9)
    assert far.seconds([gather], 4) == pytest.approx(near.seconds([gather], 4) + 2.5 * 3 * 0.05)
    assert near.seconds([reduce], 4) == pytest.approx(2 * 8 * 15_000_000 / 1e9)
    assert trips(reduce, 4) == 16  # segments of a MiB are fewer: 15
    assert trips(Call("all_reduce", 100_000_000), 4) == 144
    assert far.seconds([LOSS], 4) == pytest.approx(6 * 0.05, rel=1e-4)
    both = [gather, Call("all_to_all", 8_000)]
    assert far.seconds(both, 4) == pytest.approx(sum(far.seconds([each], 4) for each in both))


def test_link_waits_while_tcp_doubles_its_window() -> None:
    far, reduce = (
        Link(1e9, 0.1),
        Call("all_reduce", 10_000_000),
    )  # messages of 2.5 MB; windows of 14.48 kB x 1, 2, ... 128
    assert far.slow_start(reduce, 4) == pytest.approx(7 * 0.1 - 8 * 2.5e6 / 1e9)
    assert far.seconds([reduce], 4) == pytest.approx(8 * 15e6 / 1e9 + 16 * 0.05 + far.slow_start(reduce, 4))
    assert Link(1e9, 0.1).slow_start(Call("all_gather", 14_480), 4) == 0  # one window
    assert Link(1e7, 0.01).slow_start(reduce, 4) == 0  # the first window covers the link


# The verdict


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--bandwidth", "100Mbit", "--latency", 50, "--step-seconds", 2.1], "Take demopt train, 2"),
        (["--bandwidth", "1000Gbit", "--latency", 0, "--step-seconds", 2], "Stay with DDP: for 4 workers a step takes"),
    ],
)
def test_verdict_names_the_method_to_take(command: Any, monkeypatch: Any, flags: list[Any], told: str) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    sentence = command("plan", "--params", "124M", "--workers", 4, *flags).splitlines()[1]
    assert sentence.startswith(told)
    assert sentence.endswith(".")


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_both_take_as_long_at_the_equal_bandwidth(workers: int) -> None:
    configs = [resolve(TrainConfig(optimizer=optimizer)) for optimizer in ("demo", "local")]
    plan = make_plan(of_count("124M"), *configs, workers=[workers])
    link = Link(1e8, 0.0)
    equal = judge(plan, link, 2.0, 0.2, workers).equal
    assert equal is not None
    there = {way.name: way for way in judge(plan, replace(link, bits_per_second=equal), 2.0, 0.2, workers).ways}
    assert there["DDP"].seconds == pytest.approx(there["LocalDeMo"].seconds, rel=1e-3)
    dense, local = (sent_bytes([*plan.costs[workers][name].calls, LOSS], workers) for name in ("DDP", "LocalDeMo"))
    assert equal == pytest.approx(8 * (dense - local / plan.local.sync_every) / 0.2, rel=1e-3)
    assert judge(plan, Link(1e8, 0.5), 2.0, 0.2, workers).equal is None


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "give one of --preset, --config and --params"),
        (["--preset", "tiny", "--params", "3M"], "give one of --preset, --config and --params"),
        (["--preset", "huge"], "--preset is 'huge'; choose one of 'tiny', 'small'"),
        (["--params", "many"], "--params is 'many'; give a number of parameters"),
        (["--params", "0"], "--params is '0'; give a number"),
        (["--params", "1_0.0.0"], "--params is '1_0.0.0'; give a number"),
        (["--params", "2T"], "a plan is for 1 to 100,000,000,000"),
        (["--config", "no/such.json"], "config file no/such.json: No such file"),
        (["--params", "1M", "--workers", "1"], "'--workers'"),
        (["--params", "1M", "--bandwidth", "10MB"], "--bandwidth is '10MB'; give bits per second"),
        (["--params", "1M", "--bandwidth", "0Mbit"], "--bandwidth is '0Mbit'; give bits per second"),
        (["--params", "1M", "--latency", "3"], "--latency and seconds need --bandwidth too"),
        (["--params", "1M", "--bandwidth", "1Gbit", "--latency", "-1"], "'--latency'"),
        (["--params", "1M", "--bandwidth", "1Gbit", "--latency", "nan"], "'--latency'"),
        (["--params", "1M", "--step-seconds", "1"], "--latency and seconds need --bandwidth too"),
    ],
)
def test_mistake_is_told_in_one_line(command: Any, flags: list[str], told: str) -> None:
    assert told in command("plan", *flags, code=2)


@pytest.mark.parametrize(("flags", "shown"), [((), "0.500"), (("--optimizer-seconds", 0.25), "0.250")])
def test_optimizer_takes_a_tenth_of_a_step_unless_told(command: Any, flags: tuple[Any, ...], shown: str) -> None:
    link = ("--params", "1M", "--workers", 2, "--bandwidth", "1Gbit", "--step-seconds", 5)
    rows = [line.split() for line in command("plan", *link, *flags).splitlines()]
    assert {row[1]: row[3] for row in rows if row[:1] == ["2"] and len(row) == 6} == {
        "DDP": "0", "DeMo": shown, "LocalDeMo": shown,
    }  # fmt: skip
