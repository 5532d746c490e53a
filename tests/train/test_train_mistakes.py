"""Every mistake of a user: one line that says what and where, exit code 2, no traceback."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from train_runs import COMMAND, SMALL

from demopt import cli
from demopt.train import data, worker
from demopt.train.config import InputError, SharedInputError, TrainConfig, config_of, read_file


@pytest.fixture
def refuse(command):
    """refuse(*flags): the line of a mistake that is refused in this process, before workers start."""
    return lambda *flags: command("train", *flags, code=2)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--steps", "0"], "--steps is 0; it must be greater than or equal to 1"),
        (["--top-k", "many"], "--top-k"),
        (["--lr", "nan"], "--lr is nan; it must be a finite number"),
        (["--seed", "9" * 30], "it must be less than or equal to 9223372036854775807"),
        (["--preset", "huge"], "--preset is 'huge'; choose one of 'tiny', 'small'"),
        (["--optimizer", "sgd"], "--optimizer is 'sgd'; it must be 'local', 'demo' or 'adamw'"),
        (["--heads", "5"], "--width is 192; it must be an even multiple of --heads 5"),
        (["--device", "cuda"], "--device cuda: torch finds no GPU here"),
        (["--colour", "red"], "No such option"),
        (["--data", "no/such/file.txt"], "--data no/such/file.txt: no such file or folder"),
        (["--tokenizer", "no/such.json"], "--tokenizer no/such.json: no such file or folder"),
        (["--config", "no/such.json"], "config file no/such.json: No such file"),
        (["--resume"], "holds no run; start one without --resume"),
        (["--values", "morse"], "--optimizer local: values is 'morse'; choose one of"),
        (["--momentum", "1.5"], "--optimizer local: momentum is 1.5; it must lie in [0, 1)"),
        (["--error-decay", "1.5"], "error_decay is 1.5"),
        (["--outer-lr", "-1"], "outer_lr is -1.0"),
        (["--outer-momentum", "1"], "outer_momentum is 1.0"),
        (["--top-k", "5000"], "top_k is 5000"),
        (["--optimizer", "demo", "--update", "lion(beta=1)"], "--optimizer demo: "),
        (["--optimizer", "adamw", "--top-k", "8"], "--top-k is for --optimizer demo or local; the optimizer is adamw"),
        (["--optimizer", "demo", "--delay", "1"], "--delay is for --optimizer local; the optimizer is demo"),
        (["--optimizer", "local", "--update", "muon"], "--update is for --optimizer demo"),
    ],
)
def test_train_refuses_bad_flags(refuse, tmp_path, flags, told):
    assert told in refuse("--out", tmp_path / "run", *flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("empty.txt", "", "no text in it"),
        ("short.txt", "only a few words", "part has"),
        ("bad.npy", "not numpy", "not a token file"),
        ("folder/", "", "no text in it"),
    ],
)
def test_train_refuses_bad_data(refuse, tmp_path, name, content, told):
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    else:
        path.write_text(content)
    assert told in refuse("--out", tmp_path / "run", "--data", path)
    assert not (tmp_path / "run").exists()


def test_train_refuses_bad_token_files(refuse, tmp_path):
    def told(row):
        np.save(tmp_path / "tokens.npy", row)
        return refuse("--out", tmp_path / "run", "--data", tmp_path)

    assert "wanted one row of integers, got float64 of shape (1000,)" in told(np.zeros(1000))
    assert "holds numbers from -1 to 3; tokens go from 0 to" in told(np.array([-1, 3] * 400))
    assert "holds numbers from 0 to 1099511627776" in told(np.array([0, 2**40] * 400))
    (tmp_path / "text.txt").write_text("text")
    assert "mixes token files" in told(np.zeros(1000, np.uint16))


def test_train_refuses_vocab_size_below_the_tokens(refuse, tmp_path, text):
    told = refuse("--out", tmp_path / "run", "--data", text, "--vocab-size", 100)
    assert "--vocab-size is 100, but the tokens need 256" in told


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"stpes": 3}', "unknown setting 'stpes'; did you mean 'steps'?"),
        ('{"steps": "3"}', "--steps is '3'; it must be a valid integer"),
        ("[1]", "wanted settings by name, got list"),
        ("{", "config file"),
    ],
)
def test_train_refuses_bad_config_file(refuse, tmp_path, content, told):
    (tmp_path / "config.json").write_text(content)
    assert told in refuse("--out", tmp_path / "run", "--config", tmp_path / "config.json")


def test_train_refuses_unwritable_out(refuse, tmp_path, text):
    (tmp_path / "file").write_text("")
    flags = [*SMALL, "--data", text, "--out", tmp_path / "file" / "run"]
    assert "cannot be written: Not a directory" in refuse(*flags)


def test_train_refuses_out_that_holds_a_run(refuse, finished, text):
    told = refuse(*SMALL, "--data", text, "--out", finished[0])
    assert "already holds a run; go on with --resume, replace it with --overwrite" in told
    told = refuse("--out", finished[0], "--resume", "--overwrite")
    assert "--overwrite deletes the run that --resume continues" in told


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--width", "128"], "--width is 128, but the checkpoint was made with 64"),
        (["--preset", "small"], "--preset is small, but the checkpoint was made with tiny"),
        (["--lr", "0.5"], "--lr is 0.5, but the checkpoint was made with"),
        (["--optimizer", "adamw"], "--optimizer is adamw, but the checkpoint was made with demo"),
        (["--data", "OTHER"], "the text or tokenizer is not the one that the checkpoint was trained on"),
    ],
)
def test_resume_refuses_another_run(refuse, tmp_path, finished, flags, told):
    (tmp_path / "other.txt").write_text("something else entirely. " * 400)
    flags = [str(tmp_path / "other.txt") if flag == "OTHER" else flag for flag in flags]
    before = (finished[0] / "config.json").read_bytes()
    assert told in refuse("--resume", "--out", finished[0], *flags)
    assert (finished[0] / "config.json").read_bytes() == before


def test_resume_refuses_a_folder_without_whole_checkpoint(refuse, tmp_path, finished):
    shutil.copy(finished[0] / "config.json", tmp_path / "config.json")
    (tmp_path / "checkpoints" / "step-00000003.partial").mkdir(parents=True)
    assert "holds no whole checkpoint" in refuse("--resume", "--out", tmp_path)


def test_train_command_says_what_it_reads_and_refuses_in_one_line(tmp_path):
    done = subprocess.run([*COMMAND, "--data", "nowhere.txt", "--out", tmp_path / "a"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "reading nowhere.txt, starting 1 worker ...\n")
    assert done.stderr.startswith("demopt: --data nowhere.txt: no such file or folder")
    assert done.stderr.count("\n") == 1


def test_command_line_without_typer_says_what_to_install():
    program = "import sys; sys.modules['typer'] = None; from demopt.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "train"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("demopt: typer is missing; install the command line with: pip install '.[train]'")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("columns", ["60", "100"])
def test_demopt_alone_shows_its_help_and_no_mistake(monkeypatch, capsys, columns):
    monkeypatch.setattr(sys, "argv", ["demopt"])
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as end:
        cli.main()
    told = capsys.readouterr()
    assert end.value.code == 2
    for command in ("train", "join", "status", "stop", "replay", "plan", "doctor"):
        assert re.search(rf"^[│ ]*{command} ", told.out, re.MULTILINE), command
    assert told.err == ""


def test_run_in_a_folder_under_torchrun_is_refused(tmp_path):
    config = TrainConfig(run=str(tmp_path / "folder"), out=str(tmp_path / "run"))
    with pytest.raises(SharedInputError, match="--run needs no torchrun"):
        worker.under_torchrun(config)
    assert not (tmp_path / "run").exists()


def test_under_torchrun_the_first_line_says_where_the_workers_meet(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    assert cli._starting(1) == "waiting for all 2 workers at 10.0.0.1:29500"


# Damaged files


def _json_lines(folder, content):
    (folder / "text.jsonl").write_bytes(content)
    return data.documents(TrainConfig(data=[str(folder / "text.jsonl")]))


def _tokens(folder, content):
    (folder / "tokens.npy").write_bytes(content)
    corpus = data.load_corpus(TrainConfig(data=[str(folder / "tokens.npy")], sequence=4))
    return [0 <= int(row.min()) <= int(row.max()) < corpus.vocab_size for row in corpus.train.rows]


def _config(folder, content):
    (folder / "config.json").write_bytes(content)
    config = config_of(read_file(folder / "config.json"))
    return [config_of(json.loads(json.dumps(config.record(), allow_nan=False))) == config or config.resume]


def _whole(kind, folder):
    if kind == "tokens":
        np.save(folder / "whole.npy", np.arange(300, dtype=np.uint16))
        return (folder / "whole.npy").read_bytes()
    rows = {"text": "".join(json.dumps({"text": f"line {n} " * 9}) + "\n" for n in range(9))}
    return rows.get(kind, json.dumps(TrainConfig(preset="tiny", data=["a", "b"]).record(), indent=2)).encode()


@pytest.mark.parametrize(("kind", "read"), [("text", _json_lines), ("tokens", _tokens), ("config", _config)])
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.floats(0, 1), size=st.integers(0, 40), new=st.binary(max_size=8) | st.sampled_from([b"1e999", b"[" * 4000])
)
def test_damaged_file_is_refused_in_one_line_or_makes_sense(tmp_path, kind, read, at, size, new):
    """Some bytes of a good file are replaced, removed, or come in addition."""
    whole = _whole(kind, tmp_path)
    first = int(at * len(whole))
    try:
        fine = all(read(tmp_path, whole[:first] + new + whole[first + size :]))
    except InputError as error:
        fine = "\n" not in str(error)
    assert fine
