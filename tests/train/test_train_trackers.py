"""Trackers: chosen, missing, failing, and what each library that is installed here has written."""

import importlib.util
import json
import sqlite3
import struct
import subprocess
import sys

import pytest

from demopt.train import elastic, trackers
from demopt.train.config import TRACKERS, InputError, TrainConfig
from demopt.train.folder import RunFolder
from demopt.train.model import resolve
from demopt.train.trackers import KINDS, Tracker, Trackers, refuse_missing

ROWS = [
    {"step": 1, "loss": 3.0, "sent_bytes": 100, "exchange_seconds": None},
    {"step": 2, "loss": None, "sent_bytes": 50, "exchange_seconds": 0.5},  # a loss that was not finite
    {"step": 3, "loss": 2.0, "sent_bytes": 50, "exchange_seconds": 0.5, "val_loss": 2.5},
]
# In a process of its own, as in a run: these libraries set up logging, services and hooks.
WRITE = """
import json, sys
from pathlib import Path
from demopt.train.config import TrainConfig
from demopt.train.folder import RunFolder
from demopt.train.model import resolve
from demopt.train.trackers import Trackers
name, out, rows = sys.argv[1:]
config = resolve(TrainConfig(tracker=(name,), out=out, data=("here", "there"), lr=0.25))
opened = Trackers(config, RunFolder(Path(out)), 0, print)
for row in json.loads(rows):
    opened.log(row)
opened.close(failed=False)
"""


def test_every_tracker_of_the_flag_has_a_kind():
    assert tuple(KINDS) == TRACKERS


def test_refuse_missing_names_the_command_to_install(tmp_path, monkeypatch):
    (tmp_path / "tracker_of_no_one").mkdir()  # a folder is importable too, as a namespace
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("tracker_of_no_one", "tracker_not_there"):
        with pytest.raises(InputError) as told:
            refuse_missing([name])
        assert str(told.value) == f"--tracker {name}: {name} is missing; install it with: pip install {name}"


def test_trackers_import_nothing_that_was_not_chosen(tmp_path):
    program = (
        "import sys\nfrom demopt.train import trackers, report\n"
        f"found = {set(TRACKERS)!r} & set(sys.modules)\nassert not found, found"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


class Fake(Tracker):
    """Fails when it is told to."""

    def __init__(self, config, folder, done):
        del folder, done
        self.seen, self.failed = [], None
        print("* welcome")
        if config.out == "asks":
            input("your key? ")
        if config.out == "bad":
            raise RuntimeError("no\nserver")

    def log(self, step, figures):
        if step == 2:
            raise OSError("the network is down")
        self.seen.append((step, figures))

    def close(self, failed):
        self.failed = failed
        raise ValueError("late")


def test_trackers_that_fail_are_left_out_and_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "refuse_missing", lambda _: None)
    monkeypatch.setitem(KINDS, "wandb", Fake)
    told = []
    opened = Trackers(TrainConfig(tracker=("wandb", "wandb")), RunFolder(tmp_path), 0, told.append)
    fake = opened._open["wandb"]
    for row in ROWS:
        opened.log(row)
    opened.close(failed=True)
    assert fake.seen == [(1, {"loss": 3.0, "sent_bytes": 100.0})]
    assert told == ["--tracker wandb failed, training goes on without it: OSError: the network is down"]
    assert fake.failed is None


def test_trackers_that_cannot_be_closed_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "refuse_missing", lambda _: None)
    monkeypatch.setitem(KINDS, "wandb", Fake)
    told = []
    opened = Trackers(TrainConfig(tracker="wandb"), RunFolder(tmp_path), 0, told.append)
    fake = opened._open["wandb"]
    opened.close(failed=True)
    assert fake.failed is True
    assert told == ["--tracker wandb could not be closed: ValueError: late"]


def test_trackers_that_cannot_start_are_a_mistake_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "refuse_missing", lambda _: None)
    monkeypatch.setitem(KINDS, "mlflow", Fake)
    with pytest.raises(InputError, match=r"^--tracker mlflow: RuntimeError: no server$"):
        Trackers(TrainConfig(tracker="mlflow", out="bad"), RunFolder(tmp_path), 0, print)


