"""Pairs of machines, measured: each machine runs the same command, and they take turns, so that no two measure at once.

Each listens on the port of the run to come. When all are there, the first measures its way to every other one, hands
its rows on to the next, and so on; the last one tells everybody. A message is a line of JSON.
"""

from __future__ import annotations

import json
import queue
import socket
import socketserver
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from demopt.train.config import InputError
from demopt.train.preflight import interfaces, way_to
from demopt.train.versions import versions

PINGS = 10
BULK_SECONDS = 2.0  # of data in each direction
_PIECE = 1 << 16
_LINE = 1 << 20  # the most that a message may have
_TRY_SECONDS = 5.0


@dataclass(frozen=True)
class Pair:
    """What one machine found on the way to another. `fault` is empty if it got there.

    Examples:
        >>> Pair("10.0.0.1", "10.0.0.2", fault="no answer").fault
        'no answer'
    """

    source: str
    target: str
    host: str = ""
    interface: str = ""
    rtt_ms: float = 0.0
    bits_per_second: float = 0.0
    clock_seconds: float = 0.0
    unlike: str = ""
    fault: str = ""


class Round:
    """This machine among the peers, which are addresses in the order of ranks."""

    def __init__(self, peers: list[str], port: int, wait: float) -> None:
        here = set(interfaces().values())
        mine = [peer for peer in peers if _address(peer) in here]
        if len(mine) != 1:
            raise InputError(
                f"--peers {' '.join(peers)}: wanted exactly one address of this machine ({', '.join(sorted(here))}), "
                f"got {len(mine)}; name every machine once, in the same order on all"
            )
        self.peers, self.me, self._port, self._wait = peers, mine[0], port, wait
        self._turns: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def run(self) -> list[Pair]:
        """Take part until all pairs are measured; return them. Machines that never come are rows with a fault."""
        others = [peer for peer in self.peers if peer != self.me]
        try:
            server = _Server(("", self._port), _Answer)
        except OSError as error:
            raise InputError(f"port {self._port}: {error.strerror}; stop what listens there or give --port") from None
        server.turns = self._turns
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            absent = self._absent(others)
            if self.peers.index(self.me) == 0:
                self._turns.put({"rows": [], "done": False})
            return self._take_turns(others, absent)
        finally:
            server.shutdown()
            server.server_close()

    def _absent(self, others: list[str]) -> dict[str, str]:
        """Wait until all others answer; return those that do not, and why."""
        deadline, missing = time.monotonic() + self._wait, dict.fromkeys(others, "")
        while missing and time.monotonic() < deadline:
            for peer in list(missing):
                try:
                    _ask(peer, self._port, {"kind": "hello"})
                    del missing[peer]
                except OSError as error:
                    missing[peer] = _in_words(error)
            time.sleep(0.2)
        return missing

    def _take_turns(self, others: list[str], absent: dict[str, str]) -> list[Pair]:
        rows: list[Pair] = []
        while True:
            try:
                turn = self._turns.get(timeout=self._wait + 30 * len(self.peers))
            except queue.Empty:
                return rows or [self._fault(peer, "its turn never ended") for peer in others]
            rows = [Pair(**row) for row in turn["rows"]]
            if turn["done"]:
                return rows
            for peer in others:
                rows.append(self._fault(peer, absent[peer]) if peer in absent else self._measure(peer))
            self._hand_on(rows, absent)

    def _hand_on(self, rows: list[Pair], absent: dict[str, str]) -> None:
        data = [asdict(row) for row in rows]
        for peer in self.peers[self.peers.index(self.me) + 1 :]:
            if peer not in absent:
                try:
                    _ask(peer, self._port, {"kind": "turn", "rows": data, "done": False})
                except OSError:  # it has gone since: the next one's turn
                    continue
                return
        for peer in self.peers:
            if peer not in absent and peer != self.me:
                with suppress(OSError):
                    _ask(peer, self._port, {"kind": "turn", "rows": data, "done": True})
        self._turns.put({"rows": data, "done": True})

    def _fault(self, peer: str, why: str) -> Pair:
        return Pair(self.me, peer, interface=way_to(peer)[0], fault=why)

    def _measure(self, peer: str) -> Pair:
        try:
            with socket.create_connection((peer, self._port), _TRY_SECONDS) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(10 * _TRY_SECONDS)
                file = connection.makefile("rwb")
                trips, offsets, hello = [], [], {}
                for _ in range(PINGS):
                    begun, clock = time.perf_counter(), time.time()
                    hello = _line(file, {"kind": "hello"})
                    trips.append(time.perf_counter() - begun)
                    offsets.append(hello["clock"] - (clock + trips[-1] / 2))
                rate = _rate(file)
        except (OSError, ValueError, KeyError) as error:
            return self._fault(peer, _in_words(error))
        mine = versions()
        unlike = ", ".join(
            f"{name} {hello['versions'].get(name)}" for name in mine if hello["versions"].get(name) != mine[name]
        )
        best = trips.index(min(trips))
        return Pair(
            self.me,
            peer,
            str(hello["host"]),
            way_to(peer)[0],
            1e3 * statistics.median(trips),
            rate,
            offsets[best],
            unlike,
        )


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    turns: queue.SimpleQueue[dict[str, Any]]


class _Answer(socketserver.StreamRequestHandler):
    """Answers one machine until it hangs up."""

    disable_nagle_algorithm = True
    timeout = 60

    def handle(self) -> None:
        while True:
            try:
                line = self.rfile.readline(_LINE)
                asked = json.loads(line) if line else None
            except (OSError, ValueError):
                return
            if not isinstance(asked, dict):
                return
            if asked.get("kind") == "bulk":
                self._take(int(asked["bytes"]))
            elif asked.get("kind") == "turn":
                assert isinstance(self.server, _Server)
                self.server.turns.put(asked)
            told = {"host": socket.gethostname(), "clock": time.time(), "versions": versions()}
            self.wfile.write(json.dumps(told).encode() + b"\n")

    def _take(self, size: int) -> None:
        while size > 0:
            got = self.rfile.read(min(size, _PIECE))
            if not got:
                return
            size -= len(got)


def _rate(file: Any) -> float:
    """Return the bits a second that arrive: sends twice as much again until it takes long enough."""
    size = _PIECE
    while True:
        begun = time.perf_counter()
        file.write(json.dumps({"kind": "bulk", "bytes": size}).encode() + b"\n")
        for _ in range(size // _PIECE):
            file.write(bytes(_PIECE))
        file.flush()
        json.loads(file.readline(_LINE))
        taken = time.perf_counter() - begun
        if taken > BULK_SECONDS / 2 or size >= 1 << 30:
            return 8 * size / taken
        size *= 2


def _line(file: Any, message: dict[str, Any]) -> dict[str, Any]:
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()
    answer = json.loads(file.readline(_LINE))
    if not isinstance(answer, dict):
        raise ValueError("what answers there is not demopt doctor")
    return answer


def _ask(peer: str, port: int, message: dict[str, Any]) -> None:
    with socket.create_connection((peer, port), _TRY_SECONDS) as connection:
        connection.settimeout(_TRY_SECONDS)
        try:
            _line(connection.makefile("rwb"), message)
        except ValueError:
            raise OSError("what answers there is not demopt doctor") from None


def _address(peer: str) -> str:
    try:
        return socket.gethostbyname(peer)
    except OSError:
        raise InputError(f"--peers {peer}: no address for this name; give the address") from None


def _in_words(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refused: demopt doctor does not run there, or a firewall rejects the port"
    if isinstance(error, TimeoutError):
        return "no answer: the machine is off, the address wrong, or a firewall drops the port"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
