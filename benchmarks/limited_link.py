"""Two network namespaces joined by a link of a given bit rate each way: real sockets, a real queue."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NETWORK = "10.213.7."


@dataclass(frozen=True)
class End:
    """One end of a link: the command prefix that starts a process there, and its environment variables."""

    prefix: list[str]
    environment: dict[str, str]


@contextmanager
def limited_link(megabits: float) -> Iterator[list[End] | None]:
    """Yields both ends, or None where the system allows no namespaces (it takes Linux, root, ip and tc)."""
    names = [f"demopt{os.getpid()}{end}" for end in "ab"]
    try:
        try:
            ends = _joined(names, megabits)
        except (OSError, subprocess.CalledProcessError):
            ends = None
        yield ends
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _joined(names: list[str], megabits: float) -> list[End]:
    cables = [f"dm{os.getpid()}{end}" for end in "ab"]
    for name in names:
        _call("ip", "netns", "add", name)
    _call("ip", "link", "add", cables[0], "netns", names[0], "type", "veth", "peer", cables[1], "netns", names[1])
    ends = []
    for number, (name, cable) in enumerate(zip(names, cables, strict=True), start=1):
        inside = ["ip", "netns", "exec", name]
        _call(*inside, "ip", "address", "add", f"{NETWORK}{number}/24", "dev", cable)
        for device in ("lo", cable):
            _call(*inside, "ip", "link", "set", device, "up")
        # A burst of 128 kB would let a whole message of DeMo pass unlimited.
        _call(*inside, *f"tc qdisc add dev {cable} root tbf rate {megabits}mbit burst 10kb latency 400ms".split())
        ends.append(End(inside, {"MASTER_ADDR": f"{NETWORK}1", "GLOO_SOCKET_IFNAME": cable}))
    return ends


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
