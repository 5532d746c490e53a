"""What a whole run leaves behind, with DeMo and with AdamW."""

import dataclasses
import importlib.util
import json

import pytest
import torch
from train_runs import STEPS, metrics

from demopt.exchange.wrappers import all_reduce_bytes
from demopt.train.assemble import read_file
from demopt.train.config import TrainConfig
from demopt.train.data import load_corpus
from demopt.train.finish import finish
from demopt.train.folder import RunFolder
from demopt.train.model import build

FIELDS = {"step", "loss", "lr", "tokens", "payload_bytes", "sent_bytes", "received_bytes", "step_seconds"}


@pytest.fixture(params=["finished", "finished_adamw"])
def out(request):
    return request.getfixturevalue(request.param)[0]


def test_metrics_have_one_object_a_step(out):
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row.keys() >= FIELDS
        assert ("val_loss" in row) == (row["step"] % 4 == 0)
    accumulate = 2 if "adamw" in out.name else 1
    assert rows[-1]["tokens"] == STEPS * 2 * 2 * 32 * accumulate
    assert rows[-1]["val_loss"] < rows[3]["val_loss"]


def test_metrics_loss_falls_and_lr_follows_schedule(out):
    rows = metrics(out)
    assert rows[-1]["loss"] < rows[0]["loss"]
    peak = TrainConfig(**read_file(out / "config.json")).lr
    assert max(row["lr"] for row in rows) == peak
    assert rows[-1]["lr"] == pytest.approx(peak / 10)


def test_metrics_bytes_of_demo_are_those_of_its_messages(finished):
    first, *others = metrics(finished[0])
    for row in others:
        assert 0 < row["payload_bytes"] == row["sent_bytes"] == row["received_bytes"]  # gather with two ranks
    assert first["payload_bytes"] <= first["sent_bytes"] < first["payload_bytes"] + 1000  # and a handshake


def test_metrics_bytes_of_adamw_are_those_of_a_ring(finished_adamw, finished):
    parameters = sum(p.numel() for p in _model(finished[0]).parameters())
    row = metrics(finished_adamw[0])[-1]
    assert row["payload_bytes"] == 4 * parameters
    assert row["sent_bytes"] == row["received_bytes"] == all_reduce_bytes(4 * parameters, 2) == 4 * parameters
    assert row["exchange_seconds"] is None


def test_config_json_is_the_whole_config(out):
    config = TrainConfig(**read_file(out / "config.json"))
    assert config.record() == json.loads((out / "config.json").read_text())
    assert (config.width, config.layers, config.vocab_size, config.workers) == (64, 1, 256, 2)


def test_transformers_loads_model_and_tokenizer(out):
    from transformers import AutoTokenizer

    model, tokenizer = _model(out), AutoTokenizer.from_pretrained(out / "model")
    tokens = tokenizer("naïve text", return_tensors="pt")["input_ids"]
    assert bytes(tokens[0].tolist()) == "naïve text".encode()
    assert tokenizer.decode(tokens[0]) == "naïve text"
    with torch.no_grad():
        assert model(input_ids=tokens).logits.isfinite().all()


def test_run_folder_has_plot_sample_curve_and_checkpoints(out):
    folder = RunFolder(out)
    assert folder.plot.read_bytes().startswith(b"\x89PNG")
    assert folder.sample.read_text(encoding="utf-8").startswith("def ")
    assert folder.curve.exists()
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step-00000009", "step-00000012"]


def test_run_folder_has_what_trackers_write_if_they_were_chosen(finished, finished_adamw):
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("tensorboard is not installed")
    assert any(RunFolder(finished_adamw[0]).tracked("tensorboard").iterdir())
    assert not RunFolder(finished[0]).tracked("tensorboard").exists()


def test_train_prints_plain_lines_without_a_terminal(finished):
    printed = finished[1].stdout
    assert "\r" not in printed
    assert "\x1b" not in printed
    assert "step 12/12" in printed
    for line in ("final validation loss", "uploaded a step", "received in all", "dense, computed", "tokens a second",
                 "share of the step in optimizer", "share of the step in exchange"):  # fmt: skip
        assert line in printed
    assert finished[1].stderr == ""


def _model(out):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(out / "model")


def test_finish_with_weights_that_are_not_finite_says_why_there_is_no_sample(tmp_path, capsys, finished, text):
    """Losses are null then, and generating would fail: NaN has no probabilities to sample from."""
    config = dataclasses.replace(TrainConfig(**read_file(finished[0] / "config.json")), out=str(tmp_path))
    folder = RunFolder(tmp_path)
    rows = [{**row, "loss": None} for row in metrics(finished[0])]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = build(config)
    torch.nn.init.constant_(next(model.parameters()), torch.nan)
    finish(config, folder, model, load_corpus(dataclasses.replace(config, data=(str(text),))))
    assert "no sample: the model's output is not finite" in capsys.readouterr().out
    assert not folder.sample.exists()
    assert folder.plot.exists()
