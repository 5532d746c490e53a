"""The workers of a run: their ranks, devices, addresses and signals, and small collectives between them."""

import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch

from demopt.errors import ExchangeError, first_line
from demopt.exchange import Collective, Exchange
from demopt.exchange.interface import gather_values
from demopt.exchange.process_group import can_connect, dist
from demopt.output import tell
from demopt.train.config import InputError, SharedInputError, TrainConfig

INTERFACE = "GLOO_SOCKET_IFNAME"  # the variable that tells gloo which network interface to take
_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>
_IPV6 = Path("/proc/net/if_inet6")  # per line an address and the name of its interface

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """All workers, from the view of one."""

    rank: int
    world_size: int
    device: torch.device
    exchange: Exchange

    @property
    def first(self) -> bool:
        """Whether this worker writes and prints for all."""
        return self.rank == 0

    def total(self, values: list[float]) -> list[float]:
        """Returns the sum of each number over the ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            with self.waiting():
                dist.all_reduce(tensor)
        return tensor.tolist()

    def barrier(self) -> None:
        self.total([0.0])

    def waiting(self) -> AbstractContextManager[None]:
        """A context for torch's collectives, in which a failure names the lost rank."""
        return self.exchange.waiting() if isinstance(self.exchange, Collective) else nullcontext()

    def agree(self, work: Callable[[], T]) -> T:
        """Runs `work` on every rank; if any rank raises InputError, raises SharedInputError on all of them."""
        result, mistake = None, None
        try:
            result = work()
        except InputError as error:
            mistake = str(error)
        told = [(rank, text) for rank, text in enumerate(gather_values(self.exchange, mistake)) if text is not None]
        if told:
            rank, text = told[0]
            raise SharedInputError(text if len(told) == self.world_size else f"rank {rank}: {text}")
        return result  # type: ignore[return-value]  # no mistake, so `work` has returned


