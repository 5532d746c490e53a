"""`demopt doctor`: checks this machine and its links to the other machines, with a remedy per obstacle.

Links are measured as a run would connect the machines: a store at the run's port, and gloo between each pair. All
machines run the same command. The first has the store and decides who is present. Pairs take turns, so that only one
measures at a time.
"""

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
from pathlib import Path
from typing import Annotated, Any

import typer

import demopt
from demopt.errors import first_line
from demopt.plan import rate as bandwidth
from demopt.train.config import InputError

LONG_MS = 10.0  # a round trip of a long link
PINGS = 10
BULK_SECONDS = 1.0  # the least time of a transfer that measures a rate
FIRST_BULK, MOST_BULK = 1 << 17, 1 << 30  # bytes
TURN_SECONDS = 30.0  # at most, for a pair to connect, and for each of its messages
_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")

Finding = tuple[str, str, str]  # a name, the observation, and the remedy, which is empty if all is well


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


def doctor(
    peers: Annotated[
        list[str] | None, typer.Option(help="A machine's IP address; repeat, in one order on all.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the run (--master-port).", min=1, max=65535)] = 29500,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the other machines.", min=0, max=1e6)] = 60.0,
) -> int:
    """Find obstacles to a run between machines. Start it on all of them, with the same --peers."""
    from demopt.train.team import require_connections

    require_connections()
    me = own_address(peers) if peers else "198.51.100.1"  # RFC 5737: stands for any machine elsewhere
    found = [*examine(me, port, alone=len(peers or []) == 1)]
    faults = _show(found)
    if peers and me == peers[0] and any(name.startswith("port") and remedy for name, _, remedy in found):
        print("the links are measured when the port is free: the other machines connect to it")
    elif peers and len(peers) > 1:
        print(f"waiting up to {wait:.0f} s for the others: start the same command there ...")
        with quiet():
            pairs = measure_pairs(me, peers, port, wait)
        reached = [pair for pair in pairs if not pair.fault]
        trip = max((pair.rtt_ms for pair in reached), default=0.0)
        faults += _show([*map(_finding, pairs), *([slow_start(trip)] if reached else [])])
        if len(reached) == len(peers) * (len(peers) - 1):
            slowest = min(pair.bits_per_second for pair in reached)
            rate = f"{slowest / 1e9:.1f}Gbit" if slowest >= 1e9 else f"{slowest / 1e6:.2f}Mbit"
            link = f"--workers {len(peers)} --bandwidth {rate} --latency {trip:.2f}"
            print(f"Does it pay? demopt plan --params YOURS --step-seconds YOURS {link}")
    print(f"{faults} to fix" if faults else "nothing to fix")
    return 1 if faults else 0


def examine(towards: str, port: int, alone: bool) -> Iterator[Finding]:
    """Checks this machine. `towards`: its address among the peers, or any remote one; `alone`: it is the only peer."""
    from demopt.kernels.gate import library
    from demopt.train.team import gloo_address, loopback_remedy

    for name, version in versions().items():
        yield name, version, ""
    lacking = "none, so steps are slower: install demopt again with a C compiler, or from a wheel that has them"
    yield "CPU kernels", lacking if library() is None else "compiled", ""
    try:
        address, why = gloo_address()
        yield "gloo's address", f"{address} ({why})", "" if alone else loopback_remedy(address, towards)
    except InputError as error:
        yield "gloo's address", "none", str(error)
    try:
        socket.create_server(("", port)).close()
        yield f"port {port}", "free", ""
    except OSError as error:
        yield f"port {port}", error.strerror or "taken", "stop the listening program, or give --port"


def slow_start(rtt_ms: float) -> Finding:
    """Checks whether TCP starts slowly after a pause, which matters at long round trips."""
    if rtt_ms < LONG_MS or not _IDLE.exists() or _IDLE.read_text().strip() == "0":
        return "after a pause", f"TCP's slow start does not matter at {rtt_ms:.1f} ms, or is off", ""
    costs = f"TCP starts slowly again, which costs round trips of {rtt_ms:.0f} ms in each exchange"
    return "after a pause", costs, "sysctl -w net.ipv4.tcp_slow_start_after_idle=0 on all machines"


def _finding(pair: Pair) -> Finding:
    way = f"{pair.source} -> {pair.target}"
    if pair.fault:
        return way, "no way", pair.fault
    said = f"{pair.host}, round trip {pair.rtt_ms:.1f} ms, {bandwidth(pair.bits_per_second)}"
    return way, said, f"it has {pair.unlike}: install the same version there" if pair.unlike else ""


def _show(findings: list[Finding]) -> int:
    """Prints findings; returns the number of those to fix."""
    for name, found, remedy in findings:
        print(f"{'FIX ' if remedy else 'ok  '} {name}: {found}")
        if remedy:
            print(f"     -> {remedy}")
    return sum(bool(remedy) for _, _, remedy in findings)


def versions() -> dict[str, str]:
    """Returns the versions that must be equal on all machines."""
    import torch

    return {"demopt": demopt.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}


