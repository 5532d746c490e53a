"""demopt eval: loss on a text, scores of lm-eval on a task of our own, and what is refused."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from demopt import cli
from demopt.eval.loaded import Loaded, load, model_folder
from demopt.eval.text import batches, text_loss
from demopt.train.config import TrainConfig
from demopt.train.folder import RunFolder
from demopt.train.model import build, resolve
from demopt.train.sample import save_model
from demopt.train.tokens import load_tokenizer

ROOT = Path(__file__).parents[2]
OURS = "tests/eval/tasks"
TEXT = "The loss of a text, naïve or not, is the same however it is cut.\n" * 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has finished, as far as eval looks at it."""
    root = tmp_path_factory.mktemp("run")
    config = resolve(TrainConfig(preset="tiny", layers=1, vocab_size=256))
    save_model(build(config), load_tokenizer("bytes", online=False), RunFolder(root))
    RunFolder(root).config.write_text(json.dumps(config.record()))
    RunFolder(root).metrics.touch()
    return root


@pytest.fixture(scope="module")
def loaded(run: Path) -> Loaded:
    return load(model_folder(run), "cpu")


def demopt(monkeypatch: pytest.MonkeyPatch, *words: object) -> Any:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1")  # so that what the command sets is undone
    monkeypatch.setattr(sys, "argv", ["demopt", "eval", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_model_folder_is_a_run_or_its_model(run: Path) -> None:
    assert model_folder(run) == model_folder(run / "model") == run / "model"


def test_text_loss_is_the_mean_cross_entropy_of_its_bytes(tmp_path: Path, loaded: Loaded) -> None:
    (tmp_path / "text.txt").write_text("naïve, short", encoding="utf-8")
    found = text_loss(loaded, TrainConfig(data=(str(tmp_path),)), batch=2)
    tokens = torch.tensor([[*"naïve, short".encode(), 0]])
    with torch.no_grad():
        logits = loaded.model(input_ids=tokens[:, :-1]).logits
    assert found.nats_per_token == pytest.approx(F.cross_entropy(logits[0], tokens[0, 1:]).item(), rel=1e-5)
    assert (found.tokens, found.bytes) == (13, 12)
    assert found.bits_per_byte == pytest.approx(found.nats / 12 / math.log(2))


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_text_loss_does_not_depend_on_the_batch(tmp_path: Path, loaded: Loaded, batch: int) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    config = TrainConfig(data=(str(tmp_path),))
    assert text_loss(loaded, config, batch).nats == pytest.approx(text_loss(loaded, config, 2).nats, rel=1e-5)


@pytest.mark.parametrize("length", [2, 3, 4, 5, 9, 10])
def test_batches_predict_every_token_but_the_first_once(length: int) -> None:
    found = batches(np.arange(length), sequence=4, batch=2)
    assert [int(token) for windows in found for row in windows for token in row[1:]] == list(range(1, length))
    assert all(bool((row[1:] == row[:-1] + 1).all()) for windows in found for row in windows)


def test_eval_of_a_text_prints_and_writes_its_loss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, run: Path
) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    flags = ["--data", tmp_path / "text.txt", "--out", tmp_path / "found.json"]
    assert demopt(monkeypatch, run, *flags) == 0
    told = json.loads((tmp_path / "found.json").read_text())
    assert f"text: {told['text']['bits_per_byte']:.4f} bits a byte" in capsys.readouterr().out
    assert 6 < told["text"]["bits_per_byte"] < 10  # of a model that knows nothing: about 8
    assert (told["scores"], told["missing"]) == ([], {})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["empty"], "empty: no model in it; wanted the --out of a finished run"),
        (["unfinished"], "unfinished: the run has no model yet, which it writes at its end"),
        (["bare", "--data", "text.txt"], "bare: no tokenizer in it (the run had token files)"),
        (["damaged", "--data", "text.txt"], "damaged: cannot be loaded: "),
        (["RUN", "--data", "none.txt"], "--data none.txt: no such file or folder"),
        (["RUN", "--tasks", ","], "--tasks is ',', wanted names with commas between"),
        (["RUN", "--limit", "0"], "--limit is 0, wanted at least 1"),
        (["RUN", "--batch", "0"], "--batch is 0, wanted at least 1"),
        (["RUN", "--device", "cdua"], "did you mean 'cuda'?"),
        (["RUN", "--include-path", "none"], "--include-path none: no such folder"),
        (["RUN", "--out", "empty"], "--out empty is a folder, wanted a file"),
        (["RUN"], "tasks need lm-eval: pip install '.[eval]'"),
    ],
)
def test_eval_refuses_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    run: Path,
    words: list[str],
    told: str,
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # importing it fails, as where it is not installed
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    for name in ("empty", "unfinished/checkpoints", "bare", "damaged"):
        (tmp_path / name).mkdir(parents=True)
    settings = (run / "model" / "config.json").read_text()
    for name in ("bare", "damaged"):
        (tmp_path / name / "config.json").write_text(settings)
    (tmp_path / "damaged" / "tokenizer.json").write_text("{")
    assert demopt(monkeypatch, *(str(run) if word == "RUN" else word for word in words)) == 2
    line = capsys.readouterr().err
    assert line.startswith("demopt: ")
    assert line.count("\n") == 1
    assert told in line


def _with_lm_eval(folder: Path, *words: object) -> "subprocess.CompletedProcess[str]":
    """In a process of its own, with no data but that in the repository."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")
    command = [sys.executable, "-m", "demopt.cli", "eval", *map(str, words), "--include-path", OURS]
    environment = os.environ | {"HF_HOME": str(folder / "home"), "COLUMNS": "100"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)


def _likelihood(loaded: Loaded, start: str, choice: str) -> float:
    whole = torch.tensor([list(f"{start} {choice}".encode())])
    with torch.no_grad():
        logs = F.log_softmax(loaded.model(input_ids=whole[:, :-1]).logits[0].double(), -1)
    first = len(start.encode())
    return sum(float(logs[at - 1, whole[0, at]]) for at in range(first, whole.shape[1]))


def test_eval_scores_a_task_as_computed_by_hand(tmp_path: Path, run: Path, loaded: Loaded) -> None:
    done = _with_lm_eval(tmp_path, run, "--tasks", "alphabet,elsewhere", "--out", tmp_path / "found.json")
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("demopt: elsewhere: its data is not on this machine; fetch it once with --online (")
    told = json.loads((tmp_path / "found.json").read_text())
    scores = {score["metric"]: score for score in told["scores"]}
    documents = [json.loads(text) for text in (ROOT / OURS / "alphabet.jsonl").read_text().splitlines()]
    for metric, power in (("acc", 0), ("acc_norm", 1)):
        right = 0
        for each in documents:
            likely = [_likelihood(loaded, each["start"], c) / len(c) ** power for c in each["choices"]]
            right += likely.index(max(likely)) == each["answer"]
        assert scores[metric]["value"] == pytest.approx(right / len(documents))
        assert scores[metric]["documents"] == len(documents)
        assert f"{right / len(documents):.4f}" in done.stdout
    assert list(told["missing"]) == ["elsewhere"]
