"""Ranks for tests: real processes over gloo, kept warm between tests, and threads of this process.

    results = ranks.run(function, world_size, *args)        # function(rank, world_size, *args) in processes of a group
    outcomes = ranks.outcomes(function, world_size, *args)  # the same, with errors as values
    results = ranks.threads(function, world_size, *args)    # function(exchange, *args) in threads
    @ranks.each(world_size)                                 # each of these ranks runs the test, with its `rank`
    @ranks.alike(world_size)                                # each thread does, with its `exchange`

A function for processes lives at the top of its module, so that it can be found by name.
"""

import functools
import importlib
import inspect
import os
import pickle
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from demopt.exchange import Threads
from forked import CONTEXT

GLOO_SECONDS = 300.0  # for a collective of a job: only a hang takes so long
JOB_SECONDS = 600.0  # for a whole job
LEAVE_SECONDS = 5.0  # the longest that a rank that is done waits for the others


@dataclass(frozen=True)
class Outcome:
    """The value that a rank's function returned, or its error."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    at: float = 0.0  # time.monotonic(), which all processes of a machine share


class RankDiedError(Exception):
    """A rank's process ended, or did not answer in time."""


class RemoteError(Exception):
    """The traceback of another process, as the cause of an error raised here."""


class Pool:
    """Rank processes that run one job after another."""

    def __init__(self) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._jobs = 0
        # The stores of all jobs are kept: a rank that fails may touch its store once more after it has answered.
        self._stores = tempfile.TemporaryDirectory()

    def outcomes(self, function: Callable[..., Any], world_size: int, *args: Any) -> list[Outcome]:
        """`function(rank, world_size, *args)` on each of `world_size` gloo ranks; errors are returned.

        If a process died or hung, all are ended; the next job starts fresh ones.
        """
        self._grow(world_size)  # before the clock starts: the first start imports torch
        self._jobs += 1
        for rank, (_, connection) in enumerate(self._workers[:world_size]):
            job = pickle.dumps((function, rank, world_size, f"{self._stores.name}/{self._jobs}", args))
            connection.send_bytes(pickle.dumps((sys.path, job)))
        deadline = time.monotonic() + JOB_SECONDS
        answers = [self._answer(rank, deadline) for rank in range(world_size)]
        if any(isinstance(answer.error, RankDiedError) for answer in answers):
            self.close()
        return answers

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []

    def _grow(self, world_size: int) -> None:
        """Starts the missing processes, and waits until they can take a job."""
        known = len(self._workers)
        while len(self._workers) < world_size:
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        for _, connection in self._workers[known:]:
            connection.recv_bytes()

    def _answer(self, rank: int, deadline: float) -> Outcome:
        process, connection = self._workers[rank]
        try:
            if not connection.poll(max(deadline - time.monotonic(), 0.0)):
                return Outcome(error=RankDiedError(f"rank {rank} did not answer in time"))
            answer: Outcome = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            process.join(1.0)
            return Outcome(error=RankDiedError(f"rank {rank} died, exit code {process.exitcode}"))
        return answer


POOL = Pool()
outcomes = POOL.outcomes


