"""Measures pairs of machines over HTTP. All run the same command and take turns, so that no two measure at once.

Each machine listens at the port of the future run. When all answer, the first asks each in turn to measure its links to
all others, and distributes the results.
"""

from __future__ import annotations

import http.client
import http.server
import json
import platform
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

import demopt
from demopt.train.config import InputError
from demopt.train.team import interface_to, interfaces

PINGS = 10
BULK_SECONDS = 1.0  # at least, of data in one go
MOST_BULK = 1 << 30
TRY_SECONDS = 5.0
TURN_SECONDS = 30.0  # at most, for one machine to measure one other
VERSIONS = {"demopt": demopt.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}
_PIECE = bytes(1 << 16)


@dataclass(frozen=True)
class Pair:
    """The link from one machine to another. `fault` is empty if it works; `unlike`: different versions there."""

    source: str
    target: str
    host: str = ""
    interface: str = ""
    rtt_ms: float = 0.0
    bits_per_second: float = 0.0
    unlike: str = ""
    fault: str = ""


def own_address(peers: list[str]) -> str:
    """Returns the one of the peers' addresses that is this machine's."""
    here, mine = set(interfaces().values()), []
    for peer in peers:
        try:
            mine += [peer] if socket.gethostbyname(peer) in here else []
        except OSError:
            raise InputError(f"--peers {peer}: no address for this name; give the address") from None
    if len(mine) != 1:
        raise InputError(
            f"--peers {' '.join(peers)}: wanted exactly one address of this machine ({', '.join(sorted(here))}), got "
            f"{len(mine)}; name every machine once, in the same order on all"
        )
    return mine[0]


def measure_pairs(me: str, peers: list[str], port: int, wait: float) -> list[Pair]:
    """Takes part until all pairs are measured; returns them. Machines that never come are rows with a fault."""
    others, leads = [peer for peer in peers if peer != me], me == peers[0]
    results: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

    def mine() -> list[dict[str, Any]]:
        return [asdict(_measure(me, peer, port)) for peer in others]

    try:
        server = _Server((me, port), mine, results)
    except OSError as error:
        raise InputError(f"port {port}: {error.strerror}; stop the listening program, or give --port") from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        absent = _wait_for(others if leads else peers[:1], port, wait)
        if not leads:
            if not absent:
                with suppress(queue.Empty):
                    return [Pair(**row) for row in results.get(timeout=wait + TURN_SECONDS * len(peers) ** 2)]
            return [Pair(**row) for row in mine()]
        rows, present = mine(), [peer for peer in others if peer not in absent]
        for peer in present:
            with suppress(OSError, ValueError):  # it has gone since
                rows += _ask(peer, port, "/measure", TURN_SECONDS * len(peers))
        for peer in present:
            with suppress(OSError, ValueError):
                _ask(peer, port, "/results", TRY_SECONDS, json.dumps(rows).encode())
        return [Pair(**row) for row in rows]
    finally:
        server.shutdown()
        server.server_close()


def _wait_for(peers: list[str], port: int, wait: float) -> set[str]:
    """Waits until all of them answer; returns those that do not."""
    deadline, missing = time.monotonic() + wait, set(peers)
    while missing and time.monotonic() < deadline:
        for peer in sorted(missing):
            with suppress(OSError, ValueError):
                _ask(peer, port, "/hello", TRY_SECONDS)
                missing.remove(peer)
        time.sleep(0.2)
    return missing


def _measure(me: str, peer: str, port: int) -> Pair:
    interface = interface_to(peer)
    try:
        with closing(http.client.HTTPConnection(peer, port, timeout=TRY_SECONDS)) as connection:
            trips, hello = [], {}
            for _ in range(PINGS):
                begun = time.perf_counter()
                hello = _answer(connection, "/hello")
                trips.append(time.perf_counter() - begun)
            assert connection.sock is not None
            connection.sock.settimeout(TURN_SECONDS)
            size, taken = len(_PIECE), 0.0
            while taken < BULK_SECONDS and size < MOST_BULK:
                size *= 2
                begun = time.perf_counter()
                _answer(connection, "/bulk", (_PIECE for _ in range(size // len(_PIECE))), size)
                taken = time.perf_counter() - begun
            theirs = dict(hello["versions"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Pair(me, peer, interface=interface, fault=_in_words(error))
    unlike = ", ".join(f"{name} {theirs.get(name)}" for name, own in VERSIONS.items() if theirs.get(name) != own)
    return Pair(me, peer, str(hello["host"]), interface, 1e3 * statistics.median(trips), 8 * size / taken, unlike)


def _ask(peer: str, port: int, path: str, seconds: float, body: bytes = b"") -> Any:
    with closing(http.client.HTTPConnection(peer, port, timeout=seconds)) as connection:
        return _answer(connection, path, body, len(body))


def _answer(connection: http.client.HTTPConnection, path: str, body: Any = b"", size: int = 0) -> Any:
    """Returns the answer to a request; ValueError if it is not JSON, OSError if none comes."""
    try:
        connection.request("POST", path, body, {"Content-Length": str(size)})
        return json.loads(connection.getresponse().read())
    except (http.client.HTTPException, ValueError) as error:
        raise ValueError("another program answers there") from error


def _in_words(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refused: demopt doctor does not run there, or a firewall rejects the port"
    if isinstance(error, TimeoutError):
        return "no answer: the machine is off, the address wrong, or a firewall drops the port"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class _Server(http.server.ThreadingHTTPServer):
    def __init__(self, address: tuple[str, int], measure: Callable[[], Any], results: Any) -> None:
        self.measure, self.results = measure, results
        super().__init__(address, _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_POST(self) -> None:
        left, parts = int(self.headers["Content-Length"]), []
        while left > 0 and (part := self.rfile.read(min(left, len(_PIECE)))):
            left -= len(part)
            parts += [part] if self.path == "/results" else []
        if self.path == "/results":
            self.server.results.put(json.loads(b"".join(parts)))
        hello = {"host": socket.gethostname(), "versions": VERSIONS}
        text = json.dumps(self.server.measure() if self.path == "/measure" else hello).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""
