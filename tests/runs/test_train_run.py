"""Real processes train through a folder: they join, are killed, leave, stop and go on, and replay agrees."""

import dataclasses
import importlib
import json
import os
import re
import resource
import shutil
import signal
import statistics
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import servers
from test_reading import lost
from workers import Worker, at_first

import forked
import models
from demopt.errors import ExchangeError
from demopt.output import open_outlets
from demopt.runs import log
from demopt.runs.key import Keyed, read_key
from demopt.runs.stop import STOP
from demopt.runs.store import open_store
from demopt.train.config import InputError, TrainConfig
from demopt.train.runs import worker
from demopt.train.runs.command import open_run, status
from forked import LIMIT, wait_for

SMALL = f"{forked.TINY} --warmup 3 --checkpoint-every 4 --keep-log --late 1".split()
GONE, ENDS = "a member is gone", 2


def _command(words, output, allowed, environment, end):
    """The command `demopt WORDS` in a process of its own. A round begins when the test allows it.

    Rounds wait for all members, however slow the machine is, until the test says that a member is gone. `end`: how the
    process ends, in round `ENDS` or while it reads its text.
    """
    from demopt import cli
    from demopt.runs.exchange import FolderExchange
    from demopt.train.runs import worker
    from demopt.train.runs.command import stop

    exchange_round, put = FolderExchange.exchange_round, FolderExchange.put

    def held(self, wiring, header, *rest):
        while not any(int(path.name) >= header.round_number for path in Path(allowed).glob("[0-9]*")):
            time.sleep(0.005)
        self.late = 1.0 if Path(allowed, GONE).exists() else LIMIT
        outcome = exchange_round(self, wiring, header, *rest)
        if end == "killed at the manifest" and header.round_number == ENDS:
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "failed by a drift" and header.round_number == ENDS:
            self._replicator.parameters[0].data.add_(1.0)
            return dataclasses.replace(outcome, ended="drifted")
        return outcome

    def last(self, mine):
        placed = put(self, mine)
        if mine.round == ENDS and end == "killed at the message":
            os.kill(os.getpid(), signal.SIGKILL)
        if mine.round == ENDS and end == "failed at the message":
            raise ExchangeError("the store did not answer")
        return placed

    FolderExchange.exchange_round, FolderExchange.put = held, last

    numbered, load = worker.numbered, worker.load_corpus

    def loaded(config):
        if end == "stopped as it reads its text":
            stop(config.run)
            while not Path(allowed, GONE).exists():
                time.sleep(0.005)
        if end == "a file stop as it reads its text":
            Path(config.out, "stop").touch()
        return load(config)

    worker.load_corpus = loaded

    def noted(tokens, config, numbers):
        with Path(f"{output}.read").open("a") as file:
            file.write("".join(f"{number}\n" for number in numbers))
        return numbered(tokens, config, numbers)

    worker.numbered = noted
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    sys.argv = ["demopt", *words]
    cli.main()


