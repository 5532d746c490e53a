"""`demopt compare` from start to page, going on after it was killed, and its refusals."""

import html as html_text
import json
import shlex
import sys

import pytest
import torch
from compare_scale import TINY
from rich.console import Console

from demopt import cli
from demopt.compare.run import Source
from demopt.compare.schedule import Bench
from demopt.compare.store import BYTES, PROVENANCE, append_row, read_rows
from demopt.compare.studies import chosen
from demopt.compare.sweep import Plan
from demopt.train.config import InputError, TrainConfig
from demopt.train.data import load_corpus, save_corpus
from demopt.train.folder import RunFolder

STUDY = ["--study", "reduction", "--seeds", "0,1", *TINY.flags()]


def demopt(monkeypatch, *words):
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["demopt", "compare", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    torch.set_num_threads(threads)
    return end.value.code


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("compare")
    with pytest.MonkeyPatch.context() as patch:
        assert demopt(patch, *STUDY, "--rates", 2, "--out", out, "--data", text) == 0
    return out


def test_compare_row_is_complete_and_repeatable(monkeypatch, finished, tmp_path, text):
    rows = read_rows(finished / "runs.jsonl")
    assert {row["name"] for row in rows.values()} == {"reduction senders", "reduction mean"}
    for row in rows.values():
        assert row.keys() >= {"method", "settings", "lr", "seed", "scale", "date", "machine", "demopt", "step_seconds"}
        assert [point["step"] for point in row["curve"]] == list(range(TINY.steps + 1))
        assert row["curve"][-1]["sent_bytes"] == row["sent_bytes"] > 0
    row = next(row for row in rows.values() if row["seed"] == 1)
    assert str(text.parent) not in json.dumps(row)
    monkeypatch.chdir(text.parent)
    words = shlex.split(row["command"])
    assert words[:2] == ["demopt", "compare"]
    assert demopt(monkeypatch, *words[2:], "--out", tmp_path) == 0
    (again,) = read_rows(tmp_path / "runs.jsonl").values()
    assert (again["key"], again["val_loss"], again["curve"]) == (row["key"], row["val_loss"], row["curve"])


def test_compare_goes_on_after_a_torn_line(monkeypatch, finished, tmp_path, text):
    lines = (finished / "runs.jsonl").read_text().splitlines()
    (tmp_path / "runs.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:50])
    words = [*STUDY, "--rates", 2, "--out", tmp_path, "--data", text]
    assert demopt(monkeypatch, *words) == 0
    after = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert after[: len(lines) - 1] == lines[:-1]
    assert len(after) == len(lines) + 1  # the torn line, and the run done anew
    rows, before = (read_rows(folder / "runs.jsonl") for folder in (tmp_path, finished))
    assert {key: row["val_loss"] for key, row in rows.items()} == {k: row["val_loss"] for k, row in before.items()}
    assert demopt(monkeypatch, *words) == 0
    assert (tmp_path / "runs.jsonl").read_text().splitlines() == after  # all is there


def test_compare_with_two_jobs_finds_the_same(monkeypatch, finished, tmp_path, text):
    assert demopt(monkeypatch, *STUDY, "--rates", 2, "--out", tmp_path, "--data", text, "--jobs", 2) == 0
    rows, before = (read_rows(folder / "runs.jsonl") for folder in (tmp_path, finished))
    assert {key: row["val_loss"] for key, row in rows.items()} == {k: row["val_loss"] for k, row in before.items()}


def test_compare_results_json_has_all_that_is_shown(finished):
    told = json.loads((finished / "reduction" / "results.json").read_text())
    assert len(told["results"]) == 2
    for result in told["results"]:
        assert result["mean"] == pytest.approx(sum(result["losses"]) / 2)
        assert result["spread"] >= 0
        assert len(result["commands"]) == 2
        assert result["received_bytes"] == result["payload_bytes"]  # gather, two workers
    assert told["verdict"][-1] == "There is no row of AdamW-DDP or Muon-DDP to compare with."
    assert sorted(path.name for path in (finished / "reduction").iterdir()) == ["index.html", "results.json"]


def test_compare_page_names_every_command_and_verdict(finished):
    html = html_text.unescape((finished / "reduction" / "index.html").read_text())
    told = json.loads((finished / "reduction" / "results.json").read_text())
    for result in told["results"]:
        assert all(command in html for command in result["commands"])
    assert all(sentence in html for sentence in told["verdict"])


def test_compare_shows_diverged_runs(monkeypatch, tmp_path, text):
    words = ["--only", "sgd", "--seeds", "0", "--lr", "1e30", *TINY.flags(), "--data", text, "--out", tmp_path]
    assert demopt(monkeypatch, *words) == 0
    (row,) = read_rows(tmp_path / "runs.jsonl").values()
    assert row["val_loss"] is None
    assert "diverged" in (tmp_path / "methods" / "index.html").read_text()


def test_compare_refuses_a_folder_where_one_is_at_work(monkeypatch, capsys, tmp_path, text):
    words = ["--only", "sgd", "--lr", 1, *TINY.flags(), "--data", text, "--out", tmp_path]
    with RunFolder(tmp_path).held():
        assert demopt(monkeypatch, *words) == 2
    assert f"--out {tmp_path}: a run is at work in it" in capsys.readouterr().err
    assert not (tmp_path / "tokens").exists()


def test_compare_refuses_tokens_of_another_text(tmp_path, text):
    """Where the lock does not hold, as on some network drives: nothing is stored as a run on the wrong text."""
    save_corpus(load_corpus(TrainConfig(data=(str(text),), sequence=8)), tmp_path / "tokens")
    plan = Plan(chosen("reduction", []), TINY, Source("the first text's"), lr=1e-3)
    with pytest.raises(InputError, match="its tokens are of another text by now"):
        Bench(tmp_path / "runs.jsonl", tmp_path / "tokens").work_off(plan, Console(quiet=True))
    assert not (tmp_path / "runs.jsonl").exists()


def test_read_rows_skips_lines_that_are_no_runs(tmp_path):
    file = tmp_path / "runs.jsonl"
    file.write_text('7\n{"key": "a"}\n{"key"')
    point = {"step": 1, "val_loss": 1.0, "sent_bytes": 0, "received_bytes": 0}
    numbers = dict.fromkeys((*BYTES, "lr", "seed", "seconds", "step_seconds", "val_loss"), 1)
    row = {"key": "b", "name": "", "command": "", "curve": [point], **numbers, **dict.fromkeys(PROVENANCE, "")}
    append_row(file, row)
    append_row(file, {**row, "curve": []})
    assert read_rows(file) == {"b": row}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--study", "moons"], "--study is 'moons', wanted one of methods, update, budget, transform"),
        (["--only", "adam"], "--only is 'adam', wanted one of adamw"),
        (["--seeds", "0,x"], "--seeds is '0,x', wanted numbers"),
        (["--seeds", "-1"], "--seeds is '-1', wanted numbers"),
        (["--steps", "0"], "--steps is 0, wanted at least 1"),
        (["--width", "100"], "--width is 100, wanted a multiple of 32"),
        (["--jobs", "0"], "--jobs is 0, wanted at least 1"),
        (["--rates", "0"], "--rates is 0, wanted at least 1"),
        (["--rates", "12"], "--rates is 12, wanted at most 11"),
        (["--lr", "nan"], "--lr is nan, wanted a finite number"),
        (["--device", "tpu"], "--device is 'tpu'"),
        (["--data", "no/such/file"], "no/such/file"),
        (["--colour", "red"], "No such option"),
    ],
)
def test_compare_mistakes_print_one_line(monkeypatch, capsys, tmp_path, flags, told):
    assert demopt(monkeypatch, "--out", tmp_path, *flags) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith("demopt: ")
    assert told in line
