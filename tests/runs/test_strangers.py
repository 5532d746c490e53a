"""A run that a stranger has edited: status, join, train and replay take from it only what they must."""

import json
import math
import shutil
import struct
import sysconfig
from datetime import datetime, timedelta, timezone
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import forked
import problems
from demopt.errors import ExchangeError
from demopt.runs import log
from demopt.runs.disk import Disk
from demopt.train.config import InputError, TrainConfig
from demopt.train.runs.status import NUMBERS, numbers_of
from demopt.train.runs.worker import settings_to_join

FLAGS = f"{forked.TINY} --steps 20 --sync-every 5 --late 1 --checkpoint-every 2 --keep-log"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31mx"


@pytest.fixture(scope="module")
def text():
    return str(Path(sysconfig.get_path("stdlib"), "textwrap.py"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    place = tmp_path_factory.mktemp("finished")
    forked.demopt("train", "--run", place / "run", "--out", place / "out", "--data", text, *FLAGS.split())
    return place / "run"


def test_joining_worker_takes_the_threads_of_openmp(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", (asked := []).append)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for number, words in enumerate(((), ("--threads", 3))):
        forked.demopt("join", finished, "--out", tmp_path / str(number), *words)
    assert asked == [3]


@pytest.fixture
def edited(finished, tmp_path):
    """edited(name, change): a copy of the run in which an object's JSON was changed."""

    def edit(name, change):
        run = Path(shutil.copytree(finished, tmp_path / "run"))
        place = run / name
        place.chmod(0o644)
        found = json.loads(place.read_text())
        change(found)
        place.write_text(json.dumps(found))
        return run

    return edit


MANIFEST = "rounds/00000003/manifest"
EDITS = {
    "escapes": (MANIFEST, lambda m: m.update(refused={"w": ESCAPES, ESCAPES: "r"}, at=ESCAPES)),
    "loss is text": (MANIFEST, lambda m: m["senders"][0].update(note={"loss": "boom", "sequences": "boom"})),
    "loss has 400 digits": (MANIFEST, lambda m: m["senders"][0].update(note={"loss": 10**400})),
    "note is a list": (MANIFEST, lambda m: m["senders"][0].update(note=[1])),
    "no senders": (MANIFEST, lambda m: m.update(senders=[])),
    "steps is text": ("run", lambda r: r["settings"].update(steps="x", sync_every="x")),
    "dtype": ("run", lambda r: r["groups"][0].update(parameters=[[[4], "load"]])),
    "4 TB": ("run", lambda r: r["groups"][0].update(parameters=[[[1 << 40], "float32"]])),
    "no parameters": ("run", lambda r: r["groups"][0].pop("parameters")),
    "settings": ("run", lambda r: r["groups"][0].update(top_k="x", chunk=[])),
    "chunk": ("run", lambda r: r["groups"][0].update(parameters=[[[60_000, 1], "float32"]], chunk=60_000)),
    "chunks": ("run", lambda r: r["groups"][0].update(parameters=[[[n], "float32"] for n in range(1000)], chunk=1000)),
    "marks": ("run", lambda r: r["groups"][0].update(marks=5, param_names=None)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_security_status_and_replay_of_a_strangers_run_end_in_words(edit, edited, monkeypatch):
    """No traceback, no control character on the terminal, no interpreted markup."""
    monkeypatch.setattr("demopt.runs.store._DAMAGED", 0.0)  # seconds of reading it again
    run = edited(*EDITS[edit])
    for command in ("status", "replay"):
        done = forked.demopt(command, run, codes=(0, 1, 2))
        said = done.stdout + done.stderr
        assert "Traceback" not in said
        assert said.replace("\n", "").isprintable(), repr(said)
        assert done.stderr.count("\n") <= 1
    assert ("its chunks have 999" in said, "sides, of up to 60,000" in said) == (edit == "chunks", edit == "chunk")


def test_status_measures_no_time_between_two_clocks(edited, command):
    run = edited(MANIFEST, lambda manifest: manifest.update(author="w-2", at="2999-01-01T00:00:00+00:00"))
    found = json.loads(command("status", run, "--json"))
    assert found["round"] == 4
    assert found["seconds_per_round"] is found["seconds_ago"] is None


@pytest.mark.parametrize("hours", [0, 5])
def test_status_says_by_whose_clock_a_round_is_long_ago(hours, edited, command):
    at = (datetime.now(timezone.utc) - timedelta(hours=hours)).isoformat()
    run = edited(MANIFEST, lambda manifest: manifest.update(author="w-2", at=at))
    told = command("status", run)
    assert ("last round 5 h 0 min ago by the clock of w-2" in told, "clock" in told) == (hours == 5, hours == 5)


OF_A_MACHINE = {
    "overwrite": True, "resume_auto": True, "tracker": "wandb", "compile": True, "timeout": 1.0, "workers": 7,
    "threads": 99, "device": "cuda", "out": "/elsewhere", "run": "/elsewhere", "key_file": "/elsewhere",
    "save_every": 1, "late": 1e9, "merge": True,
}  # fmt: skip


def test_security_joining_takes_only_shared_settings_of_a_run(edited, text, tmp_path):
    run = edited("run", lambda record: record["settings"].update(OF_A_MACHINE, lr=0.123))
    config, _ = settings_to_join(str(run), None, {"out": str(tmp_path / "mine"), "data": [text]})
    assert config.lr == 0.123, "which all workers share"
    own = {"out": str(tmp_path / "mine"), "run": str(run)}
    for name in OF_A_MACHINE:
        assert getattr(config, name) == own.get(name, getattr(TrainConfig(), name)), name


def test_security_joining_deletes_nothing(edited, text, tmp_path, command):
    run, mine = edited("run", lambda record: record["settings"].update(overwrite=True)), tmp_path / "mine"
    files = [mine / name for name in ("model/weights.bin", "checkpoints/mine", "wandb/x")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("precious")
    (mine / "config.json").write_text(json.dumps({"optimizer": "local", "run": str(run)}))
    command("join", run, "--out", mine, "--data", text, "--threads", "1")
    assert {file.read_text() for file in files} == {"precious"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"width": 80_000, "heads": 2}, "does not fit: memory about"),
        ({"tokenizer": "CODE"}, "not a tokenizer"),
        ({"data": 7}, "--data is 7"),
        ({"data": ["x" * 300]}, "File name too long"),
        ({"data": ["\udcff"]}, r"--data is '\udcff': not utf-8"),
        ({"tokenizer": "s3://\0"}, "--tokenizer is 's3://"),
        ({"text": 7}, "the text or tokenizer here is not that of the run"),
        ({"steps": "many"}, "--steps is 'many'"),
    ],
    ids=str,
)
def test_security_joining_strangers_runs_no_code_and_ends_in_one_line(change, says, edited, text, tmp_path, command):
    """CODE: a folder whose tokenizer is a program."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["x.X", None]}}))
    (code / "config.json").write_text("{}")
    (code / "x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass X: pass\n")
    change = {name: str(code) if value == "CODE" else value for name, value in change.items()}
    run = edited("run", lambda record: record["settings"].update(change))
    given = () if "data" in change else ("--data", text)
    assert says in command("join", run, "--out", tmp_path / "mine", *given, code=2)
    assert not (tmp_path / "ran").exists()


def test_the_same_command_goes_on_after_an_error_and_nothing_is_lost(tmp_path, text, command):
    """The store fails once this worker's message is there; the round is decided without it before the store is back."""
    words = ("train", "--run", tmp_path / "run", "--out", tmp_path / "out", "--data", text, *FLAGS.split())
    propose = log.propose

    def fails(store, manifest):
        if manifest.round == 2:
            raise ExchangeError("the store did not answer for 600 s")
        return propose(store, manifest)

    with patch.object(log, "propose", fails):
        assert "did not answer for 600 s" in command(*words, code=1)
    assert (tmp_path / "out" / "state.pt").exists()
    store = Disk(tmp_path / "run")
    assert log.look(store, 2).messages
    identity = log.read_record(store).identity
    before = log.read_manifest(store, identity, 1)
    assert log.propose(store, log.Manifest(identity, 2, "another", [], {}, {}, {}, before.digest))
    with patch("demopt.train.runs.worker.Report", side_effect=InputError("--tracker wandb: no login")):
        assert "no login" in command(*words, code=2)  # it joins, and cannot begin
    told = command(*words)
    assert "with the state that it left" in told
    assert command("replay", tmp_path / "run").endswith(told.rpartition("sha256 ")[2])
    manifests = [json.loads(path.read_text()) for path in (tmp_path / "run").glob("rounds/*/manifest")]
    assert sum(sender["note"]["sequences"] for manifest in manifests for sender in manifest["senders"]) == 20 * 2


def test_worker_whose_round_in_flight_was_the_last_that_others_waited_for_adds_none(tmp_path, text, command):
    propose = log.propose

    def late(store, manifest):
        if manifest.round == 2:
            before = log.read_manifest(store, manifest.run, 1)
            for number in (2, 3):
                others = log.Manifest(manifest.run, number, "another", [], {}, {}, {}, log.digest_of(before))
                before = propose(store, others)
        return propose(store, manifest)

    words = ("train", "--run", tmp_path / "run", "--out", tmp_path / "out", "--data", text, *FLAGS.split())
    with patch.object(log, "propose", late):
        command(*words, "--delay", 1)
    assert json.loads(command("status", tmp_path / "run", "--json"))["round"] == 4


HALVES = problems.saved({"drawn": 0, "optimizer": torch.full((100,), 0.5)})
CHANGED = HALVES.replace(struct.pack("f", 0.5), struct.pack("f", 0.25), 1)
OF_NOTHING = [problems.saved({"drawn": 0, "optimizer": each}) for each in ({}, {"state": {}, "param_groups": []})]


@pytest.mark.parametrize("content", [b"", b"PK\3\4damaged", b"\x80\x02c__builtin__\nexec\n.", *OF_NOTHING, CHANGED])
def test_state_that_cannot_be_read_is_told_in_one_line(content, finished, tmp_path, command):
    mine = tmp_path / "mine"
    command("join", finished, "--out", mine)
    (mine / "state.pt").write_bytes(content)
    told = command("join", finished, "--out", mine, code=2)
    assert "state.pt cannot be read" in told
    assert ("in it is damaged" in told) == (content == CHANGED)
    (mine / "state.pt").unlink()
    (mine / "identity").write_bytes(b"\xff")
    assert "holds another run than" in command("join", finished, "--out", mine, code=2)
    config = json.loads((mine / "config.json").read_text())
    (mine / "config.json").write_text(json.dumps({**config, "run": ""}))  # of a training without a folder
    assert "holds another run than" in command("join", finished, "--out", mine, code=2)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*NUMBERS, "x"]), inner),
)


@given(ANYTHING)
def test_numbers_of_a_note_are_finite_and_in_range_whatever_it_is(note):
    for name, value in numbers_of(note).items():
        assert type(value) in (int, float)
        assert math.isfinite(value)
        assert 0 <= value <= NUMBERS[name]