class Machines:
    """Processes of one run, whose rounds begin when `allow` says so."""

    def __init__(self, place, command):
        self.command = command
        self.place, self.run = place, str(place / "run")
        self.allowed, self.started = place / "allowed", []
        self.allowed.mkdir()
        text = place / "text"
        text.mkdir()
        for name in ("calendar", "heapq", "textwrap"):
            shutil.copy(Path(sysconfig.get_path("stdlib"), f"{name}.py"), text)
        self.data = ("--data", str(text))
        self.environment = {}
        self.key = None
        self.key_flags = ()

    def use_bucket(self, kind, monkeypatch):
        """Puts the run into a bucket, with a key."""
        self.environment = servers.environment(kind, monkeypatch)
        self.run = f"{servers.BUCKETS[kind][1]}/{self.place.name}-{time.time_ns()}"
        self.key, file = bytes([0x5A] * 32), self.place / "key"
        file.write_text(self.key.hex())
        file.chmod(0o600)
        self.key_flags = ("--key-file", str(file))

    def start(self, *words, out, end="", at=None):
        """Starts a command; with `at`, waits until its worker has asked the others to wait for it in this round."""
        command = [*map(str, words), "--out", str(self.place / out)]
        given = (command, str(self.place / f"{out}.log"), str(self.allowed), self.environment, end)
        self.started.append(forked.CONTEXT.Process(target=_command, args=given))
        self.started[-1].start()
        if at is not None:
            store = self.store
            wait_for(lambda: log.look(store, at).hellos)
        return self.started[-1]

    def train(self, out, *more, steps=60, **how):
        words = ("--run", self.run, *self.key_flags, *SMALL, "--steps", steps, *self.data, *more)
        return self.start("train", *words, out=out, **how)

    def join(self, out, *more, **how):
        return self.start("join", self.run, *self.key_flags, "--threads", 1, "--late", 1, *more, out=out, **how)

    def told(self, command, *more):
        """The output of a command about the run."""
        return self.command(command, self.run, *self.key_flags, *more)

    def said(self, out):
        return (self.place / f"{out}.log").read_text()

    def allow(self, number):
        (self.allowed / str(number)).touch()

    def reach(self, number):
        """Lets rounds begin, up to this one; returns its manifest."""
        self.allow(number)
        return self.manifest(number)

    def kill(self, process):
        """Kills a worker; later rounds wait a second for it."""
        (self.allowed / GONE).touch()
        process.kill()

    def leave(self, process, out, until):
        """Ends a worker by SIGTERM, after its round; for that, rounds may begin up to this one."""
        os.kill(process.pid, signal.SIGTERM)
        wait_for(lambda: "stopping after one more round" in self.said(out))
        self.allow(until)
        assert self.code(process) == 143, self.said(out)

    @property
    def store(self):
        store = open_store(self.run)
        return Keyed(store, self.key) if self.key else store

    def manifest(self, number):
        """Waits for a round's manifest."""
        store = self.store
        wait_for(lambda: log.look(store, number).has_manifest)
        return log.read_manifest(store, log.read_record(store).identity, number)

    def ended(self, process, out):
        assert self.code(process) == 0, self.said(out)
        return re.search(r"weights after \d+ rounds: sha256 ([0-9a-f]{64})", self.said(out))[1]

    def end_alike(self, **processes):
        """Checks that all, named by `out`, end with a replay's weights; returns the replay's output."""
        digests = {self.ended(process, out) for out, process in processes.items()}
        told = self.told("replay")
        assert {told.rpartition("sha256 ")[2].strip()} == digests
        return told

    def whole(self, *more, **how):
        """Trains a run of one worker to its end; returns the digest of its weights."""
        self.allow(99)
        return self.ended(self.train("first", *more, **how), "first")

    def code(self, process):
        process.join(LIMIT)
        return process.exitcode

    def rows(self, out):
        """The metrics of a worker."""
        return [json.loads(line) for line in (self.place / out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def machines(tmp_path, command):
    made = Machines(tmp_path, command)
    yield made
    for process in made.started:
        process.kill()
        process.join()


@pytest.mark.parametrize("kind", ["folder", *servers.BUCKETS])
def test_run_survives_a_kill_a_joiner_and_a_leaver_and_replay_agrees(kind, machines, monkeypatch):
    if kind != "folder":
        machines.use_bucket(kind, monkeypatch)
    first = machines.train("first")
    assert len(machines.reach(1).senders) == 1
    second = machines.join("second", at=2)
    machines.reach(4)
    assert len(machines.manifest(3).senders) == 2
    machines.kill(second)
    third = machines.join("third", at=5)
    assert re.search(r"next message\s.*awaited: it has joined", machines.told("status"), re.DOTALL)
    assert "others: demopt join" in machines.said("first")
    assert "others:" not in machines.said("second")
    machines.reach(6)
    machines.leave(first, "first", until=99)  # the run goes on elsewhere
    assert "this machine left after step" in machines.said("first")
    again = machines.join("first")  # with the state that it left with
    assert machines.end_alike(third=third, first=again).startswith("weights after 12 rounds")
    assert "with the state that it left" in machines.said("first")
    status = json.loads(machines.told("status", "--json"))
    assert (status["round"], status["step"], status["state"]) == (12, 60, "done")
    assert all(list(worker) == ["samples"] for worker in status["workers"].values())
    models = [machines.place / out / "model" / "model.safetensors" for out in ("first", "third")]
    assert models[0].read_bytes() == models[1].read_bytes()
    assert {"step": 60, "round": 12}.items() <= machines.rows("third")[-1].items()  # as status counts
    for name, value in machines.environment.items():
        assert not name.endswith("_KEY") or value not in machines.said("first")
    if machines.key:
        assert "run is damaged" in machines.command("status", machines.run, code=1)
        assert "run; to start a run: demopt train" in machines.command("status", f"{machines.run}x", code=2)


@pytest.mark.parametrize(
    "lives",
    [
        ("killed at the message",),
        ("killed at the manifest",),
        ("failed at the message", "killed at the manifest"),
        ("failed by a drift",),
    ],
)
def test_worker_killed_around_its_message_goes_on_by_the_same_command_and_each_step_counts_once(lives, machines):
    """By SIGKILL, when its message is put or when its manifest is; or by an error, after which it saves its state."""
    first = machines.train("first", steps=35)
    machines.reach(0)
    for end in lives:
        killed = machines.train("second", steps=35, end=end, at=1)
        machines.allow(ENDS)
        assert machines.code(killed) == (1 if end.startswith("failed") else -signal.SIGKILL), machines.said("second")
        assert "Traceback" not in machines.said("second")
        if end == "failed by a drift":
            assert "it has taken the run's newest weights: the same command goes on" in machines.said("second")
    machines.manifest(ENDS)
    (machines.allowed / GONE).touch()
    assert [*machines.reach(ENDS + 2).members.values()] == [0]  # nobody waits for the dead any more
    (machines.allowed / GONE).unlink()
    again = machines.train("second", steps=35, at=ENDS + 3)
    machines.allow(99)
    assert machines.end_alike(first=first, second=again).startswith("weights after 7 rounds")
    rounds = [machines.manifest(number).senders for number in range(7)]
    assert [len(each) for each in rounds] == [1, 2, 2, 1, 1, 2, 2]
    assert {sender.note["sequences"] for each in rounds for sender in each} == {10}, "a round's steps, in one message"
    assert len({sender.digest for each in rounds for sender in each}) == 11


def test_epochs_read_each_sequence_once_and_again_only_what_a_killed_worker_held(machines):
    text = machines.place / "few.txt"
    text.write_bytes(Path(machines.data[1], "calendar.py").read_bytes()[:6800])
    machines.data = ("--data", str(text))
    more = [*SMALL, "--sync-every", 2, "--global-batch", 6, "--epochs", 1]
    first = machines.start("train", "--run", machines.run, *more, *machines.data, out="first")
    machines.reach(2)
    second = machines.join("second", at=3)
    assert len(machines.reach(5).reading.held) == 2
    machines.kill(second)
    third = machines.join("third", at=6)
    assert len(machines.reach(9).members) == 2  # nobody waits for the dead any more
    (machines.allowed / GONE).unlink()  # the leaver must be in its last round, or others read its sequences again
    machines.leave(first, "first", until=11)  # it may have asked for round 10 already
    machines.manifest(10)
    assert re.search(r"epoch 0\.\d\d of 1  ", machines.told("status"))
    machines.told("stop")
    machines.allow(13)
    assert machines.code(third) == 130, machines.said("third")
    machines.allow(999)
    machines.end_alike(third=machines.join("third"), first=machines.join("first"))
    number = 6460 // 32  # without the twentieth for validation
    read = Counter(int(each) for file in machines.place.glob("*.read") for each in file.read_text().split())
    assert {*read} == {*range(number)}
    assert {each for each, times in read.items() if times > 1} <= lost(machines.store)
    assert machines.said("third").count("final validation loss") == 1
    status = machines.told("status")
    assert status.startswith("done: run ")
    (step,) = {machines.rows(out)[-1]["step"] for out in ("first", "third")}
    assert f"\nstep {step}  round " in status
    for out in ("first", "third"):
        assert re.search(
            rf"^step {step}  epoch 1\.00/1  .* parameters, {step} steps\s", machines.said(out), re.M | re.S
        )
    tokens = {row["tokens"] for out in ("first", "third") for row in machines.rows(out) if row["step"] == step}
    assert tokens == {32 * number}  # each sequence counts once, even if it is read again


def test_full_disk_of_one_machine_ends_it_in_one_line_and_the_run_goes_on(machines):
    first = machines.train("first", "--sync-every", 40, steps=80)
    machines.reach(0)
    second = machines.join("second", at=1)
    resource.prlimit(second.pid, resource.RLIMIT_FSIZE, (8000, 8000))  # its metrics get longer before its first message
    assert machines.code(second) == 1, machines.said("second")
    (machines.allowed / GONE).touch()
    told = f"--out {machines.place / 'second'}: cannot be written"
    state, metrics = machines.said("second").splitlines()[-2:]
    assert state.startswith(f"not saved: {told}")
    assert told in metrics
    assert not [*(machines.place / "second").glob("*.partial")]
    machines.allow(99)
    digest = machines.ended(first, "first")
    assert [*machines.manifest(1).members.values()] == [1]  # the second's: the round waited for it
    assert machines.ended(machines.join("second"), "second") == digest


def test_stop_ends_a_second_train_that_reads_its_text(machines):
    first = machines.train("first")
    machines.reach(0)
    second = machines.train("second", end="stopped as it reads its text")
    wait_for(lambda: machines.store.get(STOP, 99))
    machines.allow(99)
    assert machines.code(first) == 130
    (machines.allowed / GONE).touch()
    assert machines.code(second) == 130, machines.said("second")
    ends = [re.search(r"weights after .*", machines.said(out))[0] for out in ("first", "second")]
    assert ends[0] == ends[1]
    assert "demopt stop ended the run after step" in machines.said("second")


def test_stop_file_that_comes_while_a_worker_starts_ends_it_after_a_round(machines):
    machines.allow(99)
    for out, start in (("first", machines.train), ("second", machines.join)):
        (machines.place / out).mkdir()
        assert machines.code(start(out, end="a file stop as it reads its text")) == 130, machines.said(out)
        assert "this machine left after step" in machines.said(out)


def test_stop_ends_all_machines_and_a_join_goes_on(machines):
    first = machines.train("first", steps=20)
    machines.reach(0)
    second = machines.join("second", at=1)
    assert "all workers will stop" in machines.told("stop")
    machines.allow(2)
    assert [machines.code(each) for each in (first, second)] == [130, 130], machines.said("first")
    assert "demopt stop ended the run" in machines.said("second")
    assert machines.manifest(1).stop
    told = machines.told("status")
    assert told.startswith("stopped: run ")
    assert re.search(r"last round .* ago", told)
    assert re.search(r"^ worker +samples {2}$", told, re.MULTILINE)  # no column for messages that nobody awaits
    told = machines.told("stop")
    assert told == f"nothing to stop: the run is stopped after step 10 of 20; demopt join {machines.run} goes on\n"
    (machines.allowed / GONE).touch()
    machines.allow(99)
    digest = machines.ended(machines.join("second"), "second")
    assert machines.rows("second")[-1]["tokens"] == 1600  # of both: one message per round, and in one round two
    assert machines.end_alike(first=machines.join("first")) == f"weights after 4 rounds: sha256 {digest}\n"
    assert "final train loss" not in machines.said("first")  # its steps were not the last
    assert re.match(r"done: run (?!.*awaited)", machines.told("status"), re.DOTALL)
    assert "the run is done after step 20 of 20; demopt export" in machines.told("stop")


@pytest.mark.parametrize("delay", [0, 1])
def test_each_sequence_counts_in_one_message(machines, delay):
    """With delay a message is made before the outcome of the one before it is known."""
    machines.whole("--delay", delay, "--eval-every", 8, steps=20)
    rows = machines.rows("first")
    assert f"val {round(rows[15]['val_loss'], 4):.3f} after step 16\n" in machines.told("status")  # of the last message
    assert "DDP" not in machines.said("first")  # one worker: nothing to compare with
    senders = [machines.manifest(number).senders for number in range(4)]
    assert [(sender.samples, sender.note["sequences"]) for (sender,) in senders] == [(10, 10)] * 4
    assert rows[-1]["tokens"] == 40 * 32
    assert all(row["optimizer_seconds"] > 0 for row in rows)  # local steps compute, too
    assert len({row["payload_bytes"] for row in rows}) == 2  # nothing or one message, even in a step with two rounds
    sent = sum(place.stat().st_size for place in Path(machines.run).glob("rounds/*/*.message"))
    assert sum(row["sent_bytes"] for row in rows) == sent


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("join", "RUN"), "is no folder here; is its disk mounted?"),
        (("status", "no run"), "To start a run: demopt train --run 'no run'"),
        (("status", "."), "holds no run; is its disk mounted? To start a run: demopt train --run"),
        (("train", "--run", "RUN", "--optimizer", "demo"), "--run takes --optimizer local"),
        (("train", "--run", __file__), "cannot be opened: it is no folder"),
        (("train", "--run", "RUN", "--workers", "2"), "--run takes one worker per command"),
        (("train", "--run", "ftp://x/y"), "a run's address begins with"),
        (("train", "--run", "s3://b/x#1"), "in each part of a name, not 'x#1'"),
        (("train", "--run", "RUN", "--key-file", "none"), "copy the run's key, or make one"),
        (("train", "--run", "RUN", "--threads", "100000"), "--threads is 100000; it must be less than or equal to"),
        (("doctor", "--wait", "1e300"), "'--wait'"),
        (("doctor", "--peers", "a..b"), "--peers a..b: no address for this name; give one"),
        (("doctor", "--peers", "fd00::1"), "--peers fd00::1: wanted exactly one address of this machine"),
        (("doctor", "--peers", "10.255.255.1"), "--peers 10.255.255.1: wanted exactly one address of this machine"),
    ],
)
def test_mistakes_are_told_in_one_line(machines, command, words, told, monkeypatch):
    monkeypatch.setattr("demopt.train.runs.worker.load_corpus", Mock(side_effect=AssertionError))  # it may take minutes
    given = [word.replace("RUN", machines.run) for word in words]
    data = [*machines.data, "--out", machines.place / "out"] if words[0] == "train" else []
    assert told in command(*given, *data, code=2)
    assert words[1] != "RUN" or not Path(machines.run).exists()


