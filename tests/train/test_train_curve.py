"""The curve of a run, the baseline beside it, and the plot of both."""

import dataclasses
import json
import math

import pytest

from demopt.train import curve as module
from demopt.train.assemble import read_file
from demopt.train.config import InputError, TrainConfig
from demopt.train.curve import STORED, baseline, curve_of, identity, read_curve, unlike, write_curve
from demopt.train.data import load_corpus
from demopt.train.finish import check_outputs, finish
from demopt.train.folder import RunFolder
from demopt.train.model import build, resolve
from demopt.train.plot import draw, plot

CONFIG = resolve(TrainConfig(workers=2, vocab_size=256))
ADAMW = resolve(TrainConfig(workers=2, vocab_size=256, optimizer="adamw"))


def rows(count=100, sent=1000, level=2.0):
    made = [
        {"step": step, "loss": level + 4 / step, "sent_bytes": sent, "step_seconds": 0.5}
        for step in range(1, count + 1)
    ]
    for row in made[count // 4 - 1 :: count // 4]:
        row["val_loss"] = row["loss"] + 0.1
    return made


MINE, THEIRS = (
    curve_of(rows(sent=sent), config, "text", 1.0) for sent, config in ((10**4, CONFIG), (4 * 10**6, ADAMW))
)


def test_curve_round_trips(tmp_path):
    write_curve(MINE, tmp_path / "curve.json")
    assert read_curve(tmp_path / "curve.json") == MINE
    assert (MINE.val_step, MINE.unit, MINE.final) == ([25, 50, 75, 100], "nats a byte", pytest.approx(2.14))


def test_curve_of_a_long_run_is_thinned():
    long = curve_of(rows(2500), CONFIG, "text", None)
    assert len(long.loss) == len(long.step) == 834  # means over three steps
    assert (long.step[0], long.step[-1], long.unit) == (3, 2500, "nats a token")
    assert long.loss[0] == pytest.approx(2 + 4 * (1 + 1 / 2 + 1 / 3) / 3, abs=1e-5)


def test_curve_of_losses_that_are_not_finite(tmp_path):
    bad = curve_of([{**row, "loss": None, "val_loss": None} for row in rows(4)], CONFIG, "text", 1.0)
    write_curve(bad, tmp_path / "curve.json")
    assert math.isnan(read_curve(tmp_path / "curve.json").final)
    plot(bad, None, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"steps": 900}, "steps"), ({"seed": 1}, "seed"), ({"workers": 4}, "workers"), ({"width": 384}, "width"),
        ({"batch": 8}, "batch"), ({"clip": 0.5}, "clip"), ({"val_fraction": 0.1}, "val_fraction"),
        ({"precision": "bfloat16"}, "precision"),
        ({"lr": 0.1}, None), ({"top_k": 9}, None), ({"out": "b"}, None), ({"eval_every": 7}, None),
        ({"beta2": 0.9}, None),
    ],
)  # fmt: skip
def test_unlike_names_what_more_than_the_optimizer_differs(change, told):
    assert unlike(identity(ADAMW), identity(dataclasses.replace(CONFIG, **change))) == told


def test_stored_baseline_is_drawn_for_the_same_settings_and_data_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STORED", tmp_path)
    write_curve(THEIRS, tmp_path / "adamw.json")
    found = baseline(CONFIG, "text")
    assert found == dataclasses.replace(THEIRS, step_seconds=None)  # seconds are of the machine they were taken on
    assert baseline(CONFIG, "another text") is None
    assert baseline(dataclasses.replace(CONFIG, batch=8), "text") is None
    assert baseline(dataclasses.replace(CONFIG, min_workers=1), "text") is None
    assert baseline(ADAMW, "text") is None


def test_stored_baselines_are_of_the_commands_that_their_names_say():
    """Those of `demopt train --optimizer adamw --workers 2` with all its defaults of today."""
    stored = [read_curve(path) for path in sorted(STORED.glob("*.json"))]
    assert stored
    for each in stored:
        assert each.settings == json.loads(json.dumps(identity(ADAMW)))
        assert unlike(each.settings, identity(CONFIG)) is None
        assert each.label == "AdamW with DDP"
        assert len(each.loss) == CONFIG.steps
        assert 1.2 < each.final < 1.6
        assert each.made_with.keys() == {"demopt", "python", "torch"}


