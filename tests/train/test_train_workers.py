"""Workers that die, fail, disagree, or are started by torchrun; and which of several failures is told."""

import json
import os
import shutil
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
import train_runs
from torch.distributed import DistNetworkError, HashStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from train_runs import COMMAND, LIMIT, SMALL, alive, assert_same, metrics, steps_done, workers_of

import forked
from demopt.errors import DemoptError, ExchangeError
from demopt.exchange.process_group import _timeout_of
from demopt.train import launch, team
from demopt.train.config import InputError, TrainConfig, resolve
from demopt.train.launch import explain
from demopt.train.out import OutFolder

# Failures of ranks, as (exit code, error, time); of several, one is told.
KILLED = (-signal.SIGKILL, None, 5)
ENDED = (-signal.SIGTERM, None, 1)  # by torch's launcher
GLOO = (1, "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer", 1)
NCCL = (1, "DistBackendError: NCCL communicator was aborted", 1)


@pytest.mark.parametrize(
    ("failures", "said"),
    [
        ([GLOO, KILLED], "rank 1 was ended by SIGKILL (pid 1001); the run is over."),
        ([NCCL, ENDED, (1, "KeyError: 'x'", 5)], "rank 2 failed (pid 1002); the run is over.\nTraceback of rank 2"),
        ([ENDED, (1, "InputError: --data: nothing there", 5)], "--data: nothing there"),
        ([ENDED, (1, "DemoptError: the loss has been nan", 5)], "rank 1: the loss has been nan."),
    ],
)
def test_explain_tells_the_root_of_several_failures(tmp_path, failures, said):
    made = {}
    for rank, (exitcode, error, timestamp) in enumerate(failures):
        file = tmp_path / f"{rank}.json"
        if error:
            details = {"py_callstack": f"Traceback of rank {rank}", "timestamp": str(timestamp)}
            file.write_text(json.dumps({"message": {"message": error, "extraInfo": details}}))
        made[rank] = ProcessFailure(local_rank=rank, pid=1000 + rank, exitcode=exitcode, error_file=str(file))
    told = explain(made, OutFolder(tmp_path))
    assert (str(told), isinstance(told, InputError)) == (said, said.startswith("--data"))


def test_disk_that_is_too_full_for_the_report_of_an_error_is_told(tmp_path, text):
    limited = ["bash", "-c", 'ulimit -f 2; "$@"', "bash", *COMMAND]  # as in a full TMPDIR: no file takes the traceback
    more = [*SMALL, "--workers", "2", "--data", text, "--out", tmp_path / "run"]
    done = subprocess.run([*limited, *map(str, more)], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, "cannot be written: File too large" in done.stderr) == (1, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 1), (signal.SIGQUIT, 131)])
def test_killed_worker_and_a_quit_in_the_terminal_end_the_run(tmp_path, text, number, code):
    out = tmp_path / "run"
    process = train_runs.start(out, text, "--steps", 100000)
    train_runs.wait_for(lambda: steps_done(out) >= 4, process)
    workers = workers_of(process)
    assert sorted(workers) == [0, 1]
    os.kill(workers[1] if number == signal.SIGKILL else process.pid, number)
    _, told = process.communicate(timeout=LIMIT)  # long before --timeout, 600 s, has passed
    assert process.returncode == code
    if number == signal.SIGKILL:
        assert "rank 1 was ended by SIGKILL" in told
        assert f"demopt train --resume --out {out}" in told
    else:
        assert told == "demopt: stopped at once\n"
    assert not any(map(alive, workers.values()))