@pytest.mark.parametrize(
    ("run", "told"), [({"run": "my run"}, "its --run is 'my run'"), ({}, "which trained without --run")]
)
def test_out_folder_in_place_of_a_run_is_told_with_its_run(command, run, told, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"optimizer": "local", **run}))
    assert f"{tmp_path} is the --out of a worker, {told}" in command("status", tmp_path, code=2)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("train", "--run", "run"), "was not started by demopt train; join it with its script"),
        (("export", "run"), "was not started by demopt train; see LocalDeMo.observe for its script"),
        (("replay", "run"), "the run in run has no round yet"),
    ],
)
def test_run_of_a_script_without_rounds_is_told_to_commands_that_need_more(command, words, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Worker("run", 0).join()
    (tmp_path / "text.txt").write_text("some text " * 1000)
    more = {"train": (*forked.TINY.split(), "--data", "text.txt", "--out", "out"), "export": ("--out", "out")}
    assert told in command(*words, *more.get(words[0], ()), code=2)


@pytest.mark.parametrize("gone", [(), ("start", "rounds/00000000")], ids=["the record", "all that is old"])
def test_no_run_is_started_where_rounds_have_lost_theirs(gone, tmp_path):
    Worker(tmp_path, 0, checkpoint_every=2).round(2)
    for name in gone:
        shutil.rmtree(tmp_path / name)
    (tmp_path / "run").unlink()
    with pytest.raises(ExchangeError, match="has rounds of a run whose object run is gone"):
        open_run(str(tmp_path), None, patience=0.0)


def test_status_that_is_shown_again_and_again_ends_once_nobody_reads_it(tmp_path, monkeypatch):
    Worker(tmp_path, 0).join()
    monkeypatch.setattr("demopt.train.runs.command.WATCH_SECONDS", 0.0)
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(sys, "stderr", sys.stderr)  # `open_outlets` replaces both
        open_outlets()
        assert status(str(tmp_path), watch=True) == 0


def test_adapters_of_a_model_travel_through_a_folder_and_are_exported_and_replayed(machines, command):
    base = models.save_tiny(machines.place / "base")
    chats = models.save_chats(machines.place / "chats.jsonl")
    more = "--sequence 32 --batch 2 --warmup 3 --eval-sequences 6 --lora 2 --keep-log --checkpoint-every 2 --steps 40"
    own = ("--model", base, "--data", chats, "--threads", 1)
    first = machines.start("train", "--run", machines.run, *more.split(), *own, out="first")
    machines.reach(2)
    moved = base.rename(machines.place / "moved")
    join = ("join", machines.run, "--out", machines.place / "x")
    assert f"the run's model is {base}, which is not here: give a copy of it by --model" in command(*join, code=2)
    other = models.save_tiny(machines.place / "other", seed=2)
    assert "these are not the weights that the run began with" in command(*join, "--model", other, code=2)

    def export(out, *words, model=moved, **how):
        return command("export", machines.run, "--out", machines.place / out, "--model", model, *words, **how)

    (machines.place / "empty").mkdir()
    assert re.search("--model nowhere|the run's model", export("empty", model="nowhere", code=2))
    for out, told in ((moved, f"would replace --model {moved}"), (machines.place / "first", "holds a run")):
        assert export(out, "--merge", code=2) == f"demopt: --out {out} {told}; give another --out\n"
    with patch("demopt.train.runs.worker.begin", side_effect=MemoryError("no room")):
        assert "the model does not fit into this machine's memory: no room" in export("large", code=2)
    assert export("early").startswith("the model after 3 rounds is in")
    seen = command("export", machines.run, "--out", machines.place / "early", "--model", moved, code=2)
    assert "already holds adapter_config.json; delete the model there, or give another --out" in seen
    assert not [*Path(machines.run, log.folder_of(3)).glob("*.hello")]
    second = machines.join("second", "--model", moved, at=3)
    machines.allow(99)
    assert machines.end_alike(second=second, first=first).startswith("weights after 8 rounds")
    export("late")
    export("whole", "--merge")
    places = (machines.place / out for out in ("first/model", "second/model", "late", "early"))
    trained, same, exported, early = ((place / "adapter_model.safetensors").read_bytes() for place in places)
    assert trained == same == exported != early
    assert (machines.place / "whole" / "model.safetensors").exists()


def test_command_to_go_on_has_all_that_this_machine_gave():
    own = {"key_file": "k", "device": "cpu", "threads": 2, "late": 3.0, "data": ["a", "b c"], "batch": 1}
    config = TrainConfig(run="/mnt/run", out="o", model="m", tokenizer="t", **own)
    told = worker._to_go_on(config, {"data": ["c"], "batch": 4, "model": "/there/m", "tokenizer": "/there/t"})
    own = "--key-file k --device cpu --threads 2 --late 3.0 --data a --data 'b c' --batch 1 --model m --tokenizer t"
    assert told == f"demopt join /mnt/run --out o {own}"
    for model in ("", "m"):
        config = TrainConfig(run="/mnt/run", out="o", model=model, tokenizer=model or "bytes")  # as `resolve` fills it
        theirs = {"data": config.data, "batch": config.batch, "model": model, "tokenizer": None}
        assert worker._to_go_on(config, theirs) == "demopt join /mnt/run --out o"
    for more in ({"merge": True}, {"tracker": "wandb"}, {"compile": True}, {"timeout": 60.0, "key_file": "my key"}):
        told = worker._to_go_on(dataclasses.replace(config, out="an out", **more), theirs)  # join has no such flags
        key = " --key-file 'my key'" if "key_file" in more else ""
        assert told == f"demopt train --config 'an out/config.json'{key}"


def test_replay_of_a_kept_log_asks_for_the_message_that_is_gone(machines, command):
    machines.whole(steps=15)
    for message in Path(machines.run).glob("rounds/00000001/*.message"):
        message.unlink()
    told = command("replay", machines.run, code=2)
    assert re.search(r"rounds/00000001/.*; restore it$", told), told


@pytest.mark.parametrize("name", ["model", "tokenizer"])
def test_file_of_the_run_that_is_not_here_is_asked_for(name, monkeypatch):
    monkeypatch.setattr(worker, "open_run", lambda *_: Mock(record=Mock(settings={name: "/nowhere/file"})))
    with pytest.raises(InputError, match=f"the run's {name} is /nowhere/file, .*: give a copy of it by --{name}$"):
        worker.settings_of_run("/mnt/run", None, {"out": "o"})


def test_joiner_with_other_settings_or_text_is_told_at_once(machines, command):
    machines.whole(steps=5)
    other = machines.place / "other.txt"
    other.write_text("something else entirely. " * 400)
    again = ["train", "--run", machines.run, *SMALL, "--steps", 5, "--out", machines.place / "out"]
    assert "the text or tokenizer here is not that of the run in" in command(*again, "--data", other, code=2)
    assert "--lr is 0.5, and the run in" in command(*again, "--lr", 0.5, *machines.data, code=2)
    told = command("join", machines.run, "--model", machines.place / "first" / "model", code=2)
    assert told == f"demopt: the run in {machines.run} began with a fresh model; leave out --model\n"
    told = command("join", machines.run, "--batch", 1, code=2)
    assert told == "demopt: --batch is 1, and the run has 2; it may differ only with --global-batch\n"
    text, late = Path(machines.data[1]), ("join", machines.run, "--out", machines.place / "late")
    moved = text.rename(machines.place / "moved.txt")
    assert f"the run's text is {text}, which is not here: give a copy of it by --data" in command(*late, code=2)
    moved.rename(text)
    assert re.search(f"(?s)reading {text}.*the model is in", command(*late))
    shutil.copytree(machines.run, machines.place / "broken")
    shutil.rmtree(machines.place / "broken" / "start")
    shutil.rmtree(machines.place / "broken" / "checkpoints")
    broken = ("train", "--run", machines.place / "broken", "--timeout", 1, *again[3:], *machines.data)
    for _ in range(2):  # a command that failed before it trained leaves --out free
        assert "has no object start/" in command(*broken, code=1)


def test_train_with_other_settings_than_a_run_that_began_at_the_same_moment_is_refused(machines, command, monkeypatch):
    machines.whole(steps=5)
    before = [log.look(machines.store, number) for number in range(9)]
    monkeypatch.setattr(worker, "log", SimpleNamespace(read_record=lambda _: None))  # as if the run had not begun
    words = ("--run", machines.run, *SMALL, *machines.data, "--steps", 10, "--out", machines.place / "second")
    assert "--steps is 10, and the run in" in command("train", *words, code=2)
    assert [log.look(machines.store, number) for number in range(9)] == before, "a hello was left"


def test_key_file_is_read_once_as_a_pipe_is(tmp_path, command, monkeypatch):
    def pipe(path):
        found = read_key(path)
        Path(path).write_text("")
        return found

    monkeypatch.setattr("demopt.runs.key.read_key", pipe)
    for words in (("train", "--run", tmp_path / "run", *SMALL, "--steps", 5), ("join", tmp_path / "run")):
        (file := tmp_path / "key").write_text("5a" * 32)
        file.chmod(0o600)
        command(*words, "--data", __file__, "--key-file", file, "--out", tmp_path / words[0])


def test_join_waits_for_a_folder_that_goes_away_while_it_loads_and_starts_no_run(machines, command, monkeypatch):
    digest = machines.whole(steps=5)
    run, away, load, sleep = Path(machines.run), machines.place / "away", worker.load_corpus, time.sleep
    monkeypatch.setattr(worker, "load_corpus", lambda config: (run.rename(away), load(config))[1])
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds) if run.exists() else away.rename(run))
    assert digest in command("join", run, "--out", machines.place / "second")
    assert not away.exists()


