"""Runs of `demopt train` on a little text: to the end in this process, or as real processes, watched and ended."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
from filelock import FileLock

import forked
from forked import LIMIT, wait_for

COMMAND = [sys.executable, "-m", "demopt.cli", "train"]
STEPS = 12
# What every test run shares, so that runs with the same flags are the same run.
SMALL = (
    "--preset tiny --layers 1 --sequence 32 --batch 2 --warmup 3 --eval-every 4 --eval-sequences 6 --workers 2 "
    f"--steps {STEPS} --save-every 3 --threads 1 --optimizer demo"
).split()


def arguments(out, text, *more):
    return [*COMMAND, *SMALL, "--data", str(text), "--out", str(out), *map(str, more)]


def run(out, text, *more, **how):
    """Run to the end, in processes of its own."""
    done = subprocess.run(arguments(out, text, *more), capture_output=True, text=True, timeout=LIMIT, **how)
    assert done.returncode == 0, done.stderr
    return done


def here(out, text, *more):
    """Run to the end with this process as the launcher; the workers are forked."""
    return forked.demopt("train", *arguments(out, text, *more)[len(COMMAND) :])


def resume(out, *more, **how):
    """The same for `--resume`."""
    return forked.demopt("train", "--resume", "--out", out, *more, **how)


def once(tmp_path_factory, name, make):
    """The folder of a run that pytest's processes share, for reading only, and what `make(folder)` returned for it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    out, made = shared / "shared" / name, shared / f"{name}.made"
    with FileLock(shared / f"{name}.lock"):
        if not made.exists():
            made.write_bytes(pickle.dumps(make(out)))
    return out, pickle.loads(made.read_bytes())


def as_killed(finished, out, last=STEPS):
    """The finished run, copied as if all its processes had been killed before its last step, which is not saved."""
    shutil.copytree(finished, out)
    for place in (f"checkpoints/step-{last:08d}", "model"):
        shutil.rmtree(out / place)
    lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (out / "metrics.jsonl").write_bytes(b"".join(lines[: last - 1]))
    return out


def start(out, text, *more, **how):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(arguments(out, text, *more), **{**pipes, **how})


# Python imports a module named sitecustomize in every process that finds one: with this one a rank runs an action
# before a step of its first start.
AT_STEP = """
import os, signal, sys, time
from pathlib import Path
if (os.environ.get("RANK"), os.environ.get("TORCHELASTIC_RESTART_COUNT")) == ("{rank}", "0"):
    import demopt.train.loop as loop
    train_steps = loop.train_steps
    def changed(training):
        draw = training.draw
        def held():
            if training.number + 1 == {step}:
                {action}
            return draw()
        training.draw = held
        train_steps(training)
    for module in filter(None, map(sys.modules.get, (loop.__name__, "demopt.train.worker"))):  # if forked
        module.train_steps = changed
"""


def at_step(step, rank, action, folder):
    """The environment of a run in which a rank runs `action` before a step; its module is in `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(AT_STEP.format(step=step, rank=rank, action=action))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def start_held(out, text, *more, number, release=True, **how):
    """Start a run and return when rank 0 has come to a step; there it waits to be killed or (`release`) stopped."""
    held = Path(f"{out}-{number}") / "held"
    until = f"{release} and training.stop_requested()"
    wait = f"Path({str(held)!r}).touch()\n                while not ({until}): time.sleep(0.01)"
    process = start(out, text, *more, env=at_step(number, 0, wait, held.parent), **how)
    wait_for(held.exists, process)
    return process


def metrics(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def resume_as(reference, out):
    """Resume to the end: the run is then the reference, bit for bit."""
    assert "going on after step" in resume(out).stdout
    assert_same(out, reference)


def assert_same(out, reference):
    """Two runs have the same losses and weights, bit for bit."""
    assert timeless(metrics(out)) == timeless(metrics(reference))
    (mine,), (other,) = ([*Path(each, "model").glob("*.safetensors")] for each in (out, reference))
    assert (mine.name, mine.read_bytes()) == (other.name, other.read_bytes())


def timeless(rows):
    """Rows without the values that differ from run to run: times, and bytes, as each start sends a handshake."""
    clock = ("_seconds", "sent_bytes", "received_bytes")
    return [{name: value for name, value in row.items() if not name.endswith(clock)} for row in rows]


def steps_done(out):
    path = Path(out) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def workers_of(process):
    """Process ids of the workers by rank: the launcher's children that run the worker module."""
    found = {}
    for child in psutil.Process(process.pid).children():
        with suppress(psutil.Error):  # it has ended
            if "demopt.train.worker" in child.cmdline():
                found[int(child.environ()["RANK"])] = child.pid
    return found


def alive(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
