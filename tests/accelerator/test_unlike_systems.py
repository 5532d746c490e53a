"""Workers on systems that lack Linux's features, and on an accelerator, decode a run to the same bits."""

import json
import re
import subprocess
import sys
import sysconfig
import time

import torch
import toy

import demopt
import forked
from demopt.runs.checkpoints import weights_digest
from demopt.runs.stop import put_stop
from demopt.train.data import batch, load_corpus
from demopt.train.method import make_optimizer
from demopt.train.model import backward, begin
from demopt.train.runs.worker import settings_of_run

FLAGS = f"{forked.TINY} --late 60 --keep-log"
# Imitates another system: torch built with USE_DISTRIBUTED=0, no fcntl (locks, network calls), no affinity, no SIGHUP,
# no files relative to an open folder, no compiled kernels. demopt itself may not even import torch.distributed.
POORER = """
import builtins, json, os, signal, sys
from importlib.abc import MetaPathFinder
from pathlib import Path

class Without(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch.distributed":
            for part in ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
                delattr(sys.modules["torch._C"], part)

sys.meta_path.insert(0, Without())
sys.modules["torch._C._distributed_c10d"] = None
import psutil, pydantic.dataclasses, rich.live, torch, transformers, typer
from transformers.models.llama import modeling_llama
assert not torch.distributed.is_available()

def refusing(name, globals=None, locals=None, fromlist=(), level=0, found=builtins.__import__):
    if str((globals or {}).get("__name__")).startswith("demopt") and name.startswith("torch.distributed"):
        raise ModuleNotFoundError(name)
    return found(name, globals, locals, fromlist, level)

builtins.__import__ = refusing
sys.modules["fcntl"] = None
del os.sched_getaffinity, signal.SIGHUP
os.supports_dir_fd.discard(os.open)
sys.platform, commands = sys.argv[1], json.loads(sys.argv[2])
import demopt
[getattr(demopt, name) for name in demopt.__all__]
from demopt.kernels import gate
gate.LIBRARY = Path("nowhere")
from demopt import cli
for command in commands:
    sys.argv = ["demopt", *command]
    try:
        cli.main()
    except SystemExit as end:
        print("exit", end.code)
"""


def _started(command):
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _poorer(system, *commands):
    """Starts a process, as on such a system, that runs `demopt WORDS` for each command."""
    listed = json.dumps([[*map(str, words)] for words in commands])
    return _started([sys.executable, "-c", POORER, system, listed])


def _ended(process, code=0):
    out, errors = process.communicate(timeout=600)
    assert process.returncode == code, out + errors
    return out


def _digest(printed):
    (digest,) = re.findall("sha256 (.{64})", printed)
    return str(digest)


def test_all_commands_of_a_run_work_without_what_linux_has(tmp_path):
    text, run = sysconfig.get_path("stdlib") + "/textwrap.py", tmp_path / "run"
    more = ["--data", text, "--steps", "10", "--sync-every", "5", *FLAGS.split()]
    train, join = ["train", "--run", run, "--out", tmp_path / "first", *more], ["join", run, "--out", tmp_path / "also"]
    others = ["status", run], ["stop", run], ["replay", run], ["train", "--workers", "2", "--out", tmp_path / "third"]
    process = _poorer("win32", train, join, *others)
    printed, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert [line for line in printed.splitlines() if line.startswith("exit")] == 5 * ["exit 0"] + ["exit 2"], errors
    assert "step 10 of 10" in printed
    assert "built without torch.distributed" in errors
    digests = re.findall("sha256 (.{64})", printed)
    assert len(digests) == 3
    joined = forked.demopt("join", run, "--out", tmp_path / "second", "--threads", "1")
    assert {*digests} == {_digest(joined.stdout)}


def _on_toy(rank, world_size, address):
    """Trains with the others in bfloat16, its state on the host; stops the run after three rounds of three senders."""
    config, run = settings_of_run(address, None, {}, patience=600.0)
    config, model = begin(config)
    text, step, full = load_corpus(config).train, 0, set()
    run.late = 60
    model.to("toy", torch.bfloat16).tie_weights()  # torch unties them on the way to a device of this kind
    optimizer = make_optimizer(config, model, run)
    assert isinstance(optimizer, demopt.LocalDeMo)
    assert {each.device.type for each in optimizer._weights.global_of.values()} == {"cpu"}
    optimizer.join()
    while not run.stopping:
        step += 1
        optimizer.zero_grad()
        backward(model, batch(text, config, step, rank=7), config, torch.device("toy"), config.tokens_per_step)
        optimizer.step()
        if run.decided is None:  # before the first round
            continue
        if len(run.decided.senders) == 3 and len(full) < 3:
            full.add(run.decided.round)
            if len(full) == 3:
                put_stop(run.store, run.decided.round, run.record.identity)
    run.wait_for_uploads()
    return weights_digest(optimizer.replicator)


def test_kernels_torch_operations_and_an_accelerator_in_one_run_have_one_digest(tmp_path):
    text, run = sysconfig.get_path("stdlib") + "/textwrap.py", tmp_path / "run"
    more = ["--steps", "10000000", "--sync-every", "10", *FLAGS.split()]
    first = _poorer("win32", ["train", "--run", run, "--out", tmp_path / "first", "--data", text, *more])
    while first.poll() is None and not (run / "run").exists():
        time.sleep(0.1)
    program, own = [sys.executable, "-m", "demopt.cli", "join", str(run)], ["--threads", "1", "--late", "60"]
    second = _started([*program, "--out", str(tmp_path / "second"), *own])
    on_device = toy.run(_on_toy, 1, str(run))[0]
    digests = {on_device, _digest(_ended(first)), _digest(_ended(second, 130))}
    assert digests == {_digest(_ended(_poorer("darwin", ["replay", run])))}
