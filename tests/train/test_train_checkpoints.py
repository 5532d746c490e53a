"""Checkpoints: resumed runs are the uninterrupted ones, bit for bit; damaged checkpoints are refused."""

import itertools
import os
import resource
import shutil
import signal
import sys

import pytest
import torch
import torch.distributed as dist
import train_runs
from torch.distributed.checkpoint import FileSystemReader
from train_runs import STEPS, as_killed, metrics, resume_as, steps_done

import demopt
import forked
from demopt.codec.hyperparameters import Codec
from demopt.errors import DemoptError
from demopt.train import checkpoint, team
from demopt.train.config import InputError, TrainConfig, checkpoints_in
from demopt.train.out import OutFolder
from demopt.train.team import Team, stop_on_signals


def last_of(out):
    """The record of a run's newest checkpoint."""
    return checkpoint.read(checkpoint.whole(OutFolder(out).checkpoints)[-1])


@pytest.mark.parametrize("case", ["adamw", "local", "delay"])
def test_run_killed_after_step_11_resumes_bit_for_bit(case, runs, tmp_path):
    """From step 9: local is between two rounds; with delay, the save has ended the round in flight."""
    resume_as(runs(case)[0], as_killed(runs(case)[0], tmp_path / "run"))


def test_run_stopped_by_ctrl_c_then_by_a_file_saves_its_step_and_resumes_bit_for_bit(tmp_path, text, finished):
    out = tmp_path / "run"
    for number, more in ((5, ()), (8, ("--resume",))):
        process = train_runs.start_held(out, text, *more, number=number)
        (out / "stop").touch() if more else process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=train_runs.LIMIT)
        assert process.returncode == 130
        assert ("stopping after this step; Ctrl-C now stops at once" in told) == (not more)
        assert f"stopped after step {number} of 12, saved; go on with: demopt train --resume --out {out}" in told
        assert "Traceback" not in told
        assert last_of(out).step == steps_done(out) == number
    resume_as(finished[0], out)


def test_stop_file_that_comes_while_the_workers_start_ends_the_run_after_a_step(tmp_path, finished, monkeypatch):
    out = as_killed(finished[0], tmp_path / "run")
    (out / "stop").touch()
    os.utime(out / "stop", (1, 1))  # from before the command
    monkeypatch.setattr("demopt.cli.printable", lambda text: (out / "stop").touch() or text)  # with the first line
    told = forked.demopt("train", "--resume", "--out", out, codes=(130,)).stderr
    assert "stopped after step 10 of 12, saved" in told


def test_closed_terminal_and_an_output_that_nobody_reads_lose_no_step(tmp_path, text):
    out, (ours, terminal) = tmp_path / "\u00fc", os.openpty()
    process = train_runs.start_held(out, text, number=5, stdout=terminal)
    for end in (ours, terminal):
        os.close(end)
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(train_runs.LIMIT) == 129
    assert last_of(out).step == steps_done(out) == 5


def test_sigterm_that_all_processes_get_and_twice_as_of_a_service_manager_loses_no_step(tmp_path, text):
    out = tmp_path / "run"
    process = train_runs.start_held(out, text, number=5)
    for pid in 2 * [*train_runs.workers_of(process).values(), process.pid]:
        os.kill(pid, signal.SIGTERM)
    _, told = process.communicate(timeout=train_runs.LIMIT)
    assert (process.returncode, last_of(out).step) == (143, 5), told
    assert set(told.splitlines()[:-1]) == {"demopt: stopping after this step; Ctrl-C now stops at once"}


def test_only_ctrl_c_stops_at_once_what_is_stopping(monkeypatch):
    ended, told = [], []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(team, "tell", told.append)
    with stop_on_signals() as received:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):  # torchrun passes on its ranks' signals, too
            signal.raise_signal(number)
        assert (len(received), ended) == (3, [])
        signal.raise_signal(signal.SIGINT)
    assert (ended, told) == ([130], ["stopping after this step; Ctrl-C now stops at once", "stopped at once"])


def test_signal_that_comes_while_the_first_is_handled_leaves_the_word_of_the_stop(monkeypatch):
    told, more = [], [signal.SIGTERM]
    monkeypatch.setattr(team, "tell", told.append)
    with stop_on_signals(lambda: signal.raise_signal(more.pop()) if more else None):
        signal.raise_signal(signal.SIGTERM)
    assert told == ["stopping after this step; Ctrl-C now stops at once"]


