"""The lighthouse: it knows which replicas live. `demopt lighthouse` runs one; a run on one machine starts its own.

Beside it, one port further, is a board: a store where the run leaves its settings for machines that join.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from demopt.errors import DemoptError, first_line
from demopt.train.config import Given, InputError
from demopt.train.team import INTERFACE, interfaces, is_loopback, way_to

SETTINGS = "demopt/settings"


def need_torchft() -> None:
    """Raise InputError if torchft is missing; silence what it writes to the terminal."""
    os.environ.setdefault("RUST_LOG", "error")  # it is read when torchft is imported
    try:
        import torchft  # noqa: F401
    except ModuleNotFoundError:
        raise InputError(
            "elastic training needs torchft (Linux, x86-64): pip install '.[elastic]' in demopt's clone"
        ) from None


class Lighthouse:
    """A lighthouse and its board, at `port` and the port after it; 0 chooses."""

    def __init__(self, port: int, min_workers: int, join_timeout: float, heartbeat_timeout: float) -> None:
        need_torchft()
        from torchft.coordination import LighthouseServer

        port = port or _two_free_ports()
        try:
            self._server = LighthouseServer(
                bind=f"[::]:{port}",
                min_replicas=min_workers,
                join_timeout_ms=round(1000 * join_timeout),
                heartbeat_timeout_ms=round(1000 * heartbeat_timeout),
            )
            self._board = TCPStore("0.0.0.0", port + 1, is_master=True, wait_for_workers=False)
        except (RuntimeError, OSError) as error:
            raise InputError(f"ports {port} and {port + 1} cannot be opened: {first_line(error)}") from None
        self.port = port

    def close(self) -> None:
        """Stop both."""
        self._server.shutdown()
        del self._board


def lighthouse(port: int, min_workers: int, join_timeout: float, heartbeat_timeout: float) -> int:
    """Run `demopt lighthouse` until it is stopped."""
    here = Lighthouse(port, min_workers, join_timeout, heartbeat_timeout)
    name = reachable_name()
    print(f"lighthouse at {name}:{here.port}, settings at {here.port + 1}; both ports must be reachable", flush=True)
    print(f"on each machine: demopt train --lighthouse {name}:{here.port} ...", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        here.close()
    return 0


def reachable_name() -> str:
    """Return a name of this machine for the others: its host name, or an address where the name is its loopback's.

    Examples:
        >>> reachable_name() != "127.0.1.1"
        True
    """
    name = socket.gethostname()
    try:
        if not is_loopback(socket.gethostbyname(name)):
            return name
    except OSError:
        pass
    return next((own for own in interfaces().values() if not is_loopback(own)), name)


@contextmanager
def told(address: str, seconds: float) -> Iterator[None]:
    """Turn torchft's error for a lighthouse that does not answer into one line.

    Examples:
        >>> with told("there:29510", 10.0):
        ...     raise RuntimeError("failed to connect to http://there:29510 within timeout of 10s")
        Traceback (most recent call last):
        demopt.errors.DemoptError: no answer from there:29510 in 10 s; is `demopt lighthouse` running there?
    """
    try:
        yield
    except RuntimeError as error:
        if "failed to connect" not in str(error):
            raise
        raise DemoptError(f"no answer from {address} in {seconds:g} s; is `demopt lighthouse` running there?") from None


def tell_if_silent(address: str, seconds: float) -> None:
    """Say so if nothing answers at a lighthouse; the workers wait `seconds` for it, because it may be started later."""
    host, port = split(address)
    try:
        with closing(socket.create_connection((host, port), 5.0)):
            pass
    except OSError as error:
        print(
            f"no answer from {address} ({error.strerror or error}); is `demopt lighthouse` running there? Waiting "
            f"for it, up to {seconds:g} s",
            file=sys.stderr,
            flush=True,
        )


def split(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT.

    Examples:
        >>> split("there:29510")
        ('there', 29510)
    """
    host, _, port = address.removeprefix("http://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise InputError(f"the lighthouse is {address!r}, wanted HOST:PORT, as `demopt lighthouse` prints it")
    return host, int(port)


def publish(address: str, settings: Given) -> None:
    """Leave the run's settings for machines that join. A lighthouse of torchft alone has no board: nothing happens."""
    try:
        _board(address, 2.0).set(SETTINGS, json.dumps(settings))
    except DemoptError:
        return


def settings_of(address: str) -> Given:
    """Return the settings of the run at a lighthouse; InputError if there is none."""
    split(address)  # before InputError, a ValueError, would count as a damaged record
    try:
        store = _board(address, 10.0)
        for tried in range(300):  # a long wait inside the store would keep Ctrl-C waiting
            if store.check([SETTINGS]):
                found: Given = json.loads(store.get(SETTINGS))
                return found
            if tried == 10:
                print(f"waiting for a run at {address}, up to 30 s ...", file=sys.stderr, flush=True)
            time.sleep(0.1)
    except DemoptError:
        raise InputError(f"no answer from {address}; is `demopt lighthouse` running there?") from None
    except (RuntimeError, ValueError):
        pass
    raise InputError(f"no run at {address} yet; start one with demopt train --lighthouse {address}")


def own_address(address: str) -> str:
    """Return this machine's address as the lighthouse's machine sees it, and make gloo use its interface."""
    host, _ = split(address)
    name, mine = way_to(host)
    if not mine:
        raise InputError(f"--lighthouse {address}: there is no way to {host} from this machine; is the name right?")
    if name:
        os.environ.setdefault(INTERFACE, name)
    return mine


def _board(address: str, seconds: float) -> Any:
    host, port = split(address)
    try:
        with closing(socket.create_connection((host, port + 1), seconds)):  # says no at once; the store would retry
            pass
        return TCPStore(host, port + 1, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    except (OSError, RuntimeError) as error:
        raise DemoptError(str(error)) from None


def _two_free_ports() -> int:
    for _ in range(100):
        with closing(socket.socket()) as one, closing(socket.socket()) as two:
            one.bind(("", 0))
            port: int = one.getsockname()[1]
            try:
                two.bind(("", port + 1))
            except (OSError, OverflowError):
                continue
            return port
    raise InputError("no two free ports in a row were found; run demopt lighthouse --port")