@pytest.mark.parametrize(
    ("action", "code", "said"),
    [
        ("", 0, ""),
        ("os.kill(os.getppid(), signal.SIGINT)", 130, "saved; go on with"),
        ("1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_run_ends_as_ever_after_the_launchers_folder_was_cleaned(tmp_path, text, action, code, said):
    clean = f"import shutil; shutil.rmtree({str(tmp_path / 'scratch')!r}); os.mkdir({str(tmp_path / 'scratch')!r}); "
    env = train_runs.at_step(5, 0, clean + action, tmp_path / "module") | {"TMPDIR": str(tmp_path / "scratch")}
    (tmp_path / "scratch").mkdir()
    process = train_runs.start(tmp_path / "run", text, "--workers", 1, env=env)
    _, told = process.communicate(timeout=LIMIT)
    assert (process.returncode, said in told, told.count("Traceback")) == (code, True, int(code == 1)), told


@pytest.mark.parametrize("error", [DistNetworkError("no port"), RendezvousConnectionError("no port")])
def test_workers_that_cannot_be_started_are_told_in_one_line(error, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "elastic_launch", Mock(side_effect=error))
    with pytest.raises(DemoptError, match="the workers cannot be started: no port; they connect at localhost"):
        launch.train(resolve(TrainConfig(out=str(tmp_path))))


@pytest.mark.parametrize("is_path", [False, True])
def test_workers_import_from_the_current_folder_only_if_the_launcher_does(is_path, tmp_path, monkeypatch):
    launched = Mock()
    monkeypatch.setattr(launch, "elastic_launch", launched)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", os.getcwd())] + [""] * is_path)
    launch.train(resolve(TrainConfig(out=str(tmp_path))))
    words = launched.return_value.call_args.args
    assert ("-P" in words) == (not is_path and sys.version_info >= (3, 11))
    assert words[-4:-2] == ("-m", "demopt.train.worker")


def test_more_workers_than_the_memory_has_room_for_are_refused_before_any_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "elastic_launch", Mock(side_effect=AssertionError))
    with pytest.raises(InputError, match=r"^--workers is 1000000; such processes take 200.0 TB before they train"):
        launch.train(resolve(TrainConfig(out=str(tmp_path), workers=1_000_000)))


def test_worker_whose_launcher_is_gone_before_it_has_started_ends():
    command = [sys.executable, "-m", "demopt.train.worker", "none.json", "4194305"]  # no process has this number
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_workers_refuse_unlike_settings(tmp_path, text):
    data = ["--data", text]
    (code, told), other = _by_hand(tmp_path / "a", data, [*data, "--top-k", "7"])
    assert "rank 1: --top-k is 7, and rank 0 has 32; start all workers with the same settings" in told
    assert (code, told.count("\n"), other) == (2, 1, (2, ""))
    assert not (tmp_path / "a").exists()


def test_ranks_that_would_resume_from_unlike_checkpoints_or_not_at_all_are_refused(tmp_path, text, finished):
    here, there = (shutil.copytree(finished[0], tmp_path / name) for name in ("here", "there"))
    *_, newest = sorted((there / "checkpoints").iterdir())
    shutil.rmtree(newest)
    data = ["--data", text]
    for theirs, said in (
        (["--overwrite"], "rank 1: --resume is False, and rank 0 has True; start all workers with the same settings"),
        (["--resume", "--out", there], f"that of rank 0 is {newest.name}; start again once "),
    ):
        (code, told), _ = _by_hand(here, [*data, "--resume"], [*data, *theirs])
        assert (code, said in told) == (2, True), told
    assert_same(here, finished[0])


def test_absent_rank_is_told(monkeypatch):
    monkeypatch.setattr(team.dist, "rendezvous", lambda *_, **__: iter([(HashStore(), 0, 2)]))
    with pytest.raises(ExchangeError, match=r"^rank 1 did not start within 1 s; see the output there$"):
        team.join(TrainConfig(timeout=1))


@pytest.mark.parametrize("local", ["1", "2"], ids=["two machines", "one machine"])
def test_ranks_that_cannot_connect_are_told_and_have_a_fifth_of_the_time(local, monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": local, "MASTER_ADDR": "10.0.0.1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(team, "refuse_loopback", lambda _: None)
    monkeypatch.setattr(team, "local_address", lambda _: "")
    monkeypatch.setattr(team.dist, "rendezvous", lambda *_, **__: iter([(HashStore(), 0, 1)]))
    connect = Mock(side_effect=RuntimeError("Gloo connectFullMesh failed with Connect timeout\nframes"))
    monkeypatch.setattr(team.dist, "init_process_group", connect)
    remedy = "; demopt doctor --peers ... on all machines finds the obstacle" if local == "1" else ""
    with pytest.raises(ExchangeError) as told:
        team.join(TrainConfig(timeout=600))
    assert str(told.value) == f"the ranks cannot connect: Gloo connectFullMesh failed with Connect timeout{remedy}"
    assert connect.call_args.kwargs["timeout"].total_seconds() == 120


@pytest.mark.parametrize(("known", "taken"), [(None, "=eth7"), ("ib0", "ib0")])
def test_nccl_takes_the_interface_that_gloo_is_told_unless_it_has_its_own(known, taken, monkeypatch):
    monkeypatch.setattr(team, "pick_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(team, "_connect", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", known or "")
    if known is None:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    with pytest.raises(KeyboardInterrupt):
        team.join(TrainConfig())
    assert os.environ["NCCL_SOCKET_IFNAME"] == taken


def test_connected_ranks_wait_for_each_other_as_long_as_the_time_out(monkeypatch):
    monkeypatch.setattr(team.dist, "rendezvous", lambda *_, **__: iter([(HashStore(), 0, 1)]))
    team.join(TrainConfig(timeout=600))
    try:
        assert _timeout_of(team.dist.group.WORLD).total_seconds() == 600
    finally:
        team.dist.destroy_process_group()


def test_overwrite_leaves_a_run_at_work_alone(tmp_path, text, finished):
    out = shutil.copytree(finished[0], tmp_path / "run")
    with (out / ".lock").open("w") as lock:
        OutFolder(out)._lock(lock.fileno())
        ((code, told),) = _by_hand(out, ["--data", text, "--overwrite"])
        assert (code, f"--out {out}: a run is at work in it" in told) == (2, True)
        with pytest.raises(InputError, match="a run is at work in it"), OutFolder(out).claimed(TrainConfig()):
            pass
    assert_same(out, finished[0])


def _by_hand(out, *flags_by_rank):
    """Exit code and standard error of workers that were started one by one, as on two machines."""
    port, running = forked.free_port(), []
    for rank, flags in enumerate(flags_by_rank):
        place = {"RANK": rank, "WORLD_SIZE": len(flags_by_rank), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        env = os.environ | {name: str(value) for name, value in place.items()}
        command = [*COMMAND, *SMALL, "--out", str(out), *map(str, flags)]
        running.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    told = [process.communicate(timeout=LIMIT)[1] for process in running]
    return [(process.returncode, text) for process, text in zip(running, told, strict=True)]


def test_worker_killed_under_torchrun_is_restarted_and_the_run_is_bit_for_bit(tmp_path, text, finished, monkeypatch):
    # torchrun keeps one store for all restarts, with the addresses of workers that are gone
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    train_runs.at_step(8, 1, "os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    (tmp_path / "script.py").write_text(
        "import runpy\nrunpy.run_path('sitecustomize.py')\nfrom demopt import cli\ncli.main()\n"
    )
    flags = ["train", *SMALL, "--data", str(text), "--out", str(tmp_path / "run"), "--resume-auto"]
    done = forked.torchrun(tmp_path / "script.py", *flags, ranks=2, cwd=tmp_path, restarts=1)
    assert "going on after step 6" in done.stdout
    assert_same(tmp_path / "run", finished[0])


def test_stopped_run_of_several_machines_goes_on_by_the_same_commands(tmp_path, text, monkeypatch):
    for name, value in train_runs.at_step(3, 0, "os.kill(os.getpid(), signal.SIGTERM)", tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    (code, told), _ = _by_hand(tmp_path / "run", ["--data", text], ["--data", text])
    again = "the same commands on all machines, and --resume"
    assert (code, told.splitlines()[-1]) == (143, f"stopped after step 3 of 12, saved; go on with: {again}")


def test_connected_workers_share_the_global_batch(tmp_path, text):
    """The parts of a step add up by every rank's own count, and the run ends with one model."""
    train_runs.here(tmp_path / "run", text, "--optimizer", "local", "--global-batch", 5, "--sync-every", 2)
    rows = metrics(tmp_path / "run")
    assert [row["tokens"] for row in rows] == [5 * 32 * row["step"] for row in rows]
    assert all(1 <= row["batch"] <= 4 for row in rows)
