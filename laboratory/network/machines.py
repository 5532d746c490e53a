"""Machines on one computer: network namespaces on a bridge, with limited and delayed links.

Needs Linux, root, and the commands ip, tc, unshare, hostname; latency needs a C compiler.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIX = "demoptlab"
NETWORK = "10.77.0."
# Linux's default, and one with the same slow start that may always be chosen. Under bbr, which a computer may have, TCP
# does not start slowly after a pause.
CONGESTION = ("cubic", "reno")
COMMANDS = ("ip", "tc", "unshare", "hostname")
# A burst: the bytes that a link passes at once after a pause. No message may hide in one: 128 kB would be .1 s at
# 10 Mbit/s. It is .6 ms of the link, and at least two frames. At 1 Gbit/s that just holds one of TCP's 64 kB segments;
# with a smaller burst, tbf cuts each segment into frames and does not reach its rate.
BURST_SECONDS, LEAST_BURST = 0.6e-3, 4000
_RATE = re.compile(r"([0-9.]+)(k|m|g)bit")
_ON_MACHINE = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


class MissingError(Exception):
    """The system lacks something that machines need."""


@dataclass(frozen=True)
class Link:
    """How every machine is connected: bits per second each way (None: no limit), and round trip between machines."""

    rate: str | None = None
    rtt_ms: float = 0.0

    @property
    def bits_per_second(self) -> float | None:
        """The rate as a number.

        Examples:
            >>> Link("100mbit").bits_per_second
            100000000.0
        """
        if self.rate is None:
            return None
        found = _RATE.fullmatch(self.rate)
        if found is None:
            raise ValueError(f"rate is {self.rate!r}, wanted a number of kbit, mbit or gbit, such as 100mbit")
        return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]

    @property
    def name(self) -> str:
        """The link in words."""
        words = {"kbit": " kbit/s", "mbit": " Mbit/s", "gbit": " Gbit/s"}
        rate = "no limit" if self.rate is None else self.rate[:-4] + words[self.rate[-4:]]
        return f"{rate}, RTT {self.rtt_ms:g} ms" if self.rtt_ms else rate


@dataclass(frozen=True)
class Machine:
    """One machine: its host name and its address."""

    number: int
    name: str
    address: str
    namespace: str


class Network:
    """Machines that are up; use `bring_up`, which takes them down again."""

    def __init__(self, count: int, root: Path) -> None:
        self._stem = f"{PREFIX}{os.getpid()}"
        self._switch = f"{self._stem}sw"
        self._root, self._boxes = root, dict[int, "subprocess.Popen[str]"]()
        self._names = root / "hosts"  # every machine's /etc/hosts
        self.link = Link()
        self.machines = [Machine(i, f"m{i}", f"{NETWORK}{i + 1}", f"{self._stem}m{i}") for i in range(count)]
        self.congestion = ""

    def up(self) -> None:
        """Creates machines, bridge and cables."""
        switch = self._switch
        _call("ip", "netns", "add", switch)
        _call("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _call("ip", "-n", switch, "link", "set", "br0", "up")
        names = [f"{machine.address} {machine.name}\n" for machine in self.machines]
        self._names.write_text("127.0.0.1 localhost\n" + "".join(names), encoding="utf-8")
        for machine in self.machines:
            port, space = f"p{machine.number}", machine.namespace
            _call("ip", "netns", "add", space)
            _call("ip", "link", "add", "eth0", "netns", space, "type", "veth", "peer", port, "netns", switch)
            self._silent(port)
            _call("ip", "-n", space, "address", "add", f"{machine.address}/24", "dev", "eth0")
            for where, device in ((space, "lo"), (space, "eth0"), (switch, port)):
                _call("ip", "-n", where, "link", "set", device, "up")
            self._plug(port)
            # A new connection must not inherit TCP's knowledge of a link that has changed since.
            _call("ip", "netns", "exec", space, "sysctl", "-qw", "net.ipv4.tcp_no_metrics_save=1")
            for name in reversed(CONGESTION):
                control = f"net.ipv4.tcp_congestion_control={name}"
                _call("ip", "netns", "exec", space, "sysctl", "-qw", control, check=False)
            file = "/proc/sys/net/ipv4/tcp_congestion_control"
            self.congestion = _call("ip", "netns", "exec", space, "cat", file).strip()

    def down(self) -> None:
        """Ends all processes on the machines and removes the machines."""
        for number in list(self._boxes):
            self._unplug_box(number)
        for space in (*(machine.namespace for machine in self.machines), self._switch):
            _remove(space)

    def set_link(self, link: Link) -> None:
        """Gives every machine this link; connections stay."""
        if link.rtt_ms != self.link.rtt_ms:
            for machine in self.machines:
                self._unplug_box(machine.number)
                if link.rtt_ms:
                    self._plug_box(machine.number, link.rtt_ms / 4)  # a round trip passes boxes four times
        self.link = link
        for machine in self.machines:
            self._limit(machine.namespace, "eth0", link.bits_per_second)
            self._limit(self._switch, f"p{machine.number}", link.bits_per_second)

    def kill(self, number: int) -> None:
        """Kills all processes of a machine."""
        _kill(self.machines[number].namespace)

    def bytes(self) -> list[tuple[int, int]]:
        """Returns the bytes that each machine has sent and received on its interface."""
        return [(self._counter(machine, "tx"), self._counter(machine, "rx")) for machine in self.machines]

    def command(self, machine: Machine, words: Sequence[str]) -> list[str]:
        """Returns the command that runs `words` on a machine, under its host name."""
        inside = ["ip", "netns", "exec", machine.namespace, "unshare", "--mount", "--uts", "sh", "-e", "-c"]
        return [*inside, _ON_MACHINE, "sh", machine.name, str(self._names), *words]

    def _counter(self, machine: Machine, way: str) -> int:
        file = f"/sys/class/net/eth0/statistics/{way}_bytes"
        return int(_call("ip", "netns", "exec", machine.namespace, "cat", file))

    def _silent(self, device: str) -> None:
        """Keeps the switch's packets (IPv6 neighbour discovery) off the cable: they would be counted."""
        _call("ip", "netns", "exec", self._switch, "sysctl", "-qw", f"net.ipv6.conf.{device}.disable_ipv6=1")

    def _limit(self, space: str, device: str, rate: float | None) -> None:
        _call("ip", "netns", "exec", space, "tc", "qdisc", "del", "dev", device, "root", check=False)
        if rate is not None:
            burst = max(LEAST_BURST, round(rate / 8 * BURST_SECONDS))
            how = f"tbf rate {rate:.0f}bit burst {burst} latency 400ms".split()
            _call("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", device, "root", *how)

    def _plug_box(self, number: int, milliseconds: float) -> None:
        """Puts a delay box between a machine's port and the bridge."""
        switch, port, near, far = self._switch, f"p{number}", f"d{number}", f"b{number}"
        _call("ip", "-n", switch, "link", "add", near, "type", "veth", "peer", "name", far)
        for device in (near, far):
            self._silent(device)
            _call("ip", "-n", switch, "link", "set", device, "up")
        _call("ip", "-n", switch, "link", "set", port, "nomaster")
        words = ["ip", "netns", "exec", switch, str(self._box()), port, near, str(milliseconds)]
        self._boxes[number] = box = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert box.stdout is not None
        if box.stdout.readline() != "ready\n":
            raise MissingError("the delay box did not start")
        self._plug(far)

    def _unplug_box(self, number: int) -> None:
        box = self._boxes.pop(number, None)
        if box is None:
            return
        box.kill()
        box.communicate()
        _call("ip", "-n", self._switch, "link", "del", f"d{number}")
        self._plug(f"p{number}")

    def _plug(self, device: str) -> None:
        """Connects a cable with the bridge."""
        _call("ip", "-n", self._switch, "link", "set", device, "master", "br0")

    def _box(self) -> Path:
        program = self._root / "delay_box"
        if not program.exists():
            compiler = shutil.which("cc") or shutil.which("gcc")
            if compiler is None:
                raise MissingError("a C compiler, for the delay box")
            _call(compiler, "-O2", "-o", str(program), str(Path(__file__).with_name("delay_box.c")))
        return program


