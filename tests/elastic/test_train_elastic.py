"""`demopt train --workers MIN:MAX`: a worker that is killed is replaced, and the run goes on."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

LIMIT = 280.0
COMMAND = [sys.executable, "-m", "demopt.cli", "train"]
TINY = [
    *("--preset", "tiny", "--layers", "1", "--width", "32", "--sequence", "32", "--batch", "2", "--save-every", "20"),
    *("--eval-every", "1000", "--eval-sequences", "2", "--prompt", "", "--threads", "1"),
    *("--optimizer", "demo", "--heartbeat-timeout", "1", "--workers", "2:3", "--steps", "100000"),
]

pytest.importorskip("torchft", reason="torchft is not installed (extra elastic)")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return str(path)


def _rows(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written


def _replica(out: Path, slot: int) -> int:
    """The process of a slot, or 0."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if str(out / "config.json") in command and command[-3] == str(slot):
            return int(folder.name)
    return 0


def _wait(what: Any, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + LIMIT
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_worker_is_replaced_and_the_run_ends_as_one(tmp_path: Path, text: str) -> None:
    out = tmp_path / "run"
    command = [*COMMAND, *TINY, "--data", text, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _wait(lambda: any(row["members"] == 3 for row in _rows(out)), process)
        os.kill(_replica(out, 1), signal.SIGKILL)
        before = len(_rows(out))
        _wait(lambda: any(row["members"] == 2 for row in _rows(out)[before - 1 :]), process)
        _wait(lambda: _rows(out)[-1]["members"] == 3, process)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "worker 1 was lost (signal 9) and is started again" in told
    assert "Traceback" not in told
    rows = _rows(out)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    command += ["--resume", "auto", "--save-every", "0"]
    again = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert again.returncode == 2  # auto goes on, and then checks as always
    assert "--save-every is 0" in again.stderr


def test_a_run_goes_on_when_its_lighthouse_was_killed_and_started_again(tmp_path: Path, text: str) -> None:
    out, port = tmp_path / "run", _two_free_ports()
    lights = [sys.executable, "-m", "demopt.cli", "lighthouse", "--port", str(port)]
    lighthouse = subprocess.Popen(lights, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    where = ["--lighthouse", f"localhost:{port}", "--workers", "2", "--data", text, "--out", str(out)]
    command = [*COMMAND, *TINY, *where]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _wait(lambda: any(row["members"] == 2 for row in _rows(out)), process)
        lighthouse.kill()
        lighthouse.communicate(timeout=LIMIT)
        time.sleep(1)  # for a round to find nobody
        lighthouse = subprocess.Popen(lights, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        reached = len(_rows(out))
        _wait(lambda: len(_rows(out)) > reached + 5, process)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        lighthouse.kill()
        lighthouse.communicate(timeout=LIMIT)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    steps = [row["step"] for row in _rows(out)]
    assert steps == sorted(
        set(steps)
    )  # with a gap where the new lighthouse first knew only the worker that does not write


def test_a_stop_on_one_machine_is_told_on_the_others(tmp_path: Path, text: str) -> None:
    port = _two_free_ports()
    lights = [sys.executable, "-m", "demopt.cli", "lighthouse", "--port", str(port)]
    where = ["--lighthouse", f"localhost:{port}", "--workers", "1", "--min-workers", "2", "--data", text]
    outs = [tmp_path / "one", tmp_path / "other"]
    lighthouse = subprocess.Popen(lights, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    both = [
        subprocess.Popen(
            [*COMMAND, *TINY, *where, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for out in outs
    ]
    try:
        for out, process in zip(outs, both, strict=True):
            _wait(lambda out=out: len(_rows(out)) > 5, process)
        both[1].send_signal(signal.SIGINT)
        told = [process.communicate(timeout=LIMIT)[1] for process in both]
    finally:
        for process in (*both, lighthouse):
            process.kill()
        lighthouse.communicate(timeout=LIMIT)
    assert [process.returncode for process in both] == [130, 130], told
    assert "another machine stopped the run after step" in told[0]
    assert "saved; go on with --resume auto" in told[0]
    assert "another machine" not in told[1]
    assert all("two workers have one name" in each for each in told)  # of this one host


def _two_free_ports() -> int:
    """The first of two ports, one after the other, that nobody uses."""
    while True:
        with socket.socket() as one, socket.socket() as other, suppress(OSError, OverflowError):
            one.bind(("localhost", 0))
            port = int(one.getsockname()[1])
            other.bind(("localhost", port + 1))
            return port


def test_when_all_were_killed_the_same_command_goes_on_from_the_last_checkpoint(tmp_path: Path, text: str) -> None:
    out = tmp_path / "run"
    command = [*COMMAND, *TINY, "--data", text, "--out", str(out), "--resume", "auto"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _wait(lambda: len(_rows(out)) > 45, process)
    finally:
        process.kill()  # the launcher first, so that it starts nobody again
        for slot in range(3):
            if replica := _replica(out, slot):
                os.kill(replica, signal.SIGKILL)
    process.communicate(timeout=LIMIT)
    before = _rows(out)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _wait(lambda: _rows(out)[-1]["step"] > len(before) + 5, process)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 130, told
    assert "Traceback" not in told
    rows = _rows(out)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert "saved by rank" not in told  # a rank is a place in one round only
    assert rows[:40] == before[:40]  # to the checkpoint at 40; what came after it is trained again


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--workers", "1:2", "--optimizer", "adamw"], "--optimizer adamw needs all its workers"),
        (["--workers", "1:2", "--delay", "1"], "--delay 1: a round in the background cannot be voted on"),
        (["--lighthouse", "nowhere"], "wanted HOST:PORT"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(tmp_path: Path, text: str, flags: list[str], told: str) -> None:
    from demopt.train.config import InputError, assemble
    from demopt.train.elastic.crew import train_elastic

    given: dict[str, Any] = {"data": [text], "out": str(tmp_path), "preset": "tiny"}
    given |= {flag.removeprefix("--"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)}
    if "delay" in given:
        given["delay"] = 1
    with pytest.raises(InputError, match=told):
        train_elastic(assemble(given))


def test_checkpoint_of_a_run_whose_workers_come_and_go_is_refused_by_one_of_fixed_workers() -> None:
    from demopt.train.checkpoint import Saved, check_same_run
    from demopt.train.config import InputError, TrainConfig

    saved = Saved(3, "text", TrainConfig(workers=2, min_workers=1).record(), 1000)
    with pytest.raises(InputError, match="run is elastic: its workers come and go; go on as it was started"):
        check_same_run(saved, TrainConfig(workers=2).record(), "text")


@pytest.mark.parametrize("flags", ["--join-timeout -1", "--heartbeat-timeout 0.1", "--port 65535"])
def test_lighthouse_refuses_what_cannot_be(monkeypatch: Any, capsys: Any, flags: str) -> None:
    from demopt import cli

    monkeypatch.setattr(sys, "argv", ["demopt", "lighthouse", *flags.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert flags.split()[0] in capsys.readouterr().err


def test_join_says_what_is_wrong_with_an_address() -> None:
    from demopt.train.config import InputError
    from demopt.train.elastic.lighthouse import settings_of

    with pytest.raises(InputError, match="the lighthouse is 'localhost', wanted HOST:PORT"):
        settings_of("localhost")


def test_a_lighthouse_on_a_name_of_the_loopback_tells_an_address(monkeypatch: Any) -> None:
    from demopt.train.elastic import lighthouse

    monkeypatch.setattr(lighthouse.socket, "gethostbyname", lambda _: "127.0.1.1")
    monkeypatch.setattr(lighthouse, "interfaces", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.1"})
    assert lighthouse.reachable_name() == "10.0.0.1"
    monkeypatch.setattr(lighthouse.socket, "gethostbyname", lambda _: "10.0.0.1")
    assert lighthouse.reachable_name() == lighthouse.socket.gethostname()


def test_a_silent_lighthouse_is_told_at_once(capsys: Any) -> None:
    import socket

    from demopt.train.elastic.lighthouse import tell_if_silent

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        tell_if_silent(f"127.0.0.1:{port}", 600.0)
        assert capsys.readouterr().err == ""
    tell_if_silent(f"127.0.0.1:{port}", 600.0)
    told = capsys.readouterr().err
    assert f"no answer from 127.0.0.1:{port} (Connection refused)" in told
    assert "is `demopt lighthouse` running there? Waiting for it, up to 600 s" in told


def test_a_lighthouse_that_never_comes_ends_a_worker_without_a_traceback() -> None:
    from demopt.errors import DemoptError
    from demopt.train.elastic.lighthouse import told

    with pytest.raises(DemoptError, match="no answer from there:1 in 10 s"), told("there:1", 10.0):
        raise RuntimeError("failed to connect to http://there:1 within timeout of 10s; verify the address")
    with pytest.raises(RuntimeError, match="another"), told("there:1", 10.0):
        raise RuntimeError("another")
