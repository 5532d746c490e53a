"""What a run shows and leaves: metrics, model, table, tracker; lines on a pipe, a bar on a terminal, a picture."""

import io
import re
import subprocess
import sys
import types
from unittest.mock import MagicMock, Mock
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from rich.filesize import decimal
from train_runs import STEPS, metrics

import forked
from demopt.exchange.interface import all_reduce_bytes
from demopt.train import report, screen
from demopt.train.config import InputError, TrainConfig, read_file
from demopt.train.method import check_settings
from demopt.train.out import OutFolder
from demopt.train.report import Report
from demopt.train.screen import LINE, Screen, fitting

CONFIG = TrainConfig(steps=800, workers=2, sequence=256, batch=4)
FIELDS = {"step", "loss", "lr", "tokens", "payload_bytes", "sent_bytes", "received_bytes", "step_seconds"}
# the steps that apply a round: the last one is short, and with delay each third step is saved, which applies the round
ROUNDS = {"local": [5, 10, 12], "delay": [3, 6, 9, 12]}


def row_of(step, **more):
    told = {"step": step, "loss": 6.0 / step, "sent_bytes": 9_000, "received_bytes": 9_500, "payload_bytes": 9_000}
    return {**told, "step_seconds": 0.2, **more}


@pytest.mark.parametrize("case", ["demo", "adamw", "local", "delay"])
def test_whole_run_leaves_a_line_per_step_and_its_last_two_checkpoints(runs, case):
    out, printed = runs(case)
    rows, peak = metrics(out), TrainConfig(**read_file(out / "config.json")).lr
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row.keys() >= FIELDS and ("val_loss" in row) == (row["step"] % 4 == 0) for row in rows)
    assert rows[-1]["tokens"] == STEPS * 2 * 2 * 32 * (2 if case == "adamw" else 1)
    assert rows[-1]["val_loss"] < rows[3]["val_loss"]
    assert [row["lr"] for row in rows[:3]] == pytest.approx([peak / 3, 2 * peak / 3, peak])
    assert rows[-1]["lr"] == pytest.approx(peak / 10)
    assert sorted(path.name for path in OutFolder(out).checkpoints.iterdir()) == ["step-00000009", "step-00000012"]
    assert (printed.stderr, {"\r", "\x1b"} & {*printed.stdout}) == ("", set())
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


def test_wandb_gets_the_metrics_below_out_and_training_goes_on_without_it(tmp_path, capsys, monkeypatch):
    wandb = MagicMock()
    log = wandb.init.return_value.__enter__.return_value.log = Mock(side_effect=[None, OSError("the network is down")])
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for name in ("WANDB_MODE", "WANDB_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with Report(OutFolder(tmp_path), TrainConfig(tracker="wandb", sequence=4), 0, first=True) as shown:
        for step in (1, 2, 3):
            shown.step(row_of(step))
    assert wandb.init.call_args.kwargs["config"]["sequence"] == 4
    assert [(call.kwargs["step"], call.args[0]["loss"]) for call in log.call_args_list] == [(1, 6.0), (2, 3.0)]
    told = "--tracker failed, training goes on without it: OSError: the network is down"
    assert told in capsys.readouterr().out.splitlines()
    assert (report.os.environ["WANDB_MODE"], report.os.environ["WANDB_DIR"]) == ("offline", str(tmp_path))


def test_speed_is_that_of_the_rows_also_where_the_first_ones_are_lost(capsys):
    rows = [row_of(step, tokens=64 * step, step_seconds=0.5) for step in range(101, 121)]
    report.print_table(rows, TrainConfig(sequence=4), 1000, None)
    assert re.search(r"tokens per second\s+│\s+128\s", capsys.readouterr().out)


def test_missing_tracker_is_named_with_the_command_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"^--tracker wandb is not installed: pip install wandb$"):
        check_settings(TrainConfig(tracker="wandb"))


