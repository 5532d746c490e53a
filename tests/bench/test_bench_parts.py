"""The parts of a benchmark: who goes when, gradients, memory, traffic, figures, tables."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn import Parameter

import ranks
from demopt import DeMo
from demopt.bench import clock, machine, memory, step, table
from demopt.bench.config import BenchConfig, keywords, read
from demopt.bench.gradients import Gradients
from demopt.bench.launch import needed_bytes
from demopt.bench.methods import FUSED, demo_settings
from demopt.bench.samples import columns, slowest
from demopt.bench.shapes import gpt2, model_of
from demopt.bench.summary import summarise, with_floors
from demopt.bench.traffic import counted
from demopt.train.config import InputError
from demopt.train.team import Team

CPU = torch.device("cpu")


def test_turn_order_lets_each_method_go_first() -> None:
    orders = [clock.turn_order(4, turn) for turn in range(8)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert [order[0] for order in orders] == [0, 1, 2, 3, 0, 1, 2, 3]


def _order(rank: int, world_size: int) -> list[str]:
    """Who stepped when the clock ran, in the order of the study."""
    seen: list[str] = []

    def seconds(work: Any, device: torch.device) -> float:
        if hasattr(work, "__self__"):
            seen.append(type(work.__self__).__name__)
        work()
        return 1.0 + len(seen)

    clock.seconds, plain = seconds, clock.seconds
    try:
        config = BenchConfig(shapes="quick", rounds=2, warmup=1, foreach=False, muon=False, demo=("", "values=float32"))
        found = step.measure_step(config, Team(rank, world_size, CPU))
    finally:
        clock.seconds = plain
    assert [len(row["seconds"]) for row in found["methods"]] == [2, 2, 2]
    return seen


def test_measure_step_takes_turns_and_drops_warmup() -> None:
    (seen,) = ranks.run(_order, 1)
    assert seen == ["DeMo", "DeMo", "AdamW", "DeMo", "AdamW", "DeMo", "AdamW", "DeMo", "DeMo"]


def test_gradients_differ_by_rank_and_round_alone() -> None:
    parameters = [Parameter(torch.zeros(30, 7)), Parameter(torch.zeros(11))]

    def made(rank: int, turn: int) -> torch.Tensor:
        gradients.fill(rank, turn)
        return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    gradients = Gradients(parameters, pool=101)  # smaller than a parameter: it goes around
    ways = [made(rank, turn) for rank in range(3) for turn in range(3)]
    assert len({tuple(way.tolist()) for way in ways}) == 9
    assert torch.equal(made(1, 2), ways[5])
    parameters[1].grad = None
    assert torch.equal(made(1, 2), ways[5])


def test_memory_measure_counts_allocated_bytes() -> None:
    kept: list[torch.Tensor] = []

    def work() -> None:
        kept.append(torch.zeros(1000))
        large = torch.zeros(50_000)
        del large
        kept.append(torch.zeros(250))

    assert memory.measure(work, CPU) == memory.Allocated(peak_bytes=204_000, kept_bytes=5_000)


def test_memory_measure_of_adamw_is_two_moments() -> None:
    parameter = Parameter(torch.zeros(10_000))
    parameter.grad = torch.ones(10_000)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    assert memory.measure(optimizer.step, CPU).kept_bytes == pytest.approx(80_000, abs=100)


def _traffic(rank: int, world_size: int) -> list[tuple[int, int, int, int]]:
    torch.manual_seed(0)
    parameter = Parameter(torch.zeros(128, 64))
    optimizer = DeMo([parameter], lr=0.1, route="gather")
    for _ in range(2):
        parameter.grad = torch.randn(128, 64) + rank
        with counted(world_size) as traffic:
            optimizer.step()
    stats = optimizer.stats
    mine = traffic.collectives, traffic.payload_bytes, traffic.sent_bytes, traffic.received_bytes
    with counted(world_size) as other:
        dist.all_reduce(torch.zeros(100))
        dist.all_gather([torch.zeros(10)] * world_size, torch.zeros(10))
        dist.barrier()
    assert other.unknown == 1
    theirs = other.collectives, other.payload_bytes, other.sent_bytes, other.received_bytes
    return [mine, (1, stats.payload_bytes, stats.sent_bytes, stats.received_bytes), theirs]


def test_traffic_equals_demo_stats_and_ring_bytes() -> None:
    for mine, stats, other in ranks.run(_traffic, 2):
        assert mine == stats
        assert other == (3, 440, 440, 440)


def test_slowest_takes_the_slowest_rank_of_a_round() -> None:
    turns = [[{"seconds": 1.0, "apply": 0.5}], [{"seconds": 2.0, "apply": 0.25}]]
    assert columns(slowest(turns)) == {"seconds": [2.0], "stages": {"apply": [0.25]}}


def test_summarise_takes_ratios_within_a_round() -> None:
    rows = [{"name": name, "seconds": seconds, "stages": {}} for name, seconds in (("a", [1, 9]), ("b", [2, 18]))]
    assert [row["ratios"] for row in summarise(rows, ["a", "none"])] == [{"a": 1.0}, {"a": 2.0}]
    assert "floor_seconds" not in with_floors({"received_bytes": None}, None, 1e9)


def test_bench_config_round_trips_through_json(tmp_path: Path) -> None:
    config = BenchConfig(demo=("top_k=8", ""), workers=(1, 2), shapes="quick")
    config.save(tmp_path / "config.json")
    assert read(tmp_path / "config.json") == config


def test_keywords_parses_literals_and_words() -> None:
    given = keywords("a=1,b=.5,c=word,d=None,e=true,f=(1,2),g=[3]", "--demo")
    assert given == {"a": 1, "b": 0.5, "c": "word", "d": None, "e": True, "f": (1, 2), "g": [3]}


def test_demo_settings_turn_fingerprints_off_by_default() -> None:
    settings = demo_settings(BenchConfig(demo=("", "fingerprint_every=5")), world_size=2)
    assert [one["fingerprint_every"] for one in settings.values()] == [0, 5]


def test_model_of_knows_named_shapes() -> None:
    assert model_of("gpt2").parameters == 124_439_808
    assert len(gpt2()) == 148
    assert model_of("demo-1b").parameters == 1_176_764_416
    with pytest.raises(InputError, match="--shapes is 'large', wanted one of gpt2, demo-300m, demo-1b"):
        model_of("large")


def test_needed_bytes_counts_workers_and_state() -> None:
    assert needed_bytes(BenchConfig(against="a.py:A", workers=(1, 4), muon=False), 1000) == 4 * 1000 * 9 * 4


@pytest.mark.parametrize("flag", [["--against", "/secret/a.py:A"], ["--against=/secret/a.py:A"]])
def test_shown_command_hides_folders(flag: list[str]) -> None:
    shown = machine.shown_command(["bench", *flag, "--demo", "top_k=8"])
    assert "secret" not in shown
    assert shown.endswith("a.py:A --demo top_k=8")


def test_bench_tables_fit_80_columns() -> None:
    row = {
        "name": "a-very-long-file.py:WithALongClass",
        "seconds": [7.1, 8.2],
        "stages": {"extract": [3.1], "exchange": [3.2], "apply": [0.8]},
        "extra_memory_bytes": 1.2e9,
        "extra_memory_percent": 212.3,
        "floor_bytes": 2_488_796_160,
        "collectives": 296,
        "payload_bytes": 11_500_000,
        "sent_bytes": None,
        "received_bytes": 34_000_000,
    }
    other = {**row, "name": FUSED, "stages": {}, "seconds": [0.0381, 0.0392]}
    rows = [with_floors(one, 4e10, 1e8) for one in summarise([row, other], [FUSED, row["name"]])]
    measured = {
        "methods": rows,
        "memory_bytes_per_second": 4e10,
        "kernels": None,
        "tokens_per_step": 4096,
        "parameters": 10,
    }
    run = {"workers": 4, "load_average": 0.25, "threads": 1, "step": measured, "train": measured}
    for one in rows:
        one["tokens_per_second"] = 123_456.0
    data = {
        "device": {"cpu": "A processor", "cores": 2, "gpu": None, "type": "cpu"},
        "versions": {"torch": "2"},
        "settings": {"studies": ["step", "train"], "preset": "small"},
        "model": {"name": "gpt2", "parameters": 124_439_808},
        "runs": [run],
    }
    shown = io.StringIO()
    table.show(data, Console(file=shown, width=80))
    assert "…" not in shown.getvalue()
    assert "7,100-8,200" in shown.getvalue()
    assert "124,439,808 parameters, 4 workers x 1 threads" in shown.getvalue()