def test_state_is_saved_though_the_store_stays_away(command, tmp_path, monkeypatch):
    away = Mock(side_effect=ExchangeError("the store is away"))
    monkeypatch.setattr(worker, "train_steps", away)
    monkeypatch.setattr(worker.Worker, "_hear", at_first(lambda _: None, away))
    words = ("train", "--run", tmp_path / "run", *SMALL, "--steps", 5, "--data", __file__)
    assert "the store is away" in command(*words, "--out", tmp_path / "out", code=1)
    assert (tmp_path / "out" / "state.pt").exists()


def test_train_again_starts_the_run_that_a_kill_kept_it_from(machines):
    (out := machines.place / "first").mkdir()
    (out / "config.json").write_text(json.dumps({"run": machines.run, "optimizer": "local"}))
    assert machines.whole(steps=5)


def test_train_again_starts_no_run_and_keeps_its_metrics_while_its_run_is_away(machines, command):
    first = machines.train("first", steps=20)
    machines.reach(1)
    machines.kill(first)
    first.join()
    run, metrics = Path(machines.run), machines.place / "first" / "metrics.jsonl"
    rows, away, own = metrics.read_bytes(), run.rename(machines.place / "away"), ("--out", metrics.parent)
    train = ["train", "--run", run, *SMALL, "--steps", 20, *machines.data, *own]

    def refused(told, *words):
        assert re.search(told, command(*words, code=2))
        assert metrics.read_bytes() == rows

    for more in ([], ["--resume"], ["--resume-auto"]):
        refused("is no folder here; is its disk mounted.*--overwrite", *train, *more)
    run.mkdir()  # an empty mount point
    refused("holds no run; is its disk mounted.*--overwrite", *train, "--resume-auto")
    machines.allow(99)
    machines.ended(machines.train("second", steps=5), "second")
    for words in (train, ["join", run, *own]):
        refused("--out .*first holds another run than", *words)
    shutil.rmtree(run)
    away.rename(run)
    command(*train, "--resume-auto")
    assert metrics.read_bytes().startswith(rows.splitlines()[0])


