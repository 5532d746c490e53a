"""Replicas for tests of torchft: real processes, a real lighthouse; each runs a function with an optimizer.

with Cluster(min_replicas=1) as cluster:
    one = cluster.start(function, *args)       # function(make_manager, ears, *args) in a process of its own
    one.wait_for("word")                       # until the function calls ears.say("word", value)
    one.kill()                                 # SIGKILL
    one.result()                               # what it returned
"""

import logging
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forked import CONTEXT

SECONDS = 40.0  # for anything that a test waits for


class Cluster:
    """A lighthouse, and replicas that know it."""

    def __init__(self, min_replicas: int = 1, join_timeout_ms: int = 500, heartbeat_timeout_ms: int = 1000) -> None:
        pytest.importorskip("torchft", reason="torchft is not installed (extra elastic)")
        from torchft.coordination import LighthouseServer

        self._lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=min_replicas,
            join_timeout_ms=join_timeout_ms,
            heartbeat_timeout_ms=heartbeat_timeout_ms,
        )
        self._replicas: list[Replica] = []

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        for replica in self._replicas:
            replica.kill()
        self._lighthouse.shutdown()

    def start(
        self, function: Callable[..., Any], *args: Any, min_replicas: int = 1, timeout: float = 20.0
    ) -> "Replica":
        """Starts a replica."""
        address = f"http://localhost:{self._lighthouse.address().rpartition(':')[2]}"
        replica = Replica(address, min_replicas, timeout, function, args)
        self._replicas.append(replica)
        return replica


class Replica:
    """A process that runs a function."""

    def __init__(
        self, lighthouse: str, min_replicas: int, timeout: float, function: Callable[..., Any], args: Any
    ) -> None:
        self._said: Any = CONTEXT.Queue()
        self._seen: list[tuple[str, Any]] = []
        self._orders: Any = CONTEXT.Queue()
        how = (lighthouse, min_replicas, timeout, function, args, self._said, self._orders)
        self.process = CONTEXT.Process(target=_run, args=how, daemon=True)
        self.process.start()

    def wait_for(self, word: str) -> Any:
        """Returns what the replica said under this word next."""
        deadline = time.monotonic() + SECONDS
        while True:
            for at, (said, value) in enumerate(self._seen):
                if said == word:
                    del self._seen[at]
                    return value
                if said == "error":
                    raise AssertionError(f"a replica failed while {word!r} was awaited:\n{value}")
            try:
                self._seen.append(self._said.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"no {word!r} within {SECONDS:g} s; there was {self._seen}") from None

    def tell(self, order: Any) -> None:
        """Gives the replica something that its `hear` returns."""
        self._orders.put(order)

    def kill(self) -> None:
        """SIGKILL."""
        if self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join()

    def signal(self, number: int) -> None:
        """Sends a signal."""
        os.kill(self.process.pid or 0, number)

    def result(self) -> Any:
        """What the function returned."""
        return self.wait_for("result")


class Ears:
    """What a replica's function hears and says."""

    def __init__(self, said: Any, orders: Any) -> None:
        self._said, self._orders = said, orders

    def say(self, word: str, value: Any = None) -> None:
        """Tells the test something."""
        self._said.put((word, value))

    def hear(self) -> Any:
        """Waits for an order of the test."""
        return self._orders.get(timeout=SECONDS)


def _run(
    lighthouse: str, min_replicas: int, timeout: float, function: Callable[..., Any], args: Any, said: Any, orders: Any
) -> None:
    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)

    store: Any = None  # which its manager needs as long as it lives

    def make_manager() -> Any:  # from here on the lighthouse counts this replica
        import torchft

        nonlocal store
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        return torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=timeout)),
            min_replica_size=min_replicas,
            load_state_dict=None,
            state_dict=None,
            timeout=timedelta(seconds=timeout),
            quorum_timeout=timedelta(seconds=timeout),
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=store.port,
            lighthouse_addr=lighthouse,
            hostname="localhost",
        )

    ears = Ears(said, orders)
    try:
        ears.say("result", function(make_manager, ears, *args))
    except BaseException:
        ears.say("error", traceback.format_exc())
    said.close()
    said.join_thread()
    os._exit(0)
