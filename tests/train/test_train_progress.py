"""What a run shows while it trains: figures, plain lines, and the dashboard at several widths."""

import io
import re
import sys

import pytest
from rich.console import Console

from demopt.train import dashboard
from demopt.train.config import TrainConfig
from demopt.train.dashboard import STOPPING, Dashboard, Lines, free_terminal, make_view, picture
from demopt.train.folder import RunFolder
from demopt.train.progress import Progress, facts, line

CONFIG = TrainConfig(steps=800, workers=2, sequence=256, batch=4, optimizer="local", out="runs/first")
PARAMETERS = 929_472
SHOW, HIDE = "\x1b[?25h", "\x1b[?25l"


def row(step, **more):
    told = {"step": step, "loss": 6.0 / step, "sent_bytes": 9_000, "received_bytes": 9_500, "step_seconds": 0.2}
    return {**told, "optimizer_seconds": 0.03, "exchange_seconds": 0.01, **more}


@pytest.fixture
def progress():
    """A run after 200 steps, resumed after 100, in 25 seconds."""
    ticks = iter([0.0])
    run = Progress(CONFIG, 100, PARAMETERS, clock=lambda: next(ticks, 25.0))
    for step in range(101, 201):
        run.add(row(step, **({"val_loss": 1.25} if step == 200 else {})))
    return run


def shown(progress, width, **how):
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True)
    console.print(picture(progress, **how))
    return console.export_text()


def test_progress_counts_from_this_start(progress):
    assert (progress.steps, progress.sent, progress.received) == (100, 900_000, 950_000)
    assert progress.elapsed == 25.0
    assert progress.left == pytest.approx(25.0 / 100 * 600)
    assert progress.tokens_a_second == pytest.approx(2 * 4 * 256 / 0.2)


def test_progress_splits_a_step_into_stages(progress):
    assert progress.seconds() == pytest.approx(
        {"step": 0.2, "forward and backward": 0.16, "optimizer": 0.03, "exchange": 0.01}
    )
    progress.add(row(201, exchange_seconds=None))  # DistributedDataParallel exchanges during backward
    assert "exchange" not in progress.seconds()
    assert "(exchange too)" in dict(facts(progress))["seconds"]


def test_line_says_all_in_one_clean_line(progress):
    assert line(progress) == (
        "step 200/800  loss 0.030  val 1.250  10,240 tokens/s  9.0 kB up 9.5 kB down a step  0:00:25 gone 0:02:30 left"
    )


def test_line_and_dashboard_name_members_that_come_and_go(progress):
    progress.add(row(201, members=3, retries=2, lost_seconds=1.25))
    told = "3 members, 2 rounds retried, 1.2 s lost"
    assert line(progress).endswith(told)
    assert dict(facts(progress))["members"] == told


@pytest.mark.parametrize("width", [200, 100, 60, 40])
def test_dashboard_fits_any_width_and_loses_nothing(progress, width):
    text = shown(progress, width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for figure in ("step 200/800", "0:02:30 left", "2 workers",
                   "0.0300 nats a token", "1.2500 nats a token at step 200",
                   "10,240 tokens a second",
                   "0.200 a step: 0.160 forward and backward, 0.030 optimizer, 0.010 exchange",
                   "9.0 kB up, 9.5 kB down a step", "900.0 kB up, 950.0 kB down since the start",
                   "dense gradients: 3.7 MB each way"):  # fmt: skip
        assert figure in words, figure


def test_dashboard_says_that_the_run_is_stopping(progress):
    assert STOPPING not in shown(progress, 100)
    assert STOPPING in shown(progress, 100, stopping=True)


def test_dashboard_takes_losses_that_are_not_finite(progress):
    progress.add(row(201, loss=float("nan"), val_loss=float("inf")))
    assert "nan nats a token" in shown(progress, 80)


def test_dashboard_leaves_a_clean_terminal(tmp_path):
    folder, out = RunFolder(tmp_path), io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, _environ={"TERM": "xterm"})
    view = Dashboard(Progress(CONFIG, 0, PARAMETERS), folder, console)
    view.say("route [gather]")
    assert HIDE not in out.getvalue()
    assert not folder.live.exists()
    view.show(row(1))
    assert folder.live.exists()
    view.show(row(2))
    view.close()
    assert not folder.live.exists()
    assert "route [gather]" in out.getvalue()
    assert out.getvalue().rindex(SHOW) > out.getvalue().rindex(HIDE)
    assert "step 2/800" in out.getvalue()


def test_dashboard_that_never_showed_a_step_closes(tmp_path):
    out = io.StringIO()
    Dashboard(Progress(CONFIG, 0, PARAMETERS), RunFolder(tmp_path), Console(file=out, force_terminal=True)).close()
    assert out.getvalue() == ""


def test_free_terminal_shows_the_cursor_after_a_worker_was_killed(tmp_path, monkeypatch):
    folder, out = RunFolder(tmp_path), io.StringIO()
    monkeypatch.setattr(
        dashboard, "Console", lambda: Console(file=out, force_terminal=True, _environ={"TERM": "xterm"})
    )
    free_terminal(folder)
    assert out.getvalue() == ""
    folder.live.touch()
    free_terminal(folder)
    assert out.getvalue() == "\n" + SHOW
    assert not folder.live.exists()


@pytest.mark.parametrize("forced", [True, False])
def test_make_view_draws_in_terminals_alone(tmp_path, monkeypatch, forced):
    """With FORCE_COLOR, as continuous integration sets it, rich takes a pipe for a terminal."""
    monkeypatch.setenv("TERM", "xterm")
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
    progress = Progress(CONFIG, 0, PARAMETERS)
    assert isinstance(make_view(progress, RunFolder(tmp_path)), Lines)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert isinstance(make_view(progress, RunFolder(tmp_path)), Dashboard)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_view(progress, RunFolder(tmp_path)), Lines)


def test_lines_are_plain_and_not_too_many(capsys):
    view = Lines(Progress(CONFIG, 0, PARAMETERS))
    for step in range(1, 101):
        view.show(row(step, **({"val_loss": 2.0} if step == 100 else {})))
    view.say("route gather")
    view.close()
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "\r" not in told
    first, *others, last, said = told.splitlines()
    assert first.startswith("step 1/800  loss 6.000")
    assert last.startswith("step 100/800  loss 0.060  val 2.000")
    assert len(others) < 50  # one every ten seconds
    assert said == "route gather"
    assert not re.search("DDP", told)
