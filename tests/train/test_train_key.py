"""A run with a key: it learns what a run without one does, and who has no key does not join."""

import os
import stat

import pytest
import train_runs
from test_train_workers import _by_hand
from train_runs import metrics, timeless

from demopt import cli
from demopt.train.config import InputError
from demopt.train.elastic.key import VARIABLE, make_key, read_key


@pytest.fixture
def key_file(tmp_path):
    make_key(tmp_path / "run.key")
    return tmp_path / "run.key"


def test_demopt_key_writes_a_file_for_its_owner_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["demopt", "key", str(tmp_path / "run.key")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert "--key-file" in capsys.readouterr().out
    assert stat.S_IMODE(os.stat(tmp_path / "run.key").st_mode) == 0o600
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "exists; a key is not overwritten" in capsys.readouterr().err


def test_key_comes_from_the_file_before_the_environment(key_file, monkeypatch):
    monkeypatch.setenv(VARIABLE, "00" * 32)
    assert read_key(None) == bytes(32)
    assert read_key(str(key_file)) != bytes(32)
    monkeypatch.setenv(VARIABLE, "secret")
    with pytest.raises(InputError, match="DEMOPT_KEY holds no key: wanted 64 hexadecimal digits"):
        read_key(None)
    with pytest.raises(InputError, match="make a key with demopt key"):
        read_key("nowhere.key")


def test_run_with_a_key_equals_the_run_without(tmp_path, text, key_file, finished):
    result = train_runs.here(tmp_path / "run", text, "--key-file", key_file)
    assert result.returncode == 0, result.stderr
    assert timeless(metrics(tmp_path / "run")) == timeless(metrics(finished[0]))
    assert key_file.read_text().strip() not in (tmp_path / "run" / "config.json").read_text()


def test_adamw_with_a_key_averages_gradients_as_ddp_does(tmp_path, text, key_file, finished_adamw):
    flags = ("--optimizer", "adamw", "--accumulate", "2", "--key-file", key_file)
    result = train_runs.here(tmp_path / "run", text, *flags)
    assert result.returncode == 0, result.stderr
    losses = [row["loss"] for row in metrics(tmp_path / "run")]
    assert losses == pytest.approx([row["loss"] for row in metrics(finished_adamw[0])], rel=1e-4)


def test_worker_without_the_key_does_not_join(tmp_path, text, key_file):
    both = _by_hand(tmp_path / "run", ["--data", text, "--key-file", key_file], ["--data", text])
    assert [code for code, _ in both] == [2, 2]
    assert "rank 1 has no key, and this rank has one; give the same key to all ranks" in both[0][1]
    assert not (tmp_path / "run").exists()