@contextlib.contextmanager
def bring_up(count: int) -> Iterator[Network]:
    """The context in which machines are up; MissingError where the system does not allow them.

    Machines of a process that was killed are removed first.
    """
    check()
    sweep()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as root:
        network = Network(count, Path(root))
        try:
            try:
                network.up()
            except subprocess.CalledProcessError as error:
                raise MissingError(f"network namespaces ({' '.join(error.cmd)}: {error.stderr.strip()})") from None
            yield network
        finally:
            network.down()


def check() -> None:
    """Raises MissingError if the system plainly lacks something."""
    if not hasattr(os, "geteuid") or os.uname().sysname != "Linux":
        raise MissingError("Linux")
    if os.geteuid() != 0:
        raise MissingError("root")
    for name in COMMANDS:
        if shutil.which(name) is None:
            raise MissingError(f"the command {name}")


def sweep() -> None:
    """Removes the machines of processes that are gone."""
    for space in sorted(_call("ip", "netns", "list").split()):
        found = re.fullmatch(PREFIX + r"(\d+)(?:sw|m\d+)", space)
        if found and not Path(f"/proc/{found[1]}").exists():
            _remove(space)


def _remove(space: str) -> None:
    _kill(space)
    _call("ip", "netns", "del", space, check=False)


def _kill(space: str) -> None:
    for pid in _call("ip", "netns", "pids", space, check=False).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _call(*words: str, check: bool = True) -> str:
    """Runs a command and returns its output."""
    return subprocess.run(words, check=check, capture_output=True, text=True).stdout
