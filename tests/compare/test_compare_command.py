"""`demopt compare` from start to page, going on after it was killed, and its refusals."""

import base64
import html as html_text
import json
import re
import shlex
import sys
from html.parser import HTMLParser

import pytest
import torch
from compare_scale import TINY

from demopt import cli
from demopt.compare.store import append_row, read_rows

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
    assert sorted(path.name for path in (finished / "reduction").glob("*.png")) == [
        "loss-by-bytes-received.png", "loss-by-bytes-uploaded.png", "loss-by-steps.png", "loss-by-time.png",
        "pareto.png",
    ]  # fmt: skip


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.sources = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_compare_page_is_self_contained(finished):
    html = (finished / "reduction" / "index.html").read_text()
    page = Page()
    page.feed(html)
    assert len(page.sources) == 5
    for source in page.sources:
        head, _, data = source.partition(",")
        assert head == "data:image/png;base64"
        assert base64.b64decode(data, validate=True).startswith(b"\x89PNG")
    assert not {"script", "link", "iframe", "object", "embed"} & set(page.tags)
    without_images = re.sub(r'src="data:[^"]*"', "", html)
    assert not re.search(r"https?://|url\(|@import", without_images)
    for result in json.loads((finished / "reduction" / "results.json").read_text())["results"]:
        assert all(command in html_text.unescape(without_images) for command in result["commands"])


def test_compare_shows_diverged_runs(monkeypatch, tmp_path, text):
    words = ["--only", "sgd", "--seeds", "0", "--lr", "1e30", *TINY.flags(), "--data", text, "--out", tmp_path]
    assert demopt(monkeypatch, *words) == 0
    (row,) = read_rows(tmp_path / "runs.jsonl").values()
    assert row["val_loss"] is None
    assert "diverged" in (tmp_path / "methods" / "index.html").read_text()


def test_read_rows_skips_lines_that_are_no_runs(tmp_path):
    file = tmp_path / "runs.jsonl"
    file.write_text('7\n{"key": "a"}\n{"key"')
    row = {"key": "b", "name": "", "val_loss": 1.0, "curve": [], "command": ""}
    append_row(file, row)
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