def own_address(peers: list[str]) -> str:
    """Returns the one of the peers' addresses that is this machine's."""
    from demopt.train.team import address_of, addresses, local_address

    here, mine = {address for _, address in addresses()}, []
    for peer in peers:
        try:
            address = address_of(peer)
            mine += [peer] if address in here or address == local_address(address) else []
        except (OSError, UnicodeError):
            raise InputError(f"--peers {peer}: no address for this name; give one") from None
    if len(mine) != 1:
        wanted = f"wanted exactly one address of this machine ({', '.join(sorted(here))}), got {len(mine)}"
        raise InputError(f"--peers {' '.join(peers)}: {wanted}; name every machine once, in the same order on all")
    return mine[0]


def measure_pairs(me: str, peers: list[str], port: int, wait: float) -> list[Pair]:
    """Takes part until all pairs are measured; returns them. Machines that never come are rows with a fault."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    leads = me == peers[0]
    if not leads and (fault := _unreachable(peers[0], port, wait)):
        return [Pair(me, peers[0], fault=fault)]
    try:
        store = TCPStore(peers[0], port, None, leads, timedelta(seconds=max(1.0, wait)), wait_for_workers=False)
    except RuntimeError as error:
        raise InputError(f"port {port}: {first_line(error)}; stop the listening program, or give --port") from None
    listens, elsewhere = _listening(me)
    store.set(me, json.dumps({"host": socket.gethostname(), "elsewhere": elsewhere, **versions()}))
    if leads:  # decides who is present: all, or those that have come after `wait` seconds
        with suppress(RuntimeError):
            store.wait(peers, timedelta(seconds=wait))
        store.set("present", json.dumps({peer: json.loads(store.get(peer)) for peer in peers if store.check([peer])}))
    hellos: dict[str, Any] = json.loads(_wait_for(store, "present", wait + TURN_SECONDS))
    pairs = [
        Pair(me, peer, fault="it did not come: start the same command there, with --peers in this order")
        for peer in peers
        if peer not in hellos
    ]
    for one, other in combinations(hellos, 2):
        key = f"{one}-{other}"
        print(f"measuring {one} with {other} ...", flush=True)
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
    """Returns why the first machine's port does not answer; empty if it does. Without a route it does not wait."""
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

    The address is a run's, unless others surely cannot reach that: then it is this machine's address among the peers.
    """
    from demopt.train.team import address_of, gloo_address, is_loopback, listen_on

    own = address_of(me)
    try:
        address, _ = gloo_address()
    except InputError:
        return own, ""
    if address in (own, "") or (is_loopback(address) and not is_loopback(own)):
        return own, ""
    return address, f"gloo listens on {address} on {me}: {listen_on(own)} there"


def _wait_for(store: Any, key: str, seconds: float) -> bytes:
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError:
        raise InputError(f"another machine left before {key} was measured; start again on all") from None
    return bytes(store.get(key))


def _measure(store: Any, listens: str, me: str, one: str, other: str, hellos: dict[str, Any]) -> list[Pair]:
    """Measures a pair on both of its machines; returns a row for each direction."""
    import torch
    from torch._C._distributed_c10d import ProcessGroupGloo

    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    turn = timedelta(seconds=TURN_SECONDS)
    options._devices, options._timeout = [ProcessGroupGloo.create_device(listens)], turn / 5  # gloo connects five times
    try:
        pg = ProcessGroupGloo(store, int(me == other), 2, options)
        pg._set_default_timeout(turn)
        byte, seconds = torch.zeros(1, dtype=torch.uint8), []
        for _ in range(PINGS):
            began = time.perf_counter()
            for sender in (0, 1):  # there and back
                _pass(pg, byte, sender)
            seconds.append(time.perf_counter() - began)
        rates = [_bits_per_second(pg, sender) for sender in (0, 1)]
    except RuntimeError as error:
        remedy = "; ".join(filter(None, (hellos[each].get("elsewhere") for each in (one, other))))
        told = remedy or f"allow all TCP between them ({first_line(error)})"
        return [Pair(one, other, fault=f"gloo does not connect them; {told}")]
    rows = []
    for source, target, rate in ((one, other, rates[0]), (other, one, rates[1])):
        here, there = hellos[source], hellos[target]
        unlike = ", ".join(f"{name} {there.get(name)}" for name in versions() if there.get(name) != here.get(name))
        rows.append(Pair(source, target, there["host"], 1e3 * statistics.median(seconds), rate, unlike))
    return rows


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps messages of torch's C++ code to this process's standard error off the screen."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _bits_per_second(pg: Any, sender: int) -> float:
    """Doubles the data until sending takes long enough to measure; the sender decides."""
    import torch

    size, again = FIRST_BULK, torch.ones(1, dtype=torch.uint8)
    while True:
        data, began = torch.zeros(size, dtype=torch.uint8), time.perf_counter()
        _pass(pg, data, sender)
        _pass(pg, data[:1], 1 - sender)  # confirms that all has arrived
        seconds = time.perf_counter() - began
        again[0] = seconds < BULK_SECONDS and size < MOST_BULK
        _pass(pg, again, sender)
        if not again:
            return 8 * size / seconds
        size *= 2


def _pass(pg: Any, data: Any, sender: int) -> None:
    call = pg.send if pg.rank() == sender else pg.recv
    call([data], 1 - pg.rank(), 0).wait(timedelta(seconds=TURN_SECONDS))  # or the time-out for connecting would hold