def test_workers_share_the_global_batch_by_the_speeds_in_manifests(machines):
    """A worker's part of each step follows only from manifests, so all agree on it; it is its message's weight."""
    machines.allow(0)
    first = machines.train("first", "--global-batch", 9, steps=40)
    machines.manifest(0)
    second = machines.join("second", "--batch", 1, at=1)
    machines.allow(99)
    assert machines.ended(first, "first") == machines.ended(second, "second")
    recorded = json.loads((machines.place / "second" / "config.json").read_text())
    assert (recorded["batch"], machines.rows("second")[0]["batch"]) == (1, 1)
    for out in ("first", "second"):
        rows = machines.rows(out)
        assert {row["workers"] for row in rows if row["step"] > 10} == {2}  # also between rounds
        speed = 9 * 32 / statistics.mean(row["step_seconds"] for row in rows[10:])
        told = rf"local, 2 workers, .* 40 steps\s.*DDP, computed .* per second +│ +{speed:,.0f} "
        assert re.search(told, machines.said(out), re.DOTALL)
    totals = [
        {row["round"]: row["tokens"] for row in machines.rows(out) if "round" in row} for out in ("first", "second")
    ]
    assert totals[1].items() <= totals[0].items()
    one, other = ({row["step"]: row["batch"] for row in machines.rows(out)} for out in ("first", "second"))
    assert {one[step] + other[step] for step in range(11, 41)} == {9}  # both know both speeds
    for number in range(2, 8):
        senders = machines.manifest(number).senders
        assert sorted(sender.samples for sender in senders) == sorted(5 * each[5 * number + 1] for each in (one, other))
        assert all(sender.note["speed"] > 0 for sender in senders)


def test_example_of_unequal_machines_ends_with_equal_weights(monkeypatch, capsys):
    """The example ends with an error if they differ."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    example = importlib.import_module("unequal")
    monkeypatch.setattr(example.multiprocessing, "get_context", lambda _: forked.CONTEXT)
    monkeypatch.setattr(sys, "argv", ["unequal.py", "--rounds", "3"])
    example.main()
    assert capsys.readouterr().out.startswith("equal batches 10 and 10: ")
