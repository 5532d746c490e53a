"""The address that gloo will take on this machine, and what is wrong with it, before a run waits for it in vain."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from demopt.train.config import InputError

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one.

    Examples:
        >>> interfaces().get("lo", "127.0.0.1")
        '127.0.0.1'
    """
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def gloo_address(name: str | None = None) -> tuple[str, str]:
    """Return the address that gloo listens on, and why: the interface that is named, or what the host name stands for.

    Examples:
        >>> gloo_address("lo") if "lo" in interfaces() else ("127.0.0.1", "GLOO_SOCKET_IFNAME is lo")
        ('127.0.0.1', 'GLOO_SOCKET_IFNAME is lo')
    """
    name = os.environ.get(VARIABLE) if name is None else name
    if name:
        first = name.split(",")[0]
        here = interfaces()
        if first not in here:
            raise InputError(
                f"{VARIABLE} is {name}, and this machine has {', '.join(here) or 'no interface'}; name one"
            )
        return here[first], f"{VARIABLE} is {name}"
    host = socket.gethostname()
    try:
        return socket.gethostbyname(host), f"the host name {host} stands for it"
    except OSError:
        return "127.0.0.1", f"the host name {host} stands for no address"


def way_to(host: str) -> tuple[str, str]:
    """Return the interface and the own address that lead to another machine; empty if none does. Nothing is sent.

    Examples:
        >>> way_to("127.0.0.1")[1]
        '127.0.0.1'
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            address = str(probe.getsockname()[0])
    except OSError:
        return "", ""
    names = [name for name, own in interfaces().items() if own == address]
    return (names[0] if names else ""), address


def is_loopback(address: str) -> bool:
    """Whether only this machine itself reaches an address.

    Examples:
        >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1")
        (True, False)
    """
    return address.startswith("127.")


def cure(host: str) -> str:
    """Return what to do where gloo would take a loopback address, if the others are where `host` is."""
    name, _ = way_to(host)
    return f"export {VARIABLE}={name or 'INTERFACE'} on this machine"


def refuse_loopback(first: str) -> None:
    """Raise InputError if gloo would listen where the other machines cannot reach it. `first`: the first machine."""
    address, why = gloo_address()
    if is_loopback(address):
        raise InputError(
            f"gloo would listen on {address}, which other machines cannot reach ({why}; Debian writes 127.0.1.1 beside "
            f"the host name in /etc/hosts): {cure(first)}"
        )
