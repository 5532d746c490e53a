"""`demopt plan` as a command: tables, JSON, verdicts, and a line for every mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from demopt.plan.costs import Call
from demopt.plan.network import FILLED, FIRST_WINDOW, HOST_SECONDS, Link, messages


@pytest.fixture
def run(command: Any) -> Any:
    """run(*flags): what the command prints; with --json, as Python's."""

    def plan(*flags: object, code: int = 0) -> Any:
        told = command("plan", *flags, code=code)
        return json.loads(told) if "--json" in flags else told

    return plan


def test_table_shows_received_bytes_by_workers(run: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("--preset", "demo-300m", "--update", "signum", "--workers", 2, "--workers", 64)
    assert shown.startswith("demo-300m: 319,946,752 parameters\n")
    rows = [line.split() for line in shown.splitlines() if line.split()[:1] in (["2"], ["64"])]
    assert rows == [["2", "1,280", "640", "3.23*", "21.6", "8.02"], ["64", "2,520", "1,260", "204", "42.7*", "15.8"]]
    assert "1,280 MB of memory" in shown
    assert "give --bandwidth" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_json_has_bytes_and_with_a_link_seconds(run: Any) -> None:
    flags = ["--params", "10M", "--top-k", 8, "--workers", 4, "--json"]
    plain = run(*flags)
    timed = run(*flags, "--bandwidth", "100Mbit", "--latency", 5)
    assert plain["demo"]["top_k"] == 8
    assert plain["verdicts"] == []
    for name, cost in timed["costs"]["4"].items():
        assert cost.pop("seconds") > 8 * cost["received_bytes"] / 1e8
        assert cost == plain["costs"]["4"][name]


def test_config_of_a_run_gives_both_optimizers_their_settings(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"preset": "tiny", "optimizer": "local", "sync_every": 7, "top_k": 99}))
    told = run("--config", file, "--workers", 2, "--json")
    assert (told["local"]["sync_every"], told["local"]["top_k"]) == (7, 99)
    assert (told["demo"]["top_k"], told["demo"]["update"]) == (32, "muon")
    flags = ["--local-top-k", 50, "--sync-every", 3, "--values", "int8"]
    told = run("--config", file, "--workers", 2, "--json", *flags)
    assert [told["local"][name] for name in ("top_k", "sync_every", "values")] == [50, 3, "int8"]


# Seconds


def test_link_takes_bytes_round_trips_and_the_host() -> None:
    far, near = Link(1e9, 0.1), Link(1e9, 0.0)
    gather = Call("all_gather", 10_000)
    assert near.seconds([gather], 4) == pytest.approx(8 * 30_000 / (1e9 * FILLED) + HOST_SECONDS)
    assert far.seconds([gather], 4) == pytest.approx(near.seconds([gather], 4) + 2.5 * 3 * 0.05)
    assert far.seconds([gather, gather], 4) == pytest.approx(2 * far.seconds([gather], 4))


def _slow_start_in_words(link: Link, sizes: list[int]) -> float:
    """A window that doubles with each round trip and each message; whatever exceeds it waits."""
    window, waited = FIRST_WINDOW, 0.0
    for size in sizes:
        left = size - window
        while left > 0:
            idle = link.latency_seconds - 8 * window / link.bits_per_second
            if idle <= 0:
                return waited
            waited += idle
            window *= 2
            left -= window
        window *= 2
    return waited


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all", "all_reduce"])
def test_slow_start_is_that_of_every_message_in_turn(kind: str) -> None:
    for workers in (2, 5, 300):
        for size in (100, 50_000, 3_000_000):
            for link in (Link(1e8, 0.05), Link(1e10, 0.2), Link(1e6, 0.001)):
                each, count = messages(Call(kind, size), workers)
                assert link._slow_start(each, count) == _slow_start_in_words(link, [each] * count)


# The verdict


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--bandwidth", "100Mbit", "--latency", 50, "--step-seconds", 2.1], "Take demopt train (LocalDeMo, a round"),
        (["--bandwidth", "10Mbit", "--latency", 50, "--step-seconds", 2.1], "Take demopt train --delay 1 (LocalDeMo"),
        (["--bandwidth", "1000Gbit", "--latency", 0, "--step-seconds", 2], "Stay with DDP: "),
    ],
)
def test_verdict_names_the_method_to_take(run: Any, monkeypatch: Any, flags: list[Any], told: str) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    sentence = run("--params", "124M", "--workers", 4, *flags).splitlines()[1]
    assert sentence.startswith(told)
    assert sentence.endswith(".")


