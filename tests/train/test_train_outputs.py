"""The output of whole runs: metrics, progress, model, table, tracker."""

import sys
import types
from contextlib import nullcontext

import pytest
import torch
from rich.filesize import decimal
from test_screen import row as row_of
from train_runs import STEPS, metrics

from demopt.exchange.meter import all_reduce_bytes
from demopt.train import report
from demopt.train.config import InputError, TrainConfig, read_file
from demopt.train.method import check_settings
from demopt.train.out import OutFolder
from demopt.train.report import Report

FIELDS = {"step", "loss", "lr", "tokens", "payload_bytes", "sent_bytes", "received_bytes", "step_seconds"}
# the steps that apply a round: the last one is short, and with delay each third step is saved, which applies the round
ROUNDS = {"local": [5, 10, 12], "delay": [3, 6, 9, 12]}


@pytest.mark.parametrize("case", ["demo", "adamw", "local", "delay"])
def test_whole_run_leaves_a_line_per_step_and_its_last_two_checkpoints(runs, case):
    out, printed = runs(case)
    rows, peak = metrics(out), TrainConfig(**read_file(out / "config.json")).lr
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row.keys() >= FIELDS
        assert ("val_loss" in row) == (row["step"] % 4 == 0)
    assert rows[-1]["tokens"] == STEPS * 2 * 2 * 32 * (2 if case == "adamw" else 1)
    assert rows[-1]["val_loss"] < rows[3]["val_loss"]
    assert [row["lr"] for row in rows[:3]] == pytest.approx([peak / 3, 2 * peak / 3, peak])
    assert rows[-1]["lr"] == pytest.approx(peak / 10)
    assert sorted(path.name for path in OutFolder(out).checkpoints.iterdir()) == ["step-00000009", "step-00000012"]
    assert printed.stderr == ""
    assert not {"\r", "\x1b"} & set(printed.stdout)
    for line in ("step 1/12", "final validation loss", "tokens per second", "by one worker per step"):
        assert line in printed.stdout
    assert ("DDP, computed" if case != "adamw" else "per step, computed") in printed.stdout


def test_bytes_of_demo_and_adamw_are_those_of_messages_and_of_a_ring(runs, finished):
    first, *others = metrics(finished[0])
    for row in others:
        assert 0 < row["payload_bytes"] == row["sent_bytes"] == row["received_bytes"]  # gather with two ranks
    assert first["payload_bytes"] <= first["sent_bytes"] < first["payload_bytes"] + 1000  # and a handshake
    parameters = sum(p.numel() for p in _model(finished[0]).parameters())
    row = metrics(runs("adamw")[0])[-1]
    assert row["payload_bytes"] == 4 * parameters
    assert row["sent_bytes"] == row["received_bytes"] == all_reduce_bytes(4 * parameters, 2) == 4 * parameters
    assert row["exchange_seconds"] is None


@pytest.mark.parametrize("case", ROUNDS)
def test_bytes_of_local_are_counted_in_the_steps_that_apply_a_round(runs, case):
    out, printed = runs(case)
    rows = metrics(out)
    assert [row["step"] for row in rows if row["payload_bytes"]] == ROUNDS[case]
    (message,) = {row["payload_bytes"] for row in rows if row["payload_bytes"]}
    for column in ("sent_bytes", "received_bytes"):
        assert [row["step"] for row in rows if row[column]] == ROUNDS[case]
        assert sum(row[column] for row in rows) == len(ROUNDS[case]) * message
    mean = decimal(round(sum(row["sent_bytes"] for row in rows) / STEPS))
    (line,) = [line for line in printed.stdout.splitlines() if "uploaded by one worker per step" in line]
    assert line.split("│")[2].strip() == mean
    (last,) = [line for line in printed.stdout.splitlines() if line.startswith(f"step {STEPS}/{STEPS} ")]
    assert last.endswith(f"  {mean}/step")
    assert "route gather: " in printed.stdout
    assert "owner" not in printed.stdout


def test_transformers_loads_model_and_tokenizer(finished):
    from transformers import AutoTokenizer

    out = finished[0]
    model, tokenizer = _model(out), AutoTokenizer.from_pretrained(out / "model")
    tokens = tokenizer("naïve text", return_tensors="pt")["input_ids"]
    assert bytes(tokens[0].tolist()) == "naïve text".encode()
    assert tokenizer.decode(tokens[0]) == "naïve text"
    with torch.no_grad():
        assert model(input_ids=tokens).logits.isfinite().all()


def _model(out):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(out / "model")


# Trackers


def test_wandb_gets_the_metrics_below_out_and_training_goes_on_without_it(tmp_path, capsys, monkeypatch):
    def init(**how):
        assert how["config"]["sequence"] == 4
        return nullcontext(types.SimpleNamespace(log=log))

    def log(metrics, step):
        if step == 2:
            raise OSError("the network is down")
        seen.append((step, metrics["loss"]))

    seen = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Settings=lambda **_: None))
    for name in ("WANDB_MODE", "WANDB_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with Report(OutFolder(tmp_path), TrainConfig(tracker="wandb", sequence=4), 0, first=True) as shown:
        for step in (1, 2, 3):
            shown.step(row_of(step))
    assert seen == [(1, 6.0)]
    told = "--tracker failed, training goes on without it: OSError: the network is down"
    assert told in capsys.readouterr().out.splitlines()
    assert (report.os.environ["WANDB_MODE"], report.os.environ["WANDB_DIR"]) == ("offline", str(tmp_path))


def test_missing_tracker_is_named_with_the_command_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"^--tracker wandb is not installed: pip install wandb$"):
        check_settings(TrainConfig(tracker="wandb"))


def test_tensorboard_has_the_metrics(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Report(OutFolder(tmp_path), TrainConfig(tracker="tensorboard", sequence=4), 0, first=True) as shown:
        shown.step(row_of(1, loss=3.0))
        shown.step(row_of(2, loss=float("nan")))
        shown.step(row_of(3, loss=2.0, val_loss=2.5))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {name: [(each.step, each.value) for each in events.Scalars(name)] for name in ("loss", "val_loss")}
    assert found == {"loss": [(1, 3.0), (3, 2.0)], "val_loss": [(3, 2.5)]}
