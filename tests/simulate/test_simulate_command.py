"""`demopt simulate` beside `demopt train`: the same flags, the same files, the same bits; and how it refuses."""

import errno
import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import forked
from demopt import cli
from demopt.train.report import Report

SMALL = (
    "--preset tiny --layers 1 --sequence 32 --batch 2 --accumulate 2 --warmup 3 --eval-every 3 --eval-sequences 6 "
    "--workers 2 --steps 6 --sample-tokens 0 --threads 1 --device cpu"
)
FLAGS = SMALL.split()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "calendar.py"
    file.write_bytes((Path(sysconfig.get_path("stdlib")) / "calendar.py").read_bytes())
    return file


def demopt(monkeypatch, *words):
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["demopt", *map(str, words)])
    with forked.workers(), pytest.raises(SystemExit) as end:
        cli.main()
    torch.set_num_threads(threads)
    return end.value.code


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


OPTIMIZERS = {
    "demo": ["--update", "muon", "--values", "float32", "--route", "relay"],
    "local": ["--sync-every", "4", "--top-k", "40", "--route", "relay"],  # the last round is after two steps
    "local late": ["--sync-every", "2", "--top-k", "40", "--delay", "1"],
    "muon": [],  # and AdamW, for what is no matrix
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_simulate_outputs_equal_train_outputs(monkeypatch, tmp_path, text, optimizer):
    more = ["--data", text, "--optimizer", optimizer.split()[0], *OPTIMIZERS[optimizer]]
    assert demopt(monkeypatch, "simulate", *FLAGS, *more, "--out", tmp_path / "here") == 0
    assert demopt(monkeypatch, "train", *FLAGS, *more, "--out", tmp_path / "there") == 0
    weights = [(tmp_path / out / "model" / "model.safetensors").read_bytes() for out in ("here", "there")]
    assert weights[0] == weights[1]
    mine, theirs = rows(tmp_path / "here"), rows(tmp_path / "there")
    assert [row.keys() for row in mine] == [row.keys() for row in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert one.get("val_loss", 0.0) == pytest.approx(other.get("val_loss", 0.0), rel=1e-6)
        assert (one["lr"], one["payload_bytes"], one["tokens"]) == (
            other["lr"],
            other["payload_bytes"],
            other["tokens"],
        )
    assert (tmp_path / "here" / "loss.png").exists()
    recorded = [json.loads((tmp_path / out / "config.json").read_text()) for out in ("here", "there")]
    assert {**recorded[0], "out": ""} == {**recorded[1], "out": ""}


def test_simulate_on_a_full_disk_says_so_in_one_line(monkeypatch, capsys, tmp_path, text):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Report, "step", full)
    assert demopt(monkeypatch, "simulate", *FLAGS, "--data", text, "--out", tmp_path / "run") == 1
    assert capsys.readouterr().err == f"demopt: --out {tmp_path / 'run'}: cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--resume"], "--resume"),
        (["--optimizer", "demo", "--delay", "1"], "--delay"),
        (["--optimizer", "demo", "--overlap", "2"], "--overlap"),
        (["--workers", "5000"], "--workers is 5000, wanted at most 1024"),
        (["--optimizer", "demo", "--route", "owner", "--update", "sgd"], "owner"),
        (["--data", "no/such/file"], "no/such/file"),
    ],
)
def test_simulate_mistakes_print_one_line(monkeypatch, capsys, tmp_path, flags, told):
    assert demopt(monkeypatch, "simulate", "--out", tmp_path / "run", *flags) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith("demopt: ")
    assert told in line
