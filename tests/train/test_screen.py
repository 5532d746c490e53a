"""What a person sees of a run: lines on a pipe, a bar on a terminal, a chart and a picture at the end."""

import io
import re
import types
from xml.etree import ElementTree

import pytest
from rich.console import Console

from demopt.train import picture, screen
from demopt.train.config import TrainConfig
from demopt.train.screen import LINE, Screen, fitting

CONFIG = TrainConfig(steps=800, workers=2, sequence=256, batch=4)


def row(step, **more):
    told = {"step": step, "loss": 6.0 / step, "sent_bytes": 9_000, "received_bytes": 9_500, "payload_bytes": 9_000}
    return {**told, "step_seconds": 0.2, **more}


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
            shown.step(row(step, **({"val_loss": 1.25} if step == 150 else {})))
        shown.step(row(800, members=3, round=40, waited_seconds=1.25))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 101/800  loss 0.059  10k tok/s  9.5 kB/step"
    assert "step 150/800  loss 0.040  val 1.250  5 min left  10k tok/s  9.5 kB/step" in lines
    assert len(lines) == 2 + 15  # 150 seconds, one of them in step 150
    assert lines[-1].endswith("kB/step  3 workers  round 40")
    assert not any("left" in line for line in lines if int(line.split()[1].partition("/")[0]) < 110)


def test_line_has_at_most_79_letters_whatever_the_numbers_are():
    fields = ["step 123456/1000000", "loss 12.345", "val 12.345", "12 d 23 h left", "999k tok/s", "999.9 MB/step"]
    assert len(fitting([*fields, "1024 workers", "round 123456"], LINE)) <= LINE


def test_traffic_is_left_out_before_the_first_exchange(capsys, clock):
    with Screen(CONFIG, 0) as shown:
        shown.step(row(1, sent_bytes=0, received_bytes=0))
    assert capsys.readouterr().out == "step 1/800  loss 6.000  10k tok/s\n"


@pytest.mark.parametrize("width", [30, 50, 80, 120])
def test_bar_fits_the_terminal(width, terminal, clock):
    shown, out = terminal(width)
    with shown:
        for step in range(1, 31):
            clock.now += 1.0
            shown.step(row(step))
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
            shown.step(row(1))
        colors = "\x1b[3" in out.getvalue().replace("\x1b[?25", "")
        assert not colors
        assert ("\x1b" in out.getvalue()) == ("NO_COLOR" in environment)


def test_pictures_show_all_curves_and_survive_runs_without_losses(tmp_path):
    rows = [row(step, **({"val_loss": 3.0} if not step % 100 else {})) for step in range(1, 1001)]
    rows[5]["loss"] = None
    tree = ElementTree.fromstring(picture.svg(rows, "a < b"))
    lines = [each for each in tree if each.tag.endswith("polyline")]
    assert [len(line.get("points").split()) for line in lines] == [333, 10, 334, 334]
    assert "1000 rounds" in "".join(tree.itertext())
    chart = picture.letters(rows, 40).splitlines()
    assert len(chart) == 6
    assert max(map(len, chart)) <= 49
    assert chart[0].split()[0] > chart[4].split()[0]
    for few in ([], [row(1, loss=None)], [row(1)]):
        ElementTree.fromstring(picture.svg(few, "few"))
        assert picture.letters(few) == ""