def test_signal_that_is_ignored_as_under_nohup_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_on_signals():
        assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


def test_second_signal_stops_at_once(tmp_path, text):
    process = train_runs.start_held(tmp_path / "run", text, number=5, release=False)
    workers = train_runs.workers_of(process)
    assert sorted(workers) == [0, 1]
    process.send_signal(signal.SIGINT)
    assert "Ctrl-C now stops at once" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    told = process.communicate(timeout=train_runs.LIMIT)[1]  # a worker that ends later may say that the other is gone
    assert "demopt: stopped at once" in told.splitlines()
    assert process.returncode == 143
    train_runs.wait_for(lambda: not any(map(train_runs.alive, workers.values())))


@pytest.mark.parametrize(("case", "workers"), [("delay", 3), ("adamw", 1), ("local", 1)])
def test_resume_with_other_workers_goes_on_and_counts_all_tokens(case, workers, runs, tmp_path):
    out = as_killed(runs(case)[0], tmp_path / "run")
    before = last_of(out)
    each = 2 * 32 * (2 if case == "adamw" else 1)  # per worker and step, which AdamW takes in two passes
    assert (before.settings["workers"], before.tokens) == (2, before.step * 2 * each)
    done = train_runs.resume(out, "--workers", workers)
    assert f"workers: 2 until now, {workers} from here; a step takes" in done.stdout
    assert ("route gather" in done.stdout, "nothing is exchanged" in done.stdout) == (workers == 3, workers == 1)
    assert "UserWarning" not in done.stderr
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows[before.step :]:
        assert row["tokens"] == before.tokens + (row["step"] - before.step) * workers * each
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert (last_of(out).settings["workers"], last_of(out).tokens) == (workers, rows[-1]["tokens"])


def test_final_model_of_local_is_that_of_its_last_checkpoint(runs):
    from safetensors.torch import load_file

    out = runs("local")[0]
    saved, path = load_file(out / "model" / "model.safetensors"), out / "checkpoints" / f"step-{STEPS:08d}"
    state = {f"model.{name}": torch.empty_like(value) for name, value in saved.items()}
    with pytest.warns(UserWarning, match="single process"):
        checkpoint.load_state(state, storage_reader=FileSystemReader(path), no_dist=True)
    assert all(torch.equal(state[f"model.{name}"], value) for name, value in saved.items())


EMPTY = '{"step": 3, "fingerprint": "", "settings": [], "tokens": 0}'


@pytest.mark.parametrize("broken", ["{", "[1]", '{"step": 3}', "\xff", EMPTY, EMPTY.replace("3", "1e999"), "[" * 99999])
def test_damaged_record_is_refused_in_one_line(tmp_path, broken):
    place = tmp_path / "step-00000012"
    place.mkdir()
    (place / "run.json").write_text(broken, encoding="latin-1")
    with pytest.raises(InputError, match=r"^.*step-00000012 cannot be read.*$"):
        checkpoint.read(place)


@pytest.mark.parametrize(
    ("damaged", "change"),
    [
        ("__1_0.distcp", lambda data, _: data[:1000]),
        ("__1_0.distcp", lambda data, _: data[:5000] + b"?" + data[5001:]),
        ("__1_0.distcp", lambda _, newest: (newest / "__0_0.distcp").read_bytes()),
        (".metadata", lambda data, _: data[:1000]),
    ],
)
def test_resume_from_a_damaged_checkpoint_is_refused_and_the_older_one_goes_on(tmp_path, finished, damaged, change):
    out = shutil.copytree(finished[0], tmp_path / "run")
    newest = checkpoint.whole(out / "checkpoints")[-1]
    (newest / damaged).write_bytes(change((newest / damaged).read_bytes(), newest))
    (refused,) = train_runs.resume(out, codes=(2,)).stderr.splitlines()
    assert f"--resume: {newest} cannot be read: " in refused
    assert "weights_only" not in refused  # torch's advice, which may run code
    shutil.rmtree(newest)
    resume_as(finished[0], out)