def run(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`function(rank, world_size, *args)` on each of W gloo ranks: returns all values, or raises the earliest error."""
    return values_of(outcomes(function, world_size, *args))


def each(world_size: int, run: Callable[..., Any] = run) -> Callable[..., Any]:
    """Makes a function a test that each of `world_size` gloo ranks runs, with pytest's arguments and its `rank`.

    All must return the same.
    """

    def of_all(function: Callable[..., Any], given: dict[str, Any]) -> list[Any]:
        return run(_by_name, world_size, function.__module__, function.__name__, given)

    return functools.partial(_test, of_all, "rank")


def _by_name(rank: int, world_size: int, module: str, name: str, given: dict[str, Any]) -> Any:
    function = getattr(importlib.import_module(module), name).__wrapped__
    return function(**given, **({"rank": rank} if "rank" in inspect.signature(function).parameters else {}))


def alike(world_size: int) -> Callable[..., Any]:
    """As `each`, for threads, which get their `exchange`."""

    def of_all(function: Callable[..., Any], given: dict[str, Any]) -> list[Any]:
        return threads(lambda exchange: function(exchange, **given), world_size)

    return functools.partial(_test, of_all, "exchange")


def _test(of_all: Callable[..., list[Any]], own: str, function: Callable[..., Any]) -> Callable[..., None]:
    """A test that has all ranks run a function; the ranks' own argument is not in its signature."""

    @functools.wraps(function)
    def test(**given: Any) -> None:
        first, *others = of_all(function, given)
        assert others == [first] * len(others)

    given = inspect.signature(function).parameters
    test.__signature__ = inspect.Signature([given[name] for name in given if name != own])
    return test


def threads(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`function(exchange, *args)` in each of `world_size` threads: returns all values; the first error ends all."""
    shared = Threads(world_size, timeout=100.0)  # only a hang takes so long
    with one_core():
        try:
            return shared.run(lambda exchange: function(exchange, *args))
        finally:
            shared.close()


@contextmanager
def one_core() -> Iterator[None]:
    """Threads that are started inside share a core, where the system supports that.

    Ranks call many small torch operations, and each lets go of the interpreter's lock. Threads on two cores then spend
    as much time on that lock as on their work.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {random.choice(sorted(cores))})  # of this thread; those it starts inherit it
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def values_of(found: list[Outcome]) -> list[Any]:
    """Returns each rank's value, or raises the earliest error."""
    failed = {rank: outcome for rank, outcome in enumerate(found) if outcome.error is not None}
    if failed:
        told = "\n".join(f"rank {rank}:\n{each.trace or each.error}" for rank, each in failed.items())
        raise min(failed.values(), key=lambda each: each.at).error from RemoteError(told)  # others often follow from it
    return [outcome.value for outcome in found]


def _attempt(call: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(value=call())
    except BaseException as error:
        return Outcome(error=error, trace=traceback.format_exc(), at=time.monotonic())


def _serve(connection: Connection) -> None:
    """The life of a rank's process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # no rank is done, or dead, while others still connect
    torch.set_num_threads(1)
    connection.send_bytes(b"ready")
    while True:
        try:
            path, pickled = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        sys.path[:] = path
        # The group outlives the job's objects. If a DistributedDataParallel dropped it last, the group's threads would
        # end while the interpreter's lock is held, which they may wait for. Dropping Python's reference releases the
        # lock: in torch 2.6, the reference to the backend, which therefore goes last.
        group: list[Any] = []
        connection.send_bytes(_pickled(_attempt(lambda job=pickled, group=group: _run(group, *pickle.loads(job)))))
        group.clear()


def _pickled(outcome: Outcome) -> bytes:
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)
    except Exception:  # an error or a value that cannot be pickled: its text is sent
        name = type(outcome.error or outcome.value).__name__
        error = RuntimeError(f"cannot be pickled: {name}: {outcome.error}")
        return pickle.dumps(Outcome(error=error, trace=outcome.trace, at=outcome.at))
    return data


def _run(group: list[Any], function: Callable[..., Any], rank: int, world_size: int, file: str, args: Any) -> Any:
    """Returns what the job's function returns; leaves the process group in `group`."""
    store = dist.FileStore(file, world_size)
    timeout = timedelta(seconds=GLOO_SECONDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        group += [dist.group.WORLD._get_backend(torch.device("cpu")), dist.group.WORLD]  # `clear` drops the last first
        try:
            return function(rank, world_size, *args)
        finally:
            _wait_for_others(store, world_size)
            dist.destroy_process_group()


def _wait_for_others(store: dist.Store, world_size: int) -> None:
    """A rank that leaves early closes its connections, and others may still be reading from them."""
    deadline = time.monotonic() + LEAVE_SECONDS
    ended = store.add("ended", 1)
    failed = sys.exc_info()[0] is not None
    while not failed and ended < world_size and time.monotonic() < deadline:
        time.sleep(0.001)
        ended = store.add("ended", 0)
