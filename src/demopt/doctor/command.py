"""`demopt doctor`: checks this machine and its links to the other machines, with a remedy per obstacle."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demopt.train.config import InputError

if TYPE_CHECKING:
    from demopt.doctor.peers import Pair

LONG_MS = 10.0  # a round trip of a long link
_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")

Finding = tuple[str, str, str]  # its name, the observation, and the remedy; empty if all is well


def doctor(
    peers: Annotated[
        list[str] | None,
        typer.Option(help="Address of a machine, this one too; repeat, in the same order on all machines."),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the run (--master-port).", min=1, max=65535)] = 29500,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the other machines.", min=0)] = 60.0,
) -> int:
    """Find obstacles to a run between machines. Start it on all of them, with the same --peers."""
    from demopt.train.team import require_connections

    require_connections()
    from demopt.doctor.peers import measure_pairs, own_address, quiet

    me = own_address(peers) if peers else "198.51.100.1"  # RFC 5737: stands for any machine elsewhere
    found = examine(me, port, alone=len(peers or []) == 1)
    faults = _show(found)
    if peers and me == peers[0] and any(name.startswith("port") and remedy for name, _, remedy in found):
        print("the links are measured when the port is free: the other machines connect to it")
    elif peers and len(peers) > 1:
        print(f"waiting up to {wait:.0f} s for the others: start the same command there ...")
        with quiet():
            pairs = measure_pairs(me, peers, port, wait)
        faults += _show([_finding(pair) for pair in pairs])
        reached = [pair for pair in pairs if not pair.fault]
        trip = max((pair.rtt_ms for pair in reached), default=0.0)
        faults += _show([slow_start(trip)] if reached else [])
        if len(reached) == len(peers) * (len(peers) - 1):
            slowest = min(pair.bits_per_second for pair in reached)
            rate = f"{slowest / 1e9:.1f}Gbit" if slowest >= 1e9 else f"{slowest / 1e6:.2f}Mbit"
            print(
                "Does it pay? demopt plan --params YOURS --step-seconds YOURS "
                f"--workers {len(peers)} --bandwidth {rate} --latency {trip:.2f}"
            )
    print(f"{faults} to fix" if faults else "nothing to fix")
    return 1 if faults else 0


def examine(towards: str, port: int, alone: bool) -> list[Finding]:
    """Checks this machine. `towards`: its address among the peers, or any in their network; `alone`: the only one."""
    from demopt.doctor.peers import VERSIONS
    from demopt.kernels.gate import library
    from demopt.train.team import gloo_address, loopback_remedy

    found: list[Finding] = [(name, version, "") for name, version in VERSIONS.items()]
    lacking = "none, so steps are slower: install demopt again with a C compiler, or from a wheel that has them"
    found.append(("CPU kernels", lacking if library() is None else "compiled", ""))
    try:
        address, why = gloo_address()
        found.append(("gloo's address", f"{address} ({why})", "" if alone else loopback_remedy(address, towards)))
    except InputError as error:
        found.append(("gloo's address", "none", str(error)))
    try:
        socket.create_server(("", port)).close()
        found.append((f"port {port}", "free", ""))
    except OSError as error:
        found.append((f"port {port}", error.strerror or "taken", "stop the listening program, or give --port"))
    return found


def slow_start(rtt_ms: float) -> Finding:
    """Checks whether TCP starts slowly after a pause, which matters at long round trips."""
    if rtt_ms < LONG_MS or not _IDLE.exists() or _IDLE.read_text().strip() == "0":
        return "after a pause", f"TCP's slow start does not matter at {rtt_ms:.1f} ms, or is off", ""
    return (
        "after a pause",
        f"TCP starts slowly again, which costs round trips of {rtt_ms:.0f} ms in each exchange",
        "sysctl -w net.ipv4.tcp_slow_start_after_idle=0 on all machines",
    )


def _finding(pair: Pair) -> Finding:
    way = f"{pair.source} -> {pair.target}"
    if pair.fault:
        return way, "no way", pair.fault
    said = f"{pair.host}, round trip {pair.rtt_ms:.1f} ms, {pair.bits_per_second / 1e6:.0f} Mbit/s"
    return way, said, f"it has {pair.unlike}: install the same version there" if pair.unlike else ""


def _show(findings: list[Finding]) -> int:
    """Prints findings; returns the number of those to fix."""
    for name, found, remedy in findings:
        print(f"{'FIX ' if remedy else 'ok  '} {name}: {found}")
        if remedy:
            print(f"     -> {remedy}")
    return sum(bool(remedy) for _, _, remedy in findings)