def trained(steps):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    optimizer = demopt.DeMo(model.parameters(), lr=0.1, top_k=2, codec=Codec(chunk=4))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def save(out, step):
    run, team = OutFolder(out), Team(0, 1, torch.device("cpu"), demopt.exchange.SingleRank())
    saved = checkpoint.CheckpointRecord(step, "text", TrainConfig().record(), 0)
    with run.writing():
        checkpoint.save(run.checkpoints, saved, *trained(step), team)


def apart(work, *args):
    """Run work(*args) in a process of its own, with a process group, and return its exit code."""

    def alone():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        work(*args)

    return forked.code_of(alone)


def save_and_die(out, number):
    """Save step 3, but die at change number `number`: a change of a folder, or the opening of a file to write."""
    changes = itertools.count()

    def hook(event, arguments):
        writes = event == "open" and isinstance(arguments[1], str) and arguments[1][0] in "wax"
        if (writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir")) and next(changes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    save(out, 3)


def check_what_is_left(out):
    newest = checkpoint.whole(out / "checkpoints")[-1]
    step = checkpoint.read(newest).step
    assert step in (2, 3)
    model, optimizer = trained(0)
    checkpoint.load(newest, model, optimizer)
    assert all(map(torch.equal, model.parameters(), trained(step)[0].parameters()))
    save(out, 4)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [newest.name, "step-00000004"]


def test_save_that_is_killed_anywhere_leaves_a_whole_checkpoint(tmp_path):
    for step in (1, 2):
        assert apart(save, tmp_path / "ready", step) == 0
    for number in itertools.count(0, 2):
        folder = shutil.copytree(tmp_path / "ready", tmp_path / str(number))
        if apart(save_and_die, folder, number) != -signal.SIGKILL:
            break
        assert apart(check_what_is_left, folder) == 0, number
    assert number > 8


def test_save_on_a_full_disk_says_so_and_leaves_the_one_before(tmp_path):
    def save_without_room():
        save(tmp_path, 1)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # otherwise it ends the process
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(DemoptError, match=f"^--out {tmp_path}: cannot be written: File too large$"):
            save(tmp_path, 2)

    assert apart(save_without_room) == 0
    assert checkpoint.whole(tmp_path / "checkpoints")[-1].name == "step-00000001"


def test_files_folders_and_links_of_the_user_beside_checkpoints_are_left_and_not_taken_for_one(tmp_path):
    folder = tmp_path / "checkpoints"
    assert apart(save, tmp_path, 1) == 0
    (folder / "step-notes.txt").touch()
    (folder / "step-mine").mkdir()
    shutil.copytree(folder / "step-00000001", folder / "step-00000004.bak")
    for link in ("step-latest", "step-00000009"):
        (folder / link).symlink_to("step-00000004.bak")
    kept = {path.name for path in folder.iterdir()}
    for step in (2, 3):
        assert apart(save, tmp_path, step) == 0
    assert {path.name for path in folder.iterdir()} == kept - {"step-00000001"} | {"step-00000002", "step-00000003"}
    assert checkpoint.whole(folder)[-1].name == "step-00000003"


def test_checkpoints_are_in_the_order_of_their_steps_also_of_more_digits(tmp_path):
    steps = ["99999998", "99999999", "100000000", "1000000000"]
    for name in (*steps, "0100000001", "7"):
        (tmp_path / f"step-{name}").mkdir()
    assert [path.name for path in checkpoints_in(tmp_path)] == [f"step-{step}" for step in steps]


def test_metrics_go_on_after_a_line_that_was_left_half_and_without_those_that_are_no_rows(tmp_path, finished):
    run = OutFolder(tmp_path)
    lines = (finished[0] / "metrics.jsonl").read_bytes().splitlines()
    odd = [b"{}", b"[]", b"null", b"5", b"[" * 100000, lines[0].replace(b'"tokens"', b'"t"')]
    for step in (b'"1"', b"null", b"NaN", b"1" + 400 * b"0", b'1, "epoch": []'):
        odd.append(lines[0].replace(b'"step": 1', b'"step": ' + step))
    run.metrics.write_bytes(b"\n".join([*odd, *lines[:10], lines[10][:30]]))
    assert run.read_metrics() == metrics(finished[0])[:10]
    run.rewind_metrics(8)
    assert metrics(tmp_path) == metrics(finished[0])[:8]
