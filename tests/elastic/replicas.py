"""Replicas for tests of torchft: real processes, a real lighthouse; each runs a function with an optimizer.

with Cluster(min_replicas=2) as cluster:
    one = cluster.start(function, *args)       # function(make_manager, ears, *args) in a process of its own
    one.wait_for("word")                       # until the function calls ears.say("word", value)
    one.tell(order)                            # ears.hear() returns it
    one.wait_for("result")                     # what the function returned
"""

import logging
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forked import CONTEXT

SECONDS = 200.0  # for anything that a test waits for: only what hangs takes so long
TIMEOUT = timedelta(seconds=100)  # of a manager


class Cluster:
    """A lighthouse, and replicas that know it; at its end all are killed."""

    def __init__(self, min_replicas: int) -> None:
        pytest.importorskip("torchft", reason="torchft is not installed (extra elastic)")
        from torchft.coordination import LighthouseServer

        self._min_replicas = min_replicas
        # A busy machine is slow: a quorum waits for all whose heart has beaten in the last seconds.
        limits = {"join_timeout_ms": 60_000, "heartbeat_timeout_ms": 3000}
        self._lighthouse = LighthouseServer(bind="[::]:0", min_replicas=min_replicas, **limits)
        self._replicas: list[Replica] = []

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        for replica in self._replicas:
            replica.process.kill()
            replica.process.join()
        self._lighthouse.shutdown()

    def start(self, function: Callable[..., Any], *args: Any) -> "Replica":
        address = f"http://localhost:{self._lighthouse.address().rpartition(':')[2]}"
        self._replicas.append(Replica(address, self._min_replicas, function, args))
        return self._replicas[-1]


class Replica:
    """A process that runs a function."""

    def __init__(self, lighthouse: str, min_replicas: int, function: Callable[..., Any], args: Any) -> None:
        self._connection, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(
            target=_run, args=(lighthouse, min_replicas, function, args, Ears(theirs)), daemon=True
        )
        self.process.start()
        theirs.close()

    def wait_for(self, word: str) -> Any:
        """Returns what the replica says next, which is under this word."""
        assert self._connection.poll(SECONDS), f"no {word!r} within {SECONDS:g} s"
        said, value = self._connection.recv()
        assert said == word, f"a replica said {said!r} while {word!r} was awaited:\n{value}"
        return value

    def tell(self, order: Any) -> None:
        self._connection.send(order)


class Ears:
    """What a replica's function hears and says."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def say(self, word: str, value: Any = None) -> None:
        self._connection.send((word, value))

    def hear(self) -> Any:
        assert self._connection.poll(SECONDS), f"no order within {SECONDS:g} s"
        return self._connection.recv()


def _run(lighthouse: str, min_replicas: int, function: Callable[..., Any], args: Any, ears: Ears) -> None:
    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    store: Any = None  # which its manager needs as long as it lives

    def make_manager() -> Any:  # from here on the lighthouse counts this replica
        import torchft

        nonlocal store
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        return torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=TIMEOUT), min_replica_size=min_replicas, load_state_dict=None,
            state_dict=None, timeout=TIMEOUT, quorum_timeout=TIMEOUT, rank=0, world_size=1, store_addr="localhost",
            store_port=store.port, lighthouse_addr=lighthouse, hostname="localhost",
        )  # fmt: skip

    try:
        ears.say("result", function(make_manager, ears, *args))
    except BaseException:
        ears.say("error", traceback.format_exc())
    os._exit(0)
