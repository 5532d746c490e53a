"""What can be known about this machine alone."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from demopt.train.config import InputError
from demopt.train.preflight import cure, gloo_address, interfaces, is_loopback
from demopt.train.versions import versions

LONG_MS = 10.0  # a round trip of a long link
_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `cure` is empty if it is well.

    Examples:
        >>> Finding("torch", "2.13.0").well
        True
    """

    what: str
    found: str
    cure: str = ""

    @property
    def well(self) -> bool:
        """Whether nothing has to be done."""
        return not self.cure


def examine(first: str, port: int, alone: bool) -> list[Finding]:
    """Look at this machine. `first`: the machine whose port all meet at; `alone`: no other machines are planned."""
    found = [Finding(name, version) for name, version in versions().items()]
    found.append(_kernels())
    found.append(Finding("interfaces", ", ".join(f"{name} {address}" for name, address in interfaces().items())))
    found.append(_gloo(first, alone))
    found.append(_port(port))
    return found


def after_pause(rtt_ms: float) -> Finding:
    """Say whether TCP's slow start after a pause matters at this round trip.

    Examples:
        >>> after_pause(rtt_ms=0.1).well
        True
    """
    slow = _IDLE.exists() and _IDLE.read_text().strip() != "0"
    if not slow or rtt_ms < LONG_MS:
        return Finding("after a pause", f"TCP's slow start does not matter at {rtt_ms:.1f} ms, or is off")
    return Finding(
        "after a pause",
        f"TCP starts slowly again, which costs round trips of {rtt_ms:.0f} ms in each exchange",
        "sysctl -w net.ipv4.tcp_slow_start_after_idle=0 on all machines",
    )


def _kernels() -> Finding:
    """Say whether there are compiled kernels; without them all works, so it is no fault."""
    from demopt.kernels.compiled import compiled

    lacking = "none, so steps are slower: install demopt again with a C compiler, or from a wheel that has them"
    return Finding("CPU kernels", lacking if compiled() is None else "compiled")


def _gloo(first: str, alone: bool) -> Finding:
    try:
        address, why = gloo_address()
    except InputError as error:
        return Finding("gloo's address", "none", str(error))
    bad = is_loopback(address) and not alone
    return Finding("gloo's address", f"{address} ({why})", cure(first) if bad else "")


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return Finding(f"port {port}", error.strerror or "taken", "stop what listens there, or take another port")
    return Finding(f"port {port}", "free")