@pytest.fixture(params=TRACKERS)
def written(request, tmp_path, monkeypatch):
    """The name of a tracker and the folder in which it has seen three steps."""
    spec = importlib.util.find_spec(request.param)
    if spec is None or spec.origin is None:
        pytest.skip(f"{request.param} is not installed")
    for name in ("WANDB_MODE", "WANDB_DIR", "MLFLOW_TRACKING_URI", "TRACKIO_DIR"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-c", WRITE, request.param, str(tmp_path / "run"), json.dumps(ROWS)]
    (tmp_path / "run").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # nothing beside --out
    return request.param, RunFolder(tmp_path / "run")


def test_tracker_has_written_the_figures_offline(written):
    name, folder = written
    assert READERS[name](folder) == {"loss": [(1, 3.0), (3, 2.0)], "val_loss": [(3, 2.5)]}


def _tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder.tracked("tensorboard")))
    events.Reload()
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in ("loss", "val_loss")}


def _wandb(folder):
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.tracked("wandb").glob("offline-run-*/*.wandb")
    found = {"loss": [], "val_loss": []}
    for data in _leveldb(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        values = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
        for name in found.keys() & values.keys():
            found[name].append((values["_step"], values[name]))
    return found


def _leveldb(content):
    """The records of a log in LevelDB's format: parts behind a checksum, a length and a kind, in blocks of 32 KiB."""
    at, record = 7, b""  # after the file's own header
    while at + 7 <= len(content):
        if at % 32768 > 32768 - 7:
            at += -at % 32768
            continue
        size, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def _rows(file, query):
    with sqlite3.connect(file) as database:
        return database.execute(query).fetchall()


def _mlflow(folder):
    found = _rows(folder.tracked("mlflow") / "mlflow.db", "select key, step, value from metrics order by step")
    assert ("FINISHED",) in _rows(folder.tracked("mlflow") / "mlflow.db", "select status from runs")
    return {name: [(step, value) for key, step, value in found if key == name] for name in ("loss", "val_loss")}


def _trackio(folder):
    (file,) = folder.tracked("trackio").glob("*.db")
    rows = [(step, json.loads(text)) for step, text in _rows(file, "select step, metrics from metrics order by step")]
    return {name: [(step, found[name]) for step, found in rows if name in found] for name in ("loss", "val_loss")}


READERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}


def test_tracker_names_are_settings_of_a_config_file():
    assert resolve(TrainConfig(tracker=["wandb", "mlflow"])).tracker == ("wandb", "mlflow")
    with pytest.raises(InputError, match="--tracker is 'aim', wanted one of tensorboard, wandb, mlflow, trackio"):
        TrainConfig(tracker=("wandb", "aim"))


def test_join_leaves_trackers_and_uploads_to_the_machine_that_asked_for_them(tmp_path, monkeypatch):
    asked = TrainConfig(tracker=("wandb",), baseline="there", push_to_hub="me/model", online=True)
    monkeypatch.setattr(elastic.lighthouse, "need_torchft", lambda: None)
    monkeypatch.setattr(elastic.lighthouse, "settings_of", lambda _: asked.record())
    seen = []
    monkeypatch.setattr(elastic, "train_elastic", lambda config: seen.append(config) or 0)
    assert elastic.join("host:1", {"out": str(tmp_path)}) == 0
    assert (seen[0].tracker, seen[0].baseline, seen[0].push_to_hub) == ((), "", "")


def test_trackers_neither_print_nor_ask(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "refuse_missing", lambda _: None)
    monkeypatch.setitem(KINDS, "wandb", Fake)
    with pytest.raises(InputError, match="--tracker wandb: EOFError"):
        Trackers(TrainConfig(tracker="wandb", out="asks"), RunFolder(tmp_path), 0, print)
    Trackers(TrainConfig(tracker="wandb"), RunFolder(tmp_path), 0, print)
    assert capsys.readouterr().out == ""
