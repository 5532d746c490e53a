"""Test processes that start in milliseconds, with everything imported: forked by a server that forks nothing else.

There is one server: a process cannot have a second one. Workers that are killed, or whose imports matter, are
started by `python`; so are those that fail: of forked failures, torch's launcher reports one, not always the first.
"""

import importlib
import logging
import multiprocessing
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest

os.environ["RUST_LOG"] = "error"  # torchft reads it when it is imported
LIMIT = 600  # seconds for anything that a test waits for: only a hang takes so long
# Flags of a run of a tiny model.
TINY = "--preset tiny --layers 1 --sequence 32 --batch 2 --eval-every 100000 --eval-sequences 6 --threads 1"
CONTEXT = multiprocessing.get_context("forkserver")
# Modules that are not installed are left out.
CONTEXT.set_forkserver_preload(
    [
        "torch", "demopt.exchange", "demopt.train.worker", "demopt.integrations.torchft", "torch._dynamo", "torchft",
        "transformers.models.llama.modeling_llama", "transformers.trainer", "accelerate",
    ]
)  # fmt: skip


def elastic_launch(how: Any, python: str) -> Callable[..., Any]:
    """Replaces torch's function of this name: the same launcher, but it forks workers instead of starting `python`."""
    del python
    from torch.distributed.launcher.api import elastic_launch

    how.start_method = "forkserver"
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it logs the real one's silent steps
    return lambda *command: elastic_launch(how, _run)(command, dict(os.environ), os.getcwd(), os.getpid())


def torchrun(script: Path, *words: str, ranks: int, cwd: Path, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """`torchrun --standalone --nproc-per-node RANKS SCRIPT WORDS` succeeds, with this process as the launcher."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig

    with tempfile.TemporaryDirectory() as scratch, output() as (out, err), pytest.MonkeyPatch.context() as patch:
        how = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", local_addr="localhost", max_restarts=restarts,
            logs_specs=DefaultLogsSpecs(log_dir=scratch), signals_to_handle="SIGQUIT",  # this process handles others
        )  # fmt: skip
        patch.chdir(cwd)
        try:
            elastic_launch(how, sys.executable)(str(script), *words)
        except ChildFailedError as error:
            raise AssertionError(f"{error}\n{read(err)[-5000:]}") from error
        return subprocess.CompletedProcess([str(script), *words], 0, read(out), read(err))


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Polls until `condition()` is true; fails if that takes too long or the process ends first."""
    limit = time.monotonic() + LIMIT
    while not condition():
        assert process is None or process.poll() is None, f"the process ended early: {process.communicate()}"
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.005)


def code_of(call: Callable[[], object]) -> int:
    """The exit code of a process that is forked from this one to make a call: 1 if the call raises."""
    child = multiprocessing.get_context("fork").Process(target=call)
    child.start()
    child.join()
    return child.exitcode


def free_ports(count: int) -> list[int]:
    """Ports that are free now, below those that Linux gives to outgoing connections (from 32768)."""
    while True:
        found = random.SystemRandom().sample(range(10_000, 32_768), count)
        with suppress(OSError), ExitStack() as held:  # all held at the same time
            for port in found:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return found


def free_port() -> int:
    return free_ports(1)[0]


@contextmanager
def accelerate_rank(rank: int, world_size: int) -> Iterator[None]:
    """Makes Accelerate find this rank as if a launcher had started it, in the process group of a test."""
    from accelerate.state import AcceleratorState, PartialState

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    names |= {"OMP_NUM_THREADS": 1}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}):
        try:
            yield
        finally:
            AcceleratorState._reset_state()
            PartialState._reset_state()


def demopt(*words: object, codes: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
    """Runs `demopt WORDS` in this process until it exits with one of these codes; its workers are forked."""
    from demopt import cli
    from demopt.train import launch

    arguments = ["demopt", *map(str, words)]
    changed = mock.patch.object(sys, "argv", arguments), mock.patch.object(launch, "elastic_launch", elastic_launch)
    with output() as (out, err), changed[0], changed[1], mock.patch.dict(os.environ):
        with pytest.raises(SystemExit) as end:
            cli.main()
        done = subprocess.CompletedProcess(arguments, end.value.code or 0, read(out), read(err))
    assert done.returncode in codes, done.stderr
    return done


@contextmanager
def output() -> Iterator[tuple[IO[str], IO[str]]]:
    """Two files that take the output of this process and of its children."""
    with (
        tempfile.TemporaryFile("a+", encoding="utf-8") as out,
        tempfile.TemporaryFile("a+", encoding="utf-8") as err,
        _descriptor(1, out),
        _descriptor(2, err),
        mock.patch.multiple(sys, stdout=out, stderr=err),
    ):
        yield out, err


def read(file: IO[str]) -> str:
    file.flush()
    file.seek(0)
    return file.read()


@contextmanager
def _descriptor(number: int, file: IO[str]) -> Iterator[None]:
    before = os.dup(number)
    os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        os.dup2(before, number)
        os.close(before)


def _run(command: tuple[str, ...], environment: dict[str, str], folder: str, launcher: int) -> None:
    """The life of a worker: `python COMMAND...`, as if the launcher had started it."""
    import torch

    os.environ.update(environment)
    os.chdir(folder)
    for number in (1, 2):
        os.dup2(os.open(f"/proc/{launcher}/fd/{number}", os.O_WRONLY | os.O_APPEND), number)
    torch.set_num_threads(1)  # as torchrun does
    module, *words = (word for word in command if word != "-P")  # -P is an option of `python`
    try:
        with mock.patch.multiple(os, _exit=sys.exit, getppid=lambda: launcher):  # the launcher waits for an answer
            if module == "-m":
                sys.argv = words
                importlib.import_module(words[0]).main()
            else:
                sys.argv = [module, *words]
                sys.path.insert(0, str(Path(module).parent))
                runpy.run_path(module, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
