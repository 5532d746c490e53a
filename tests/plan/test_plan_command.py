"""`demopt plan` as a command: the models it takes, what it prints, and a line for every mistake."""

import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from demopt import cli
from demopt.plan.model import of_config, of_file
from demopt.plan.network import FILLED, HOST_SECONDS, Call, Link
from demopt.train.config import InputError, TrainConfig
from demopt.train.model import PRESETS, build, resolve


def run(monkeypatch: Any, capsys: Any, *flags: object, code: int = 0) -> str:
    """What the command prints, on stderr where it fails."""
    monkeypatch.setattr(sys, "argv", ["demopt", "plan", *map(str, flags)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    told = capsys.readouterr()
    assert end.value.code == code, told.err
    return told.err if code else told.out


def safetensors(path: Path, header: dict[str, object], data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("preset", PRESETS)
def test_plan_preset_shapes_equal_its_decoder(preset: str) -> None:
    config = resolve(TrainConfig(preset=preset))
    sized = TrainConfig(**{**config.record(), "vocab_size": config.vocab_size or 256})
    with torch.device("meta"):
        decoder = build(sized)
    model = of_config(config)
    assert sorted(model.shapes) == sorted(tuple(parameter.shape) for parameter in decoder.parameters())
    assert model.parameters == sum(parameter.numel() for parameter in decoder.parameters())


def test_of_file_reads_shapes_from_json(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('[[64, 64], [], {"name": "bias", "shape": [10]}]')
    model = of_file(tmp_path / "model.json")
    assert model.shapes == ((64, 64), (), (10,))
    assert model.parameters == 64 * 64 + 1 + 10


def test_of_file_reads_safetensors_header_alone(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "weight": {"dtype": "BF16", "shape": [300, 64], "data_offsets": [0, 38400]},
        "steps": {"dtype": "I64", "shape": [3], "data_offsets": [38400, 38424]},
    }
    assert of_file(safetensors(tmp_path / "model.safetensors", header)).shapes == ((300, 64),)


def test_of_file_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    torch_files.save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / "model.safetensors")
    assert sorted(of_file(tmp_path / "model.safetensors").shapes) == [(3, 4), (5,)]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.json", b"{}", "wanted a list of shapes"),
        ("a.json", b"[[3, -1]]", "is no shape"),
        ("a.json", b"[[3], [3.5]]", r"entry 2: \[3.5\] is no shape"),
        ("a.json", b'[{"name": "bias"}]', "entry 1: .* is no shape"),
        ("a.json", b"[3", "neither a JSON list of shapes nor a safetensors file"),
        ("a.json", b"[[0, 3]]", "no parameters in it"),
        ("a.json", b"\xff\xfe", "neither"),
        ("a.safetensors", b"", "neither"),
        ("a.safetensors", b"\xff" * 20, "neither"),
        ("a.safetensors", struct.pack("<Q", 2) + b"[]", "neither"),
        ("a.safetensors", struct.pack("<Q", 8) + b'{"a": 1}', "neither"),
    ],
)
def test_of_file_refuses_unusable_files(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=told):
        of_file(tmp_path / name)


def test_plan_table_shows_costs_by_workers(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    flags = ["--preset", "demo-300m", "--values", "sign", "--workers", 2, "--workers", 64]
    shown = run(monkeypatch, capsys, *flags, "--bandwidth", "1Gbit", "--latency", 10)
    shown = shown[shown.index("MB that each worker") :]  # after the verdict
    rows = [line.split() for line in shown.splitlines() if line.split()[:1] in (["2"], ["64"])]
    assert [row[0] for row in rows] == ["2", "64", "2", "64", *["2"] * 2, *["64"] * 2]  # then LocalDeMo's routes
    assert rows[0][4] == "3.23*"
    assert rows[1][1:6] == ["2,520", "1,260", "1,890", "204", "42.7*"]
    assert "1,000 Mbit/s, round trip 10 ms" in shown
    assert "momentum 1,280 MB" in shown


def test_plan_json_is_in_bytes_and_seconds(monkeypatch: Any, capsys: Any) -> None:
    flags = ["--params", "10M", "--top-k", 8, "--workers", 4, "--json"]
    plain = json.loads(run(monkeypatch, capsys, *flags))
    timed = json.loads(run(monkeypatch, capsys, *flags, "--bandwidth", "100Mbit", "--latency", 5))
    assert plain["link"] is None
    assert plain["settings"]["top_k"] == 8
    for name, cost in timed["rows"][0]["ways"].items():
        seconds = cost.pop("seconds")
        assert cost == plain["rows"][0]["ways"][name]
        assert seconds > 8 * cost["received_bytes"] / 1e8 + cost["rounds"] * 0.0025
        assert seconds == Link(1e8, 0.005).seconds([Call(**call) for call in cost["calls"]], 4)


def test_plan_flags_override_config(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    config = TrainConfig(preset="tiny", optimizer="demo", width=96, heads=2, top_k=5, chunk=32)
    (tmp_path / "config.json").write_text(json.dumps(config.record()))
    flags = ["--config", tmp_path / "config.json", "--chunk", 16, "--workers", 2, "--json"]
    plan = json.loads(run(monkeypatch, capsys, *flags))
    assert (plan["settings"]["top_k"], plan["settings"]["chunk"]) == (5, 16)
    assert plan["parameters"] == of_config(TrainConfig(preset="tiny", width=96, heads=2)).parameters


def test_plan_default_workers_are_powers_of_two(monkeypatch: Any, capsys: Any) -> None:
    rows = json.loads(run(monkeypatch, capsys, "--preset", "tiny", "--json"))["rows"]
    assert [math.log2(row["workers"]) for row in rows] == list(range(1, 11))


def test_link_seconds_are_wire_trips_and_slow_start() -> None:
    call = Call("all_gather", 100_000)
    wire = Link(8e6, 0.0).seconds([call], workers=4) - HOST_SECONDS
    assert wire == pytest.approx(0.3 / FILLED)
    late = Link(8e6, 0.1).seconds([call], workers=4) - Link(8e6, 0.0).seconds([call], workers=4)
    # Windows of 14,480, 28,960 and 57,920 bytes until the message is through; the later ones find them grown.
    waits = (0.1 - 0.01448) + (0.1 - 0.02896)
    assert late == pytest.approx(7.5 * 0.05 + waits)


def test_link_seconds_between_two_ranks_send_in_turn() -> None:
    link = Link(8e6, 0.0)
    two, four = (link.seconds([Call("all_gather", 10**6 // (many - 1))], many) for many in (2, 4))
    assert two == pytest.approx(2 * four, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--bandwidth", "100Mbit", "--latency", 50, "--step-seconds", 0.5], "Take demopt train --delay 1 (LocalDeMo"),
        # delay=1 would save a sixth of a step, and needs a quarter more steps
        (["--bandwidth", "100Mbit", "--latency", 50, "--step-seconds", 2.1], "Take demopt train (LocalDeMo, a round"),
        (["--bandwidth", "1Gbit", "--step-seconds", 2.1], "Take demopt train (LocalDeMo, a round every 5 steps, route"),
        (["--bandwidth", "100Gbit", "--step-seconds", 2.1], "Stay with DDP: a step takes DDP 2.2 s and demopt train"),
    ],
)
def test_plan_says_first_which_method_to_take(monkeypatch: Any, capsys: Any, flags: list[Any], told: str) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    first = run(monkeypatch, capsys, "--params", "124M", "--workers", 4, *flags).splitlines()[0]
    assert first.startswith(told)
    assert "DDP" in first
    assert first.endswith(".")


def test_plan_verdict_names_where_both_are_equal(monkeypatch: Any, capsys: Any) -> None:
    flags = ["--params", "124M", "--workers", 4, "--step-seconds", 2, "--json"]
    (verdict,) = json.loads(run(monkeypatch, capsys, *flags, "--bandwidth", "100Mbit"))["verdicts"]
    equal = verdict["equal_bits_per_second"]
    for factor, best in ((0.9, "LocalDeMo"), (1.1, "DDP")):
        (there,) = json.loads(run(monkeypatch, capsys, *flags, "--bandwidth", f"{factor * equal:.0f}bit"))["verdicts"]
        assert there["best"] == best


def test_plan_verdict_names_the_last_number_of_workers_that_pays(monkeypatch: Any, capsys: Any) -> None:
    flags = ["--params", "10M", "--bandwidth", "1Gbit", "--step-seconds", 0.1, "--json"]
    (verdict,) = json.loads(run(monkeypatch, capsys, *flags, "--workers", 4))["verdicts"]
    most = verdict["most_workers"]
    both = json.loads(run(monkeypatch, capsys, *flags, "--workers", most, "--workers", most + 1))["verdicts"]
    seconds = [{way["name"]: sum(list(way.values())[1:]) for way in each["ways"]} for each in both]
    assert seconds[0]["LocalDeMo"] < seconds[0]["DDP"]
    assert seconds[1]["LocalDeMo"] >= seconds[1]["DDP"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "wanted one of --preset, --config, --params and --shapes, got none"),
        (["--preset", "tiny", "--params", "3M"], "wanted one of --preset, --config, --params and --shapes, got 2"),
        (["--preset", "huge"], "--preset is 'huge', wanted one of tiny, small"),
        (["--params", "many"], "--params is 'many', wanted a number of parameters"),
        (["--params", "0"], "--params is '0', wanted a number"),
        (["--params", "1_0.0.0"], "--params is '1_0.0.0', wanted a number"),
        (["--params", "2T"], "wanted at most 100,000,000,000"),
        (["--shapes", "no/such.json"], "--shapes no/such.json: No such file"),
        (["--config", "no/such.json"], "config file no/such.json: No such file"),
        (["--params", "1M", "--top-k", "0"], "--top-k is 0, wanted at least 1"),
        (["--params", "1M", "--chunk", "0"], "--chunk is 0, wanted at least 1"),
        (["--params", "1M", "--chunk", "100000"], "--chunk is 100000, wanted at most 4096"),
        (["--params", "1M", "--values", "morse"], "values is 'morse'; choose one of"),
        (["--params", "1M", "--transform", "wavelet"], "wavelet"),
        (["--params", "1M", "--sync-every", "0"], "--sync-every is 0, wanted at least 1"),
        (["--params", "1M", "--local-top-k", "0"], "--local-top-k is 0, wanted at least 1"),
        (["--params", "1M", "--local-top-k", "5000"], "top_k is 5000"),
        (["--params", "1M", "--workers", "1"], "--workers is 1, wanted 2 to 65536"),
        (["--params", "1M", "--workers", "few"], "'--workers'"),
        (["--params", "1M", "--bandwidth", "10MB"], "--bandwidth is '10MB', wanted bits a second"),
        (["--params", "1M", "--bandwidth", "0Mbit"], "--bandwidth is '0Mbit', wanted bits a second"),
        (["--params", "1M", "--latency", "3"], "give --bandwidth too"),
        (["--params", "1M", "--bandwidth", "1Gbit", "--latency", "-1"], "--latency is -1.0, wanted milliseconds"),
        (["--params", "1M", "--step-seconds", "1"], "--step-seconds alone says nothing; give --bandwidth too"),
        (["--params", "1M", "--bandwidth", "1Gbit", "--step-seconds", "-1"], "--step-seconds is -1.0, wanted seconds"),
        (["--params", "1M", "--bandwidth", "1Gbit", "--latency", "nan"], "--latency is nan, wanted milliseconds"),
    ],
)
def test_plan_mistakes_print_one_line(monkeypatch: Any, capsys: Any, flags: list[str], told: str) -> None:
    line = run(monkeypatch, capsys, *flags, code=2)
    assert line.startswith("demopt: ")
    assert line.count("\n") == 1
    assert told in line


def test_plan_config_resolves_as_train_does(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    for given, update in (({"preset": "small"}, "muon"), ({"preset": "small", "route": "owner"}, "signum")):
        file.write_text(json.dumps(given))
        told = json.loads(run(monkeypatch, capsys, "--config", file, "--workers", 64, "--json"))
        assert told["settings"]["update"] == update


def test_plan_of_gpt2_has_its_parameters(monkeypatch: Any, capsys: Any) -> None:
    told = json.loads(run(monkeypatch, capsys, "--preset", "gpt2", "--workers", 2, "--json"))
    assert (told["model"], told["parameters"], told["tensors"]) == ("gpt2", 124_439_808, 148)


def test_plan_shows_local_rounds_and_their_share_of_a_step(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    flags = ["--params", "10M", "--workers", 4, "--bandwidth", "100Mbit", "--latency", 5]
    flags += ["--sync-every", 8, "--local-top-k", 100]
    local = json.loads(run(monkeypatch, capsys, *flags, "--json"))["local"]
    assert (local["sync_every"], local["top_k"], local["kept"]) == (8, 100, 100 * math.ceil(1e7 / 4096))
    (row,) = local["rows"]
    assert set(row["ways"]) == {"gather", "relay"}
    gather = row["ways"]["gather"]
    assert gather["seconds"] > 8 * gather["received_bytes"] / 1e8 + 0.005
    shown = run(monkeypatch, capsys, *flags)
    assert "LocalDeMo: a round every 8 steps, top-k 100" in shown
    (cells,) = [line.split() for line in shown.splitlines() if line.split()[:2] == ["4", "gather"]]
    in_a_round, in_a_step, *seconds = map(float, cells[2:])
    assert in_a_round == pytest.approx(gather["received_bytes"] / 1e6, rel=0.01)
    assert in_a_step == pytest.approx(in_a_round / 8, rel=0.01)
    assert seconds == pytest.approx([gather["seconds"], gather["seconds"] / 8], rel=0.01)


def test_plan_takes_local_settings_from_a_config(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"preset": "tiny", "optimizer": "local", "sync_every": 7, "top_k": 99}))
    told = json.loads(run(monkeypatch, capsys, "--config", file, "--workers", 2, "--json"))
    assert (told["local"]["sync_every"], told["local"]["top_k"]) == (7, 99)
    assert (told["settings"]["top_k"], told["settings"]["update"]) == (32, "muon")


def test_plan_with_small_chunks_keeps_at_most_all_of_them(monkeypatch: Any, capsys: Any) -> None:
    told = json.loads(run(monkeypatch, capsys, "--params", "1M", "--chunk", 8, "--workers", 2, "--json"))
    assert told["local"]["top_k"] == 64
