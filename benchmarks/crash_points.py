"""Kills, or fails, what writes files at every call that changes the disk, and checks what is left.

    python benchmarks/crash_points.py
    python benchmarks/crash_points.py --every 7      # the short form, which CI runs

A little C library that is loaded before libc counts the calls that change the disk (write, fsync, rename, unlink,
...). For each of them, and for each way to end there, a forked process saves; its n-th call is where it is killed, is
killed after half of the bytes, or is told that the disk is full. Afterwards the newest checkpoint must load and be the
one before or the one after, bit for bit, and the next save must work; metrics.jsonl, config.json and the runs of
`demopt compare` must have lost nothing that was in them. Exits with 1 if not; with 77 if there is no C compiler.
"""

import argparse
import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

import demopt
from demopt.compare.store import append_row, read_rows
from demopt.errors import DemoptError
from demopt.train import checkpoint, records
from demopt.train.assemble import read_file
from demopt.train.config import InputError, TrainConfig
from demopt.train.folder import COUNTED, MEASURED, RunFolder
from demopt.train.integrity import damage
from demopt.train.team import Team

NO_COMPILER = 77
KILLED, DISK_FULL, NO_SUCH_CALL = "killed", "the disk was full", "there is no such call"
WAYS = ("killed", "killed after half of a write", "told that the disk is full")
COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static long seen, at;
static int way;

void arm(long call, int how) { seen = 0; at = call; way = how; }
long calls(void) { return seen; }

static int due(void) {
    if (!at || ++seen != at) return 0;
    if (way == 0) kill(getpid(), SIGKILL);
    if (way == 2) errno = ENOSPC;
    return 1;
}
static int is_file(int fd) { struct stat s; return at && fstat(fd, &s) == 0 && S_ISREG(s.st_mode); }

#define REAL(type, name, ...) type (*real)(__VA_ARGS__) = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)
#define WRAP(name, parameters, arguments, ...) \
    int name parameters { REAL(int, name, __VA_ARGS__); \
        if (due()) { if (way == 2) return -1; kill(getpid(), SIGKILL); } return real arguments; }

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    if (is_file(fd) && due()) {
        if (way == 2) return -1;
        real(fd, data, size / 2);
        kill(getpid(), SIGKILL);
    }
    return real(fd, data, size);
}
WRAP(fsync, (int fd), (fd), int)
WRAP(fdatasync, (int fd), (fd), int)
WRAP(rename, (const char *a, const char *b), (a, b), const char *, const char *)
WRAP(renameat, (int d, const char *a, int e, const char *b), (d, a, e, b), int, const char *, int, const char *)
WRAP(mkdir, (const char *a, mode_t m), (a, m), const char *, mode_t)
WRAP(mkdirat, (int d, const char *a, mode_t m), (d, a, m), int, const char *, mode_t)
WRAP(unlink, (const char *a), (a), const char *)
WRAP(unlinkat, (int d, const char *a, int f), (d, a, f), int, const char *, int)
WRAP(rmdir, (const char *a), (a), const char *)
WRAP(ftruncate64, (int fd, off_t n), (fd, n), int, off_t)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name, const char *, int, ...); \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if ((flags & (O_CREAT | O_TRUNC)) && due()) { if (way == 2) return -1; kill(getpid(), SIGKILL); } \
        return real(path, flags, mode); }
OPEN(open)
OPEN(open64)
"""


@dataclass(frozen=True)
class Subject:
    """Something that writes: `prepare` a folder, `act` on it, and `check`, which raises AssertionError."""

    name: str
    prepare: Callable[[Path], None]
    act: Callable[[Path], None]
    check: Callable[[Path], None]


# Checkpoints

SETTINGS = TrainConfig(preset="tiny").record()
ALONE = Team(0, 1, torch.device("cpu"))


def trained(steps: int) -> tuple[torch.nn.Module, demopt.DeMo]:
    """A model and its optimizer after so many steps, always the same."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    optimizer = demopt.DeMo(model.parameters(), lr=0.1, chunk=4, top_k=2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def save(folder: Path, step: int) -> None:
    run = RunFolder(folder)
    with run.writing():
        checkpoint.save(run.checkpoints, records.Saved(step, "text", SETTINGS, 0), *trained(step), ALONE, True)


def prepare_checkpoints(folder: Path) -> None:
    for step in (1, 2):
        save(folder, step)


def act_checkpoints(folder: Path) -> None:
    save(folder, 3)


def check_checkpoints(folder: Path) -> None:
    newest = records.newest(RunFolder(folder).checkpoints)
    assert newest is not None, "no checkpoint is left"
    assert damage(newest) is None, damage(newest)
    step = records.read(newest).step
    assert step in (2, 3), f"step {step} is the newest"
    model, optimizer = trained(0)
    checkpoint.load(newest, model, optimizer, ALONE, True)
    expected, was = trained(step)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs), f"the weights are not those of step {step}"
        assert torch.equal(optimizer.state[mine]["momentum"], was.state[theirs]["momentum"]), "another momentum"
    save(folder, 4)
    left = sorted(path.name for path in RunFolder(folder).checkpoints.iterdir())
    assert left == [f"step-{step:08d}", "step-00000004"], f"the next save leaves {left}"


# The run's record, its metrics, and the runs of compare

ROW = dict.fromkeys((*COUNTED, *MEASURED), 1)
ROWS = [{**ROW, "step": step, "loss": 1.0 / step} for step in range(1, 9)]