def test_named_baseline_is_read_or_refused_in_one_line(tmp_path):
    write_curve(THEIRS, tmp_path / "curve.json")
    config = dataclasses.replace(CONFIG, baseline=str(tmp_path), out=str(tmp_path / "out"))
    assert baseline(config, "text") == THEIRS
    for changed, fingerprint, told in (
        (dataclasses.replace(config, steps=9), "text", "--steps was 800 there and is 9 here"),
        (config, "another text", "was trained on other text or tokens"),
        (dataclasses.replace(config, out=str(tmp_path)), "text", "is this run's own --out"),
        (
            dataclasses.replace(config, baseline=str(tmp_path / "no")),
            "text",
            "wanted the folder of a finished run; .*No such",
        ),
    ):
        with pytest.raises(InputError, match=f"^--baseline .*{told}"):
            baseline(changed, fingerprint)
    whole = json.loads((tmp_path / "curve.json").read_text())
    damaged = [{**whole, "loss": "much"}, {**whole, "step": whole["step"][1:]}, {**whole, "settings": []}, {"loss": []}]
    for content in ("{", "[]", *map(json.dumps, damaged)):
        (tmp_path / "curve.json").write_text(content)
        with pytest.raises(InputError, match="wanted the folder of a finished run"):
            baseline(config, "text")


def test_plot_has_units_on_every_axis_and_the_baseline_where_it_is_comparable():
    figure = draw(MINE, dataclasses.replace(THEIRS, step_seconds=None))
    steps, megabytes, seconds = figure.axes
    assert steps.get_ylabel() == "loss, nats a byte"
    labels = [axes.get_xlabel() for axes in figure.axes]
    assert labels == ["optimizer steps", "uploaded by one worker, MB", "time in training steps, seconds"]
    assert [len(axes.lines) for axes in figure.axes] == [4, 4, 2]
    assert (steps.get_xscale(), megabytes.get_xscale(), seconds.get_xscale()) == ("linear", "log", "linear")
    assert megabytes.lines[-1].get_xdata()[-1] == pytest.approx(100 * 10**4 / 1e6)
    names = [text.get_text() for text in steps.get_legend().get_texts()]
    assert [name.partition(":")[0] for name in names] == ["AdamW with DDP", "local steps"]
    assert "2.140 at the end" in names[1]
    assert steps.get_ylim()[1] < 4  # the first steps do not squeeze the rest


def test_plot_of_one_worker_has_no_panel_for_bytes():
    figure = draw(curve_of(rows(sent=0), CONFIG, "text", 1.0), None)
    assert len(figure.axes) == 2


def test_finished_run_is_a_baseline_for_another(finished, text, tmp_path, capsys):
    """Its validation loss is in the table, its losses in the plot."""
    config = dataclasses.replace(TrainConfig(**read_file(finished[0] / "config.json")), out=str(tmp_path))
    config = dataclasses.replace(config, baseline=str(finished[0]), optimizer="adamw", sample_tokens=0)
    corpus = load_corpus(dataclasses.replace(config, data=(str(text),)))
    check_outputs(config, corpus)
    RunFolder(tmp_path).metrics.write_bytes(RunFolder(finished[0]).metrics.read_bytes())
    finish(config, RunFolder(tmp_path), build(config), corpus)
    told = capsys.readouterr().out
    assert "DeMo, measured in another run" in told
    assert f"{read_curve(RunFolder(finished[0]).curve).final:.4f}" in told
    gone = dataclasses.replace(config, baseline=str(tmp_path / "gone"))  # while the run trained
    finish(gone, RunFolder(tmp_path), build(config), corpus)
    assert "wanted the folder of a finished run" in capsys.readouterr().out
    with pytest.raises(InputError, match="--steps was 12 there and is 3 here"):
        check_outputs(dataclasses.replace(config, steps=3), corpus)
