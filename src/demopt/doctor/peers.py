"""Measures pairs of machines as a run would connect them: a store at the run's port, and gloo between each two.

All machines run the same command. The first has the store, decides who is present, and pairs take turns, so that no two
measure at once.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

import demopt
from demopt.errors import first_line
from demopt.train.config import InputError
from demopt.train.team import INTERFACE, gloo_address, interfaces

PINGS = 10
BULK_SECONDS = 1.0  # at least, of data in one go
FIRST_BULK, MOST_BULK = 1 << 17, 1 << 30  # bytes
TURN_SECONDS = 30.0  # at most, for a pair to connect, and for each of its messages
VERSIONS = {"demopt": demopt.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}


@dataclass(frozen=True)
class Pair:
    """The link from one machine to another. `fault` is empty if it works; `unlike`: different versions there."""

    source: str
    target: str
    host: str = ""
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
        except (OSError, UnicodeError):
            raise InputError(f"--peers {peer}: no address for this name; give the address") from None
    if len(mine) != 1:
        raise InputError(
            f"--peers {' '.join(peers)}: wanted exactly one address of this machine ({', '.join(sorted(here))}), got "
            f"{len(mine)}; name every machine once, in the same order on all"
        )
    return mine[0]


def measure_pairs(me: str, peers: list[str], port: int, wait: float) -> list[Pair]:
    """Takes part until all pairs are measured; returns them. Machines that never come are rows with a fault."""
    leads = me == peers[0]
    if not leads and (fault := _unreachable(peers[0], port, wait)):
        return [Pair(me, peers[0], fault=fault)]
    try:
        store = TCPStore(peers[0], port, None, leads, timedelta(seconds=max(1.0, wait)), wait_for_workers=False)
    except RuntimeError as error:
        raise InputError(f"port {port}: {first_line(error)}; stop the listening program, or give --port") from None
    listens, elsewhere = _listening(me)
    store.set(me, json.dumps({"host": socket.gethostname(), "elsewhere": elsewhere, **VERSIONS}))
    if leads:  # decides who is present: all, or those that have come after `wait` seconds
        with suppress(RuntimeError):
            store.wait(peers, timedelta(seconds=wait))
        store.set("present", json.dumps({peer: json.loads(store.get(peer)) for peer in peers if store.check([peer])}))
    hellos: dict[str, Any] = json.loads(_wait_for(store, "present", wait + TURN_SECONDS))
    pairs = [Pair(me, peer, fault="it did not come: start demopt doctor there") for peer in peers if peer not in hellos]
    for one, other in combinations(hellos, 2):
        key = f"{one}-{other}"
        if me in (one, other):
            rows = _measure(PrefixStore(key, store), listens, me, one, other, hellos)
            if me == one:
                store.set(f"rows of {key}", json.dumps([asdict(row) for row in rows]))
        pairs += [Pair(**row) for row in json.loads(_wait_for(store, f"rows of {key}", 10 * TURN_SECONDS))]
    store.add("read", 1)
    deadline = time.monotonic() + TURN_SECONDS
    while leads and store.add("read", 0) < len(hellos) and time.monotonic() < deadline:
        time.sleep(0.05)  # the store ends with this process
    return pairs


def _unreachable(first: str, port: int, wait: float) -> str:
    """Returns why the first machine's port does not answer; empty if it does. No route, no wait."""
    deadline = time.monotonic() + max(1.0, wait)
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((first, port), timeout=left).close()
            return ""
        except OSError as error:
            if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
                return f"{error.strerror}: is the address right, and the machine on?"
            time.sleep(min(0.2, left))
    return f"no answer at port {port}: demopt doctor does not run there, or a firewall"


def _listening(me: str) -> tuple[str, str]:
    """Returns the address that gloo is to listen on, and a remedy if a run may listen where others do not reach it.

    As a run does, unless others surely cannot reach that: then on this machine's address among the peers.
    """
    own = socket.gethostbyname(me)
    try:
        address, _ = gloo_address()
    except InputError:
        return own, ""
    if address == own or (address.startswith("127.") and not own.startswith("127.")):
        return own, ""
    name = next((name for name, each in interfaces().items() if each == own), "INTERFACE")
    return address, f"gloo listens on {address} on {me}: export {INTERFACE}={name} there"


def _wait_for(store: TCPStore, key: str, seconds: float) -> bytes:
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError:
        raise InputError(f"another machine left before {key} was measured; start again on all") from None
    return bytes(store.get(key))


def _measure(store: PrefixStore, listens: str, me: str, one: str, other: str, hellos: dict[str, Any]) -> list[Pair]:
    """Measures a pair on both of its machines; returns a row for each direction."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout = [ProcessGroupGloo.create_device(listens)], timedelta(seconds=TURN_SECONDS)
    try:
        pg = ProcessGroupGloo(store, int(me == other), 2, options)
        rtt_ms = 1e3 * statistics.median(_round_trip(pg) for _ in range(PINGS))
        rates = [_bits_per_second(pg, sender) for sender in (0, 1)]
    except RuntimeError as error:
        remedy = "; ".join(filter(None, (hellos[each].get("elsewhere") for each in (one, other))))
        told = remedy or f"allow all TCP between them ({first_line(error)})"
        return [Pair(one, other, fault=f"gloo does not connect them; {told}")]
    rows = []
    for source, target, rate in ((one, other, rates[0]), (other, one, rates[1])):
        here, there = hellos[source], hellos[target]
        unlike = ", ".join(f"{name} {there.get(name)}" for name in VERSIONS if there.get(name) != here.get(name))
        rows.append(Pair(source, target, there["host"], rtt_ms, rate, unlike))
    return rows


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps what torch's C++ code writes to this process's standard error from the screen."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _round_trip(pg: Any) -> float:
    """Returns the seconds of a byte there and back."""
    began, byte = time.perf_counter(), torch.zeros(1, dtype=torch.uint8)
    for sender in (0, 1):
        _pass(pg, byte, sender)
    return time.perf_counter() - began


def _bits_per_second(pg: Any, sender: int) -> float:
    """Sends twice as much each time, until it takes long enough to tell; the sender decides."""
    size, again = FIRST_BULK, torch.ones(1, dtype=torch.uint8)
    while True:
        data, began = torch.zeros(size, dtype=torch.uint8), time.perf_counter()
        _pass(pg, data, sender)
        _pass(pg, data[:1], 1 - sender)  # all has come
        seconds = time.perf_counter() - began
        again[0] = seconds < BULK_SECONDS and size < MOST_BULK
        _pass(pg, again, sender)
        if not again:
            return 8 * size / seconds
        size *= 2


def _pass(pg: Any, data: torch.Tensor, sender: int) -> None:
    work = (pg.send if pg.rank() == sender else pg.recv)([data], 1 - pg.rank(), 0)
    work.wait()
