"""The output of a whole run, with DeMo and with AdamW: progress, metrics, model, table, tracker."""

import dataclasses
import json

import pytest
import torch
from train_runs import STEPS, metrics

from demopt.exchange.meter import all_reduce_bytes
from demopt.train import report
from demopt.train.config import InputError, TrainConfig, read_file
from demopt.train.data import load_corpus
from demopt.train.folder import RunFolder
from demopt.train.method import check_settings
from demopt.train.model import build
from demopt.train.report import Progress, Report, finish

FIELDS = {"step", "loss", "lr", "tokens", "payload_bytes", "sent_bytes", "received_bytes", "step_seconds"}


@pytest.fixture(params=["finished", "finished_adamw"])
def out(request):
    return request.getfixturevalue(request.param)[0]


def test_metrics_have_one_object_per_step(out):
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row.keys() >= FIELDS
        assert ("val_loss" in row) == (row["step"] % 4 == 0)
    accumulate = 2 if "adamw" in out.name else 1
    assert rows[-1]["tokens"] == STEPS * 2 * 2 * 32 * accumulate
    assert rows[-1]["val_loss"] < rows[3]["val_loss"]


def test_metrics_lr_follows_the_schedule(out):
    rows, peak = metrics(out), TrainConfig(**read_file(out / "config.json")).lr
    assert [row["lr"] for row in rows[:3]] == pytest.approx([peak / 3, 2 * peak / 3, peak])
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


def test_transformers_loads_model_and_tokenizer(out):
    from transformers import AutoTokenizer

    model, tokenizer = _model(out), AutoTokenizer.from_pretrained(out / "model")
    tokens = tokenizer("naïve text", return_tensors="pt")["input_ids"]
    assert bytes(tokens[0].tolist()) == "naïve text".encode()
    assert tokenizer.decode(tokens[0]) == "naïve text"
    with torch.no_grad():
        assert model(input_ids=tokens).logits.isfinite().all()


def test_run_folder_has_the_last_two_checkpoints(out):
    assert sorted(path.name for path in RunFolder(out).checkpoints.iterdir()) == ["step-00000009", "step-00000012"]


def test_train_prints_plain_lines_and_tables(finished, finished_adamw):
    printed = finished[1].stdout
    assert "\r" not in printed
    assert "\x1b" not in printed
    for line in (
        *("step 1/12", "step 12/12", "route gather: ", "final validation loss", "tokens per second"),
        *(
            "share of the step in",
            "uploaded by one worker per step",
            "received by one worker per step",
            "DDP, computed",
        ),
    ):
        assert line in printed
    assert finished[1].stderr == ""
    assert "uploaded by one worker per step, computed" in finished_adamw[1].stdout


def test_finish_takes_losses_that_are_not_finite(tmp_path, finished, text):
    config = dataclasses.replace(TrainConfig(**read_file(finished[0] / "config.json")), out=str(tmp_path))
    folder = RunFolder(tmp_path)
    rows = [{**row, "loss": None} for row in metrics(finished[0])]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    finish(config, folder, build(config), load_corpus(dataclasses.replace(config, data=[str(text)])))
    assert folder.model.exists()


def _model(out):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(out / "model")


# Progress


def row(step, **more):
    told = {"step": step, "loss": 6.0 / step, "sent_bytes": 9_000, "received_bytes": 9_500, "step_seconds": 0.2}
    return {**told, "optimizer_seconds": 0.03, "exchange_seconds": 0.01, **more}


def test_progress_line_is_about_this_start():
    ticks = iter([0.0])
    config = TrainConfig(steps=800, workers=2, sequence=256, batch=4)
    progress = Progress(config, 100, clock=lambda: next(ticks, 25.0))  # resumed after 100 steps
    for step in range(101, 201):
        progress.add(row(step, **({"val_loss": 1.25} if step == 200 else {})))
    assert progress.line() == (
        "step 200/800  loss 0.030  val 1.250  10,240 tokens/s  9.0 kB up, 9.5 kB down per step  "
        "0:00:25 gone, 0:02:30 left"
    )
    progress.add(row(201, members=3, round=40, waited_seconds=1.25))
    assert progress.line().endswith("round 40, 3 workers, 1.2 s waited")


def test_report_prints_first_last_and_evaluated_steps(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "QUIET_SECONDS", float("inf"))
    config = TrainConfig(steps=9, sequence=4)
    with Report(RunFolder(tmp_path), config, 0, first=True) as shown:
        for step in range(1, 10):
            shown.step(row(step, lr=0.1, tokens=4, payload_bytes=1, **({"val_loss": 2.0} if step == 4 else {})))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/9", "4/9", "9/9"]
    assert len(RunFolder(tmp_path).read_metrics()) == 9


# Trackers


class Fake:
    """A tracker that fails when it is told to."""

    def __init__(self, config, folder, done):
        del folder, done
        self.seen, self.failed = [], None
        print("* welcome")
        if config.out == "asks":
            input("your key? ")

    def log(self, step, figures):
        if step == 2:
            raise OSError("the network is down")
        self.seen.append((step, figures))

    def close(self, failed):
        self.failed = failed
        raise ValueError("late")


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setitem(report.TRACKERS, "wandb", Fake)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (3, "--tracker wandb failed, training goes on without it: OSError: the network is down"),
        (1, "--tracker wandb could not be closed: ValueError: late"),
    ],
)
def test_tracker_that_fails_is_left_out_and_training_goes_on(tmp_path, capsys, steps, told):
    with Report(RunFolder(tmp_path), TrainConfig(tracker="wandb", sequence=4), 0, first=True) as shown:
        tracker = shown._tracker
        for step in range(1, steps + 1):
            shown.step(row(step, loss=3.0))
    printed = capsys.readouterr().out
    assert told in printed.splitlines()
    assert "welcome" not in printed
    assert [step for step, _ in tracker.seen] == [1]
    assert tracker.seen[0][1]["loss"] == 3.0


@pytest.mark.usefixtures("fake")
def test_tracker_that_asks_is_a_mistake_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"^--tracker wandb: EOFError: [^\n]*$"):
        Report(RunFolder(tmp_path), TrainConfig(tracker="wandb", out="asks"), 0, first=True)


def test_missing_tracker_is_named_with_the_command_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"^--tracker wandb is not installed: pip install wandb$"):
        check_settings(TrainConfig(tracker="wandb"))


def test_tensorboard_has_the_metrics(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Report(RunFolder(tmp_path), TrainConfig(tracker="tensorboard", sequence=4), 0, first=True) as shown:
        shown.step(row(1, loss=3.0))
        shown.step(row(2, loss=float("nan")))
        shown.step(row(3, loss=2.0, val_loss=2.5))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {name: [(each.step, each.value) for each in events.Scalars(name)] for name in ("loss", "val_loss")}
    assert found == {"loss": [(1, 3.0), (3, 2.0)], "val_loss": [(3, 2.5)]}


def test_wandb_gets_the_metrics_below_out_without_the_network(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", exc_type=ImportError)
    if not hasattr(wandb, "init"):
        pytest.skip("wandb is not installed")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with Report(RunFolder(tmp_path), TrainConfig(tracker="wandb", sequence=4), 0, first=True) as shown:
        shown.step(row(1, loss=3.0))
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