def join(config: TrainConfig) -> Team:
    """Joins the other workers: gloo for CPU tensors, nccl for GPU tensors.

    The process group lasts as long as the process, which must end by `os._exit`: the destructors of process groups
    and of DistributedDataParallel wait for threads that may be waiting for the GIL, or for peers that are gone.
    """
    local, here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = pick_device(config.device, local, here)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if name := os.environ.get(INTERFACE):  # nccl would look for one itself
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    torch.set_num_threads(config.threads or max(1, cores() // here))
    if _spans_machines():
        refuse_loopback(os.environ["MASTER_ADDR"])
    _connect("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", config.timeout)
    if dist.get_rank() == 0 and _spans_machines():
        safe = "in a network that you trust, or through a folder with a key (--run, --key-file)"
        tell(f"anyone who can reach the ports of this run can join it or change its messages; train {safe}")
    return Team(dist.get_rank(), dist.get_world_size(), device, Collective())


def _connect(backend: str, seconds: float) -> None:
    """Makes the default process group with this time-out; ExchangeError if a rank is absent or unreachable."""
    timeout = timedelta(seconds=seconds)
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        names = [f"rank {each}" for each in range(size)]
        store.set(names[rank], "")
        with suppress(RuntimeError):
            store.wait(names, timeout)
        if absent := [name for name in names if not store.check([name])]:
            raise ExchangeError(f"{', '.join(absent)} did not start within {seconds:g} s; see the output there")
        # gloo tries to connect two ranks for five time-outs. All ranks are here, so a fifth suffices.
        tries = max(timeout / 5, timedelta(seconds=1))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=tries)
    except RuntimeError as error:
        remedy = f"; {_obstacle(os.environ['MASTER_ADDR'])}" if _spans_machines() else ""
        raise ExchangeError(f"the ranks cannot connect: {first_line(error)}{remedy}") from error
    dist.distributed_c10d._set_pg_timeout(timeout)


def _obstacle(first: str) -> str:
    """Returns what may keep gloo from connecting this machine to others. `first`: the first machine."""
    (address, why), own = gloo_address(), local_address(first)
    doctor = "demopt doctor --peers ... on all machines finds the obstacle"
    interface_of = {each: name for name, each in addresses()}
    if not address or not own or interface_of.get(address, address) == interface_of.get(own, own):
        return doctor
    return (
        f"gloo listens on {address} ({why}), and the way to {first} is from {own}: {listen_on(own)} here, or {doctor}"
    )


def _spans_machines() -> bool:
    """Whether the ranks span machines: not all are on this one, and the master address is not its loopback."""
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        return False
    try:
        return not is_loopback(address_of(os.environ.get("MASTER_ADDR", "localhost")))
    except (OSError, UnicodeError):  # UnicodeError: a name that no host can have
        return True


def require_connections() -> None:
    """Raises InputError if this build of torch has no process groups."""
    if not can_connect():
        other = "train through a folder (demopt train --run ADDRESS), or install another build"
        raise InputError(f"this torch was built without torch.distributed, so its workers cannot connect; {other}")


def pick_device(wanted: str, local_rank: int, local_world_size: int) -> torch.device:
    """Returns the device of a worker: each has its own GPU, or all compute on the CPU."""
    kind, found = "cpu", 0
    if torch.accelerator.is_available() and (here := torch.accelerator.current_accelerator()):
        kind, found = here.type, torch.accelerator.device_count()
    if wanted not in ("auto", "cpu", kind):
        raise InputError(f"--device {wanted}: this torch has {' and '.join({'cpu': 0, kind: 0})} here; take one")
    if wanted == "cpu" or kind == "cpu" or (wanted == "auto" and kind != "cuda"):  # we have never run on the others
        return torch.device("cpu")
    if local_world_size > found:
        raise InputError(f"{local_world_size} workers but {found} GPUs; use --workers {found} or --device cpu")
    return torch.device(kind, local_rank)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def stop_on_signals(request: Callable[[], None] = lambda: None, after: str = "this step") -> Iterator[list[int]]:
    """Yields the signals so far: the first requests a stop; a second, if either is Ctrl-C, ends the process at once.

    The launcher's workers end with it. They have POSIX sessions of their own, so Ctrl-C in a terminal spares them.
    """
    received: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        is_first = not received  # read before another signal may come in here
        received.append(number)
        request()
        # SIGTERM or SIGHUP comes twice for one wish: from `timeout`, or from a service manager and from torchrun.
        at_once = not is_first and signal.SIGINT in received
        if os.environ.get("RANK", "0") == "0" and (at_once or is_first):
            tell("stopped at once" if at_once else f"stopping after {after}; Ctrl-C now stops at once")
        if at_once:
            os._exit(128 + number)

    handlers = {kind: signal.signal(kind, handle) for kind in signals_to_stop()}
    try:
        yield received
    finally:
        for kind, handler in handlers.items():
            signal.signal(kind, handler)


def signals_to_stop() -> list[signal.Signals]:
    kinds = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # Ignored signals stay ignored, as SIGHUP under nohup, but SIGINT, which a script's `&` ignores, is sent on purpose.
    return [each for each in kinds if each == signal.SIGINT or signal.getsignal(each) != signal.SIG_IGN]


def addresses() -> list[tuple[str, str]]:
    """Returns the network interfaces and their addresses, IPv4 ones first; none on systems other than Linux."""
    found: list[tuple[str, str]] = []
    if sys.platform != "linux":
        return found
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    with suppress(OSError):  # a kernel without IPv6
        for digits, _, _, scope, _, name in map(str.split, _IPV6.read_text().splitlines()):
            if scope in ("00", "10"):  # of the network, or the loopback
                found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found


def gloo_address() -> tuple[str, str]:
    """Returns the address that gloo listens on, and the reason: it is the named interface's, or the host name's.

    The address is empty if the system does not tell the interface's.
    """
    if name := os.environ.get(INTERFACE):
        first, here = name.split(",")[0], dict(reversed(addresses()))  # each one's first address, as gloo takes it
        if here and first not in here:  # only Linux lists them
            raise InputError(f"{INTERFACE} is {name}; this machine has {', '.join(sorted(here))}: name one")
        return here.get(first, ""), f"{INTERFACE} is {name}"
    host = socket.gethostname()
    if own := own_addresses(host):
        return own[0], f"the host name {host} stands for it"
    return "127.0.0.1", f"the host name {host} stands for no address of this machine"


def own_addresses(host: str) -> list[str]:
    """Returns those addresses of a name that this machine has, in the order in which gloo tries them."""
    found: list[str] = []
    with suppress(OSError, UnicodeError):
        for family, kind, _, _, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(place)
                found.append(str(place[0]))
    return found


def address_of(host: str) -> str:
    """Returns the address of a machine, the IPv4 one if it has any; OSError or UnicodeError if the name has none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def local_address(towards: str) -> str:
    """Returns the address that this machine has on the way to another one. Nothing is sent."""
    try:
        address = address_of(towards)
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # any port
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return ""


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def loopback_remedy(address: str, first: str) -> str:
    """Returns the command that makes gloo listen where `first` reaches it; empty if `address` is not a loopback's."""
    return f"{listen_on(local_address(first))} on this machine" if is_loopback(address) else ""


def listen_on(address: str) -> str:
    """Returns the command that makes gloo listen on the interface that has this address."""
    name = next((name for name, own in addresses() if own == address), "INTERFACE")
    return f"export {INTERFACE}={name}"


def refuse_loopback(first: str) -> None:
    """Raises InputError if gloo would listen where other machines cannot reach it. `first`: the first machine."""
    address, why = gloo_address()
    if remedy := loopback_remedy(address, first):
        why += "; Debian writes 127.0.1.1 beside the host name in /etc/hosts"
        raise InputError(f"gloo would listen on {address}, which other machines cannot reach ({why}): {remedy}")