def test_tensorboard_has_the_metrics(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Report(OutFolder(tmp_path), TrainConfig(tracker="tensorboard", sequence=4), 0, first=True) as shown:
        for row in (row_of(1, loss=3.0), row_of(2, loss=float("nan")), row_of(3, loss=2.0, val_loss=2.5)):
            shown.step(row)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {name: [(each.step, each.value) for each in events.Scalars(name)] for name in ("loss", "val_loss")}
    assert found == {"loss": [(1, 3.0), (3, 2.0)], "val_loss": [(3, 2.5)]}


@pytest.mark.parametrize(("where", "code"), [("> /dev/full", 1), (">&-", 0), ("| true", 0), ("2>&- >&-", 0)])
def test_output_that_cannot_be_written_is_told_and_no_reader_is_no_mistake(where, code):
    script = f"set -o pipefail; {sys.executable} -m demopt.cli --version {where}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stderr == code * "demopt: stdout cannot be written: No space left on device\n"
    assert (done.returncode, done.stdout) == (code, "")


@pytest.mark.parametrize("size", ["0", "x", "9" * 20])
def test_size_of_a_terminal_that_is_none_is_ignored(size, monkeypatch):
    usual = forked.demopt("--help").stdout
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
        monkeypatch.setenv(name, size)
    assert forked.demopt("--help").stdout == usual


@pytest.fixture
def clock(monkeypatch):
    """The time, which a test sets."""
    made = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(screen, "time", types.SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture
def terminal(monkeypatch):
    """terminal(width, **environment): a screen on a terminal, and what was written there."""

    def made(width, **environment):
        out, real = io.StringIO(), Console
        environment = {"TERM": "xterm-256color", **environment}
        given = {"file": out, "force_terminal": True, "width": width, "_environ": environment}
        monkeypatch.setattr(screen, "Console", lambda **how: real(**given, **how))
        return Screen(CONFIG, 0), out

    return made


def test_pipe_gets_a_line_per_ten_seconds_and_of_first_last_and_evaluated_steps(capsys, clock):
    with Screen(CONFIG, 100) as shown:  # resumed after 100 steps
        for step in range(101, 401):
            clock.now += 0.5
            shown.step(row_of(step, **({"val_loss": 1.25} if step == 150 else {})))
        shown.step(row_of(800, workers=3, round=40, waited_seconds=1.25))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 101/800  loss 0.059  10,240 tok/s  9.5 kB/step"
    assert "step 150/800  loss 0.040  val 1.250  5 min left  10,240 tok/s  9.5 kB/step" in lines
    assert len(lines) == 2 + 15  # in 150 seconds; step 150's is one of these
    assert lines[-1].endswith("kB/step  3 workers  round 40")
    assert not any("left" in line for line in lines if int(line.split()[1].partition("/")[0]) < 110)


@pytest.mark.parametrize(("batch", "told"), [({"workers": 2}, "15,360"), ({"global_batch": 16}, "20,480")])
def test_first_step_of_a_folder_has_the_speed_of_all_workers_and_no_traffic(batch, told, capsys, clock):
    with Screen(TrainConfig(steps=800, sequence=256, **batch), 0) as shown:
        shown.step(row_of(1, sent_bytes=0, received_bytes=0, workers=3))  # without a round
    assert capsys.readouterr().out == f"step 1/800  loss 6.000  {told} tok/s  3 workers\n"


def test_speed_is_that_of_the_workers_of_each_step(capsys, clock):
    with Screen(TrainConfig(steps=20, sequence=256, batch=4), 0) as shown:
        for step in range(1, 21):
            shown.step(row_of(step, workers=1 if step < 16 else 5))
    assert f"  {(15 * 1024 + 5 * 5120) / 4:,.0f} tok/s  " in capsys.readouterr().out.splitlines()[-1]


def test_line_has_at_most_79_letters_whatever_the_numbers_are():
    fields = ["step 123456/1000000", "loss 12.345", "val 12.345", "12 d 23 h left", "999,999 tok/s", "999.9 MB/step"]
    assert len(fitting([*fields, "1024 workers", "round 123456"], LINE)) <= LINE


@pytest.mark.parametrize("width", [30, 50, 80, 120])
def test_bar_fits_the_terminal(width, terminal, clock):
    shown, out = terminal(width)
    with shown:
        for step in range(1, 31):
            clock.now += 1.0
            shown.step(row_of(step))
    states = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()))
    assert max(map(len, states)) <= width
    last = [state for state in states if "step 30/800" in state][-1]
    assert ("━" in last) == (width > 39)
    assert ("tok/s" in last) == (width >= 80)
    assert ("min left" in last) == (width >= 50)


def test_no_color_and_dumb_terminals_are_honoured(terminal, clock):
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        shown, out = terminal(80, **environment)
        with shown:
            shown.step(row_of(1))
        assert "\x1b[3" not in out.getvalue().replace("\x1b[?25", "")  # no colours
        assert ("\x1b" in out.getvalue()) == ("NO_COLOR" in environment)


def test_the_picture_shows_all_curves_and_survives_runs_without_losses():
    rows = [row_of(step, **({"val_loss": 3.0} if not step % 100 else {})) for step in range(1, 1001)]
    rows[5]["loss"] = None
    tree = ElementTree.fromstring(report.svg(rows, "a < b"))
    lines = [each for each in tree if each.tag.endswith("polyline")]
    assert [len(line.get("points").split()) for line in lines] == [333, 10, 334, 334]
    assert "1000 rounds" in "".join(tree.itertext())
    frames, colors = [each for each in tree if each.tag.endswith("rect")], {line.get("stroke") for line in lines}
    names = [each for each in tree if colors & {part.get("fill") for part in each.iter()}]
    assert all(float(name.get("y")) < float(frame.get("y")) for name, frame in zip(names, frames, strict=True))
    for few in ([row_of(1, loss=None)], [row_of(1)]):
        ElementTree.fromstring(report.svg(few, "few"))