def prepare_metrics(folder: Path) -> None:
    RunFolder(folder).metrics.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def act_metrics(folder: Path) -> None:
    RunFolder(folder).rewind_metrics(5)
    with RunFolder(folder).metrics.open("a", encoding="utf-8") as file:
        for row in ROWS[5:7]:
            file.write(json.dumps(row) + "\n")
            file.flush()


def check_metrics(folder: Path) -> None:
    run = RunFolder(folder)
    assert run.read_metrics()[:5] == ROWS[:5]
    run.rewind_metrics(5)
    assert run.read_metrics() == ROWS[:5]


def prepare_record(folder: Path) -> None:
    RunFolder(folder).claim(TrainConfig(steps=5))


def act_record(folder: Path) -> None:
    RunFolder(folder).claim(TrainConfig(steps=6, resume=True))


def check_record(folder: Path) -> None:
    assert read_file(RunFolder(folder).config)["steps"] in (5, 6)


def run_row(number: int) -> dict[str, Any]:
    """A line of runs.jsonl."""
    point = {"step": 1, "val_loss": 2.0, "sent_bytes": 1, "received_bytes": 1}
    words = dict.fromkeys(("name", "command", "date", "machine", "torch", "demopt"), "x" * 3000)
    return {"key": str(number), **words, **ROW, "val_loss": 1.0, "seed": 0, "seconds": 1, "curve": [point]}


def prepare_store(folder: Path) -> None:
    append_row(folder / "runs.jsonl", run_row(1))


def act_store(folder: Path) -> None:
    for number in (2, 3):
        append_row(folder / "runs.jsonl", run_row(number))


def check_store(folder: Path) -> None:
    before = read_rows(folder / "runs.jsonl")
    assert before["1"] == run_row(1)
    append_row(folder / "runs.jsonl", run_row(4))
    assert read_rows(folder / "runs.jsonl") == {**before, "4": run_row(4)}


SUBJECTS = [
    Subject("checkpoint", prepare_checkpoints, act_checkpoints, check_checkpoints),
    Subject("metrics.jsonl", prepare_metrics, act_metrics, check_metrics),
    Subject("config.json", prepare_record, act_record, check_record),
    Subject("runs.jsonl", prepare_store, act_store, check_store),
]


def attack(subject: Subject, counter: Any, every: int) -> tuple[int, list[str]]:
    """Returns how many crashes were made, and what was wrong after them."""
    made, wrong = 0, []
    with tempfile.TemporaryDirectory() as root:
        ready = Path(root) / "ready"
        ready.mkdir()
        in_a_child(lambda: subject.prepare(ready))
        for way, text in enumerate(WAYS):
            call = 1 + way  # so that the short form meets different calls in different ways
            while True:
                folder = Path(root) / f"{way}-{call}"
                shutil.copytree(ready, folder)
                ended = in_a_child(functools.partial(act, subject, folder, counter, call, way))
                if ended == NO_SUCH_CALL:
                    break
                made += 1
                survived = ended not in (KILLED, DISK_FULL)
                told = ended if survived else in_a_child(functools.partial(subject.check, folder))
                if told:
                    wrong.append(f"{subject.name}: {text} at call {call}: {told}")
                shutil.rmtree(folder)
                call += every
    return made, wrong


def act(subject: Subject, folder: Path, counter: Any, call: int, way: int) -> str:
    """Returns how it ended, if it did not end by being killed."""
    counter.arm(call, way)
    try:
        subject.act(folder)
    except (OSError, DemoptError, InputError) as error:
        counter.arm(0, 0)
        named = any(text in str(error) for text in ("No space left on device", "is the disk full?"))
        return DISK_FULL if named else f"{type(error).__name__}: {error}"
    counted = counter.calls()
    counter.arm(0, 0)
    return NO_SUCH_CALL if counted < call else DISK_FULL  # where it does not matter: something is left to delete


def in_a_child(work: Callable[[], str | None]) -> str:
    """Runs `work` in a forked process; returns what it returns, its error, or that it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = "no answer"
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            told = work() or ""
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, told.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        told = answer.read().decode()
    status = os.waitpid(child, 0)[1]
    return KILLED if os.WIFSIGNALED(status) else told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="try every n-th call only")
    parser.add_argument("--results", type=Path, help="a JSON file for the counts")
    given = parser.parse_args()
    if "LD_PRELOAD" not in os.environ:
        return restart()
    counter = ctypes.CDLL(os.environ["LD_PRELOAD"])
    with tempfile.TemporaryDirectory() as folder:  # what is imported and compiled now is not in every child
        trained(1)
        save_sharded({"a": torch.zeros(1)}, storage_writer=FileSystemWriter(folder), no_dist=True)
    told, all_wrong = {}, []
    for subject in SUBJECTS:
        made, wrong = attack(subject, counter, given.every)
        told[subject.name] = {"crashes": made, "wrong": wrong}
        all_wrong += wrong
        print(f"{subject.name}: {made} crashes, {len(wrong)} wrong", flush=True)
    if given.results is not None:
        given.results.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print("\n".join(all_wrong), file=sys.stderr)
    return 1 if all_wrong else 0


def restart() -> int:
    """Runs this program again with the library in front of libc."""
    compiler = shutil.which("cc")
    if compiler is None:
        print("there is no C compiler", file=sys.stderr)
        return NO_COMPILER
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "counter.c", Path(folder) / "counter.so"
        source.write_text(COUNTER)
        subprocess.run([compiler, "-w", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        return subprocess.run(
            [sys.executable, *sys.argv], env={**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
