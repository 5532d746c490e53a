"""Ctrl-C while a command starts: one line, code 130, and nobody is left behind.

Processes are held where they are to be interrupted, for longer than any test waits: nothing depends on speed.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

LIMIT = 280  # seconds for anything that is waited for
# Python imports this module in every process that finds it. A process waits where HOLD says, and leaves a file there:
# when it imports torch, or at its start if one of its own words is HOLD.
HOLD = """
import os, pathlib, sys, time
def hold():
    pathlib.Path(os.environ["HELD"], str(os.getpid())).touch()
    time.sleep(100000)
class AtTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            hold()
if os.environ["HOLD"] == "torch":
    sys.meta_path.insert(0, AtTorch())
elif os.environ["HOLD"] in sys.orig_argv:
    hold()
"""


def _start(folder: Path, hold: str, count: int, *words: str) -> "tuple[subprocess.Popen[str], list[int]]":
    """A command in a process group of its own, when `count` processes are held; and their ids."""
    held = folder / "held"
    held.mkdir()
    (folder / "sitecustomize.py").write_text(HOLD)
    (folder / "text.txt").write_text("some text to read, and to learn. " * 1000)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", "demopt.cli", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "HOLD": hold, "HELD": str(held)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _wait(lambda: process.poll() is not None or len(list(held.iterdir())) == count)
    assert process.poll() is None, process.communicate()
    return process, [int(file.name) for file in held.iterdir()]


def _wait(what: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT
    while not what():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.01)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _interrupt(process: "subprocess.Popen[str]", held: list[int]) -> str:
    """As a terminal does it: to all processes of the group. Returns what was said."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, told = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 130, told
    _wait(lambda: all(map(_gone, held)))
    return told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train"], "demopt: stopped before the first step\n"),
        (["simulate"], "demopt: stopped before the first step\n"),
        (["compare"], "demopt: stopped\n"),
        (["bench"], "demopt: stopped\n"),
        (["plan", "--params", "1M"], "demopt: stopped\n"),
        (["doctor"], "demopt: stopped\n"),
        (["eval", ".", "--data", "text.txt"], "demopt: stopped\n"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_ctrl_c_while_torch_is_imported_says_one_line(tmp_path: Path, words: list[str], told: str) -> None:
    pytest.importorskip("typer")
    assert _interrupt(*_start(tmp_path, "torch", 1, *words)) == told


TRAIN = ["train", "--preset", "tiny", "--data", "text.txt", "--out", "out"]


@pytest.mark.parametrize(("workers", "module"), [("2", "worker"), ("1:2", "replica")])
def test_ctrl_c_while_workers_start_leaves_nothing(tmp_path: Path, workers: str, module: str) -> None:
    if module == "replica":
        pytest.importorskip("torchft", reason="torchft is not installed (extra elastic)")
    words = [*TRAIN, "--workers", workers]
    told = _interrupt(*_start(tmp_path, f"demopt.train.{module}", 2, *words))
    assert told == "demopt: stopped before the first step\n"
    assert all(path.name.startswith(".") for path in (tmp_path / "out").iterdir())  # locks, and nothing of a run


def test_ctrl_c_while_processes_of_compare_start_says_one_line(tmp_path: Path) -> None:
    words = ["compare", "--quick", "--study", "reduction", "--jobs", "2", "--data", "text.txt", "--out", "out"]
    told = _interrupt(*_start(tmp_path, "--multiprocessing-fork", 2, *words))
    assert "Traceback" not in told