def test_verdict_names_the_bandwidth_where_both_are_equal(run: Any) -> None:
    flags = ["--params", "124M", "--workers", 4, "--step-seconds", 2, "--json"]
    (verdict,) = run(*flags, "--bandwidth", "100Mbit")["verdicts"]
    equal = verdict["equal_bits_per_second"]
    for factor, best in ((0.9, "LocalDeMo"), (1.1, "DDP")):
        (there,) = run(*flags, "--bandwidth", f"{factor * equal:.0f}bit")["verdicts"]
        assert there["best"] == best


def test_verdict_names_the_last_number_of_workers_that_pays(run: Any) -> None:
    flags = ["--params", "10M", "--bandwidth", "1Gbit", "--step-seconds", 0.1, "--json"]
    (two_way,) = run(*flags, "--workers", 4)["verdicts"]
    assert two_way["most_workers"] is None  # bytes do not grow with workers
    flags += ["--local-top-k", 224]
    (verdict,) = run(*flags, "--workers", 4)["verdicts"]
    most = verdict["most_workers"]
    both = run(*flags, "--workers", most, "--workers", most + 1)["verdicts"]
    seconds = [{way["name"]: sum(list(way.values())[1:]) for way in each["ways"]} for each in both]
    assert seconds[0]["LocalDeMo"] < seconds[0]["DDP"]
    assert seconds[1]["LocalDeMo"] >= seconds[1]["DDP"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "give one of --preset, --config, --params and --shapes"),
        (["--preset", "tiny", "--params", "3M"], "give one of --preset, --config, --params and --shapes"),
        (["--preset", "huge"], "--preset is 'huge'; choose one of 'tiny', 'small'"),
        (["--params", "many"], "--params is 'many'; give a number of parameters"),
        (["--params", "0"], "--params is '0'; give a number"),
        (["--params", "1_0.0.0"], "--params is '1_0.0.0'; give a number"),
        (["--params", "2T"], "a plan is for 1 to 100,000,000,000"),
        (["--config", "no/such.json"], "config file no/such.json: No such file"),
        (["--params", "1M", "--local-top-k", "0"], "'--local-top-k'"),
        (["--params", "1M", "--local-top-k", "5000"], "top_k is 5000"),
        (["--params", "1M", "--values", "morse"], "values is 'morse'; choose one of"),
        (["--params", "1M", "--workers", "1"], "'--workers'"),
        (["--params", "1M", "--bandwidth", "10MB"], "--bandwidth is '10MB'; give bits per second"),
        (["--params", "1M", "--bandwidth", "0Mbit"], "--bandwidth is '0Mbit'; give bits per second"),
        (["--params", "1M", "--latency", "3"], "--latency and seconds need --bandwidth too"),
        (["--params", "1M", "--store-prices", "5,0.4,0.09"], "--store-prices needs --step-seconds too"),
        (["--params", "1M", "--store-prices", "5,0.4", "--step-seconds", "1"], "give three prices: per million"),
        (["--params", "1M", "--store-prices", "5,-1,0", "--step-seconds", "1"], "give three prices: per million"),
        (["--params", "1M", "--bandwidth", "1Gbit", "--latency", "-1"], "'--latency'"),
        (["--params", "1M", "--bandwidth", "1Gbit", "--latency", "nan"], "'--latency'"),
        (["--params", "1M", "--step-seconds", "1"], "--latency and seconds need --bandwidth too"),
    ],
)
def test_mistake_is_told_in_one_line(run: Any, flags: list[str], told: str) -> None:
    assert told in run(*flags, code=2)


def test_store_prices_add_a_day_of_a_run(run: Any) -> None:
    flags = ["--params", "1M", "--workers", 2, "--workers", 4, "--step-seconds", 2, "--store-prices", "5,0.4,0.09"]
    assert "a day of a run through a store" in run(*flags)
    plan = run(*flags, "--json")
    two, four = (plan["store_day"][count] for count in "24")
    assert four["reads"] / two["reads"] == pytest.approx(4 * 5 / (2 * 3))
    assert four["read_bytes"] == four["rounds"] * 4 * 3 * plan["local_bytes"]
    bill = four["writes"] / 1e6 * 5 + four["reads"] / 1e6 * 0.4 + four["read_bytes"] / 1e9 * 0.09
    assert four["money"] == pytest.approx(bill)
    slow = run("--params", "1M", "--workers", 2, "--step-seconds", "1e9", "--store-prices", "5,0.4,0.09", "--json")
    assert slow["store_day"]["2"]["rounds"] < 1e-4  # and the looks of such a round are not counted one by one
