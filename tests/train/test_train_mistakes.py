"""Every mistake of a user: one line that says what and where, exit code 2, no traceback."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from train_runs import COMMAND, SMALL

from demopt import cli
from demopt.train import launch
from demopt.train.config import SharedInputError, TrainConfig


def refuse(monkeypatch, capsys, *flags):
    """Start in this process and return the line; whatever is refused here is refused before workers start."""
    monkeypatch.setattr(sys, "argv", ["demopt", "train", *map(str, flags)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    told = capsys.readouterr().err
    assert end.value.code == 2, told
    assert told.count("\n") == 1
    assert told.startswith("demopt: ")
    return told


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--steps", "0"], "--steps is 0, wanted at least 1"),
        (["--top-k", "0"], "--top-k is 0, wanted at least 1"),
        (["--top-k", "many"], "--top-k"),
        (["--lr", "nan"], "--lr is nan, wanted a finite number"),
        (["--seed", "9" * 30], "wanted at most 9223372036854775807"),
        (["--timeout", "1e12"], "--timeout is 1000000000000.0, wanted at most"),
        (["--preset", "huge"], "--preset is 'huge', wanted one of tiny, small"),
        (["--optimizer", "sgd"], "--optimizer is 'sgd', wanted one of demo, local, muon, adamw"),
        (["--transform", "wavelet"], "wavelet"),
        (["--momentum", "1.5"], "momentum"),
        (["--heads", "5"], "--width is 192, wanted an even multiple of --heads 5"),
        (["--device", "cuda"], "--device cuda: torch finds no GPU here"),
        (["--colour", "red"], "No such option"),
        (["--data", "no/such/file.txt"], "--data no/such/file.txt: no such file or folder"),
        (["--tokenizer", "no/such.json"], "--tokenizer no/such.json: no such file or folder"),
        (["--config", "no/such.toml"], "config file no/such.toml: No such file"),
        (["--resume"], "holds no run; start one without --resume"),
    ],
)
def test_train_refuses_bad_flags(monkeypatch, capsys, tmp_path, flags, told):
    assert told in refuse(monkeypatch, capsys, "--out", tmp_path / "run", *flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("empty.txt", "", "no text in it"),
        ("short.txt", "only a few words", "part has"),
        ("broken.jsonl", '{"text": "a"}\n{"text": \n', "broken.jsonl:2: not JSON"),
        ("other.jsonl", '{"body": "a"}\n', "other.jsonl:1: no text under 'text' (found 'body'); see --text-field"),
        ("bad.npy", "not numpy", "not a token file"),
        ("folder/", "", "no text in it"),
    ],
)
def test_train_refuses_bad_data(monkeypatch, capsys, tmp_path, name, content, told):
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    else:
        path.write_text(content)
    assert told in refuse(monkeypatch, capsys, "--out", tmp_path / "run", "--data", path)
    assert not (tmp_path / "run").exists()


def test_train_refuses_wrong_or_mixed_tokens(monkeypatch, capsys, tmp_path):
    np.save(tmp_path / "floats.npy", np.zeros(1000))
    (tmp_path / "text.txt").write_text("text")
    told = refuse(monkeypatch, capsys, "--out", tmp_path / "run", "--data", tmp_path / "floats.npy")
    assert "wanted one row of integers, got float64 of shape (1000,)" in told
    assert "mixes token files" in refuse(monkeypatch, capsys, "--out", tmp_path / "run", "--data", tmp_path)


@pytest.mark.parametrize("numbers", [[-1, 3], [0, 2**40]])
def test_train_refuses_numbers_that_are_no_tokens(monkeypatch, capsys, tmp_path, numbers):
    np.save(tmp_path / "tokens.npy", np.array(numbers * 400, np.int64))
    told = refuse(monkeypatch, capsys, "--out", tmp_path / "run", "--data", tmp_path / "tokens.npy")
    assert f"holds numbers from {numbers[0]} to {numbers[1]}; tokens go from 0 to" in told


@pytest.mark.parametrize("kept", [3, 9, 11, 40, 127])
def test_train_refuses_a_token_file_that_was_cut(monkeypatch, capsys, tmp_path, kept):
    np.save(tmp_path / "whole.npy", np.zeros(1000, np.uint8))
    (tmp_path / "tokens.npy").write_bytes((tmp_path / "whole.npy").read_bytes()[:kept])
    told = refuse(monkeypatch, capsys, "--out", tmp_path / "run", "--data", tmp_path / "tokens.npy")
    assert "tokens.npy: not a token file" in told


def test_train_refuses_vocab_size_below_the_tokens(monkeypatch, capsys, tmp_path, text):
    told = refuse(monkeypatch, capsys, "--out", tmp_path / "run", "--data", text, "--vocab-size", 100)
    assert "--vocab-size is 100, but the tokens need 256" in told


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"stpes": 3}', "unknown setting 'stpes'; did you mean 'steps'?"),
        ('{"steps": "3"}', "--steps: wanted int, got '3'"),
        ("[1]", "wanted settings by name, got list"),
        ("{", "config file"),
    ],
)
def test_train_refuses_bad_config_file(monkeypatch, capsys, tmp_path, content, told):
    (tmp_path / "config.json").write_text(content)
    assert told in refuse(monkeypatch, capsys, "--out", tmp_path / "run", "--config", tmp_path / "config.json")


def test_train_refuses_unwritable_out(monkeypatch, capsys, tmp_path, text):
    (tmp_path / "file").write_text("")
    flags = [*SMALL, "--data", text, "--out", tmp_path / "file" / "run"]
    assert "cannot be written: Not a directory" in refuse(monkeypatch, capsys, *flags)


def test_train_refuses_out_that_holds_a_run(monkeypatch, capsys, finished, text):
    told = refuse(monkeypatch, capsys, *SMALL, "--data", text, "--out", finished[0])
    assert "already holds a run; go on with --resume, replace it with --overwrite" in told
    told = refuse(monkeypatch, capsys, "--out", finished[0], "--resume", "--overwrite")
    assert "--overwrite deletes what --resume goes on from" in told


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--width", "128"], "--width is 128, but the checkpoint was made with 64"),
        (["--preset", "small"], "--preset is small, but the checkpoint was made with tiny"),
        (["--batch", "3"], "--batch is 3, but the checkpoint was made with 2"),
        (["--lr", "0.5"], "--lr is 0.5, but the checkpoint was made with"),
        (["--optimizer", "adamw"], "--optimizer is adamw, but the checkpoint was made with demo"),
        (["--workers", "2:2"], "the checkpoint is of a run whose workers are fixed; go on as it was started"),
        (["--data", "OTHER"], "the text or tokenizer is not the one that the checkpoint was trained on"),
    ],
)
def test_resume_refuses_another_run(monkeypatch, capsys, tmp_path, finished, flags, told):
    (tmp_path / "other.txt").write_text("something else entirely. " * 400)
    flags = [str(tmp_path / "other.txt") if flag == "OTHER" else flag for flag in flags]
    before = (finished[0] / "config.json").read_bytes()
    assert told in refuse(monkeypatch, capsys, "--resume", "--out", finished[0], *flags)
    assert (finished[0] / "config.json").read_bytes() == before


def test_resume_refuses_a_folder_without_whole_checkpoint(monkeypatch, capsys, tmp_path, finished):
    shutil.copy(finished[0] / "config.json", tmp_path / "config.json")
    (tmp_path / "checkpoints" / "step-00000003.partial").mkdir(parents=True)
    assert "holds no whole checkpoint" in refuse(monkeypatch, capsys, "--resume", "--out", tmp_path)


def test_train_command_refuses_in_one_line_with_code_2(tmp_path):
    done = subprocess.run([*COMMAND, "--data", "nowhere.txt", "--out", tmp_path / "a"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "reading nowhere.txt, starting 1 worker ...\n")
    assert done.stderr.startswith("demopt: --data nowhere.txt: no such file or folder")
    assert done.stderr.count("\n") == 1


def test_train_without_typer_says_what_to_install(tmp_path):
    program = "import sys; sys.modules['typer'] = None; from demopt.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "train"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("demopt: typer is missing; install the command line with: pip install '.[train]'")
    assert done.stderr.count("\n") == 1


def test_checkpoint_record_is_json(finished):
    record = json.loads((finished[0] / "checkpoints" / "step-00000012" / "run.json").read_text())
    assert record["step"] == 12
    assert record["settings"] == json.loads((finished[0] / "config.json").read_text())


def test_torch_without_muon_is_named(monkeypatch, capsys, tmp_path):
    torch = pytest.importorskip("torch")
    monkeypatch.delattr(torch.optim, "Muon")
    told = refuse(monkeypatch, capsys, "--optimizer", "muon", "--out", tmp_path / "run")
    assert "--optimizer muon needs torch.optim.Muon, of torch 2.9 or newer, and this is" in told


@pytest.mark.parametrize("columns", ["60", "100"])
def test_demopt_alone_shows_its_help_and_no_mistake(monkeypatch, capsys, columns):
    monkeypatch.setattr(sys, "argv", ["demopt"])
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as end:
        cli.main()
    told = capsys.readouterr()
    assert end.value.code == 2
    assert "lighthouse" in told.out
    assert told.err == ""


def test_under_torchrun_workers_that_come_and_go_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = TrainConfig(workers=2, min_workers=1, out=str(tmp_path / "run"))
    with pytest.raises(SharedInputError, match="run it without torchrun"):
        launch.train(config)
    assert not (tmp_path / "run").exists()


def test_under_torchrun_the_first_line_says_where_the_workers_meet(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    assert cli._starting(1) == "waiting for all 2 workers at 10.0.0.1:29500"
