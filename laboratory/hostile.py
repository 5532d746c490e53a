"""The harm that an outsider and a lying member can do to a run, tried: prints a Markdown table of the outcomes.

    python -m laboratory.hostile [--only seats|network|floods|liars] [--out FILE]     # minutes, without root

The ranks are processes over gloo at 127.0.0.1. The outsider knows their addresses, the code and the settings, but
not the key. Messages are changed between rank 0's network and demopt: no program here sits on the way.
"""

import argparse
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import demopt
from demopt.exchange import Collective, Exchange, Faulty, Sealed, Threads

STEPS, PAUSE = 40, 0.05
KEY, OTHER_KEY = bytes(range(32)), bytes(32)
JUNK = (1, 100, 10_000, 1_000_000)
HEADER_BYTES, STEP, BODY_BYTES, CHECKSUM = 64, slice(8, 16), slice(48, 56), slice(56, 64)  # docs/wire-format.md


@dataclass(frozen=True)
class Tried:
    """A line of the table."""

    attack: str
    key: bool
    happened: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the table")
    parser.add_argument("--only", choices=sorted(ATTACKS))
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        print(json.dumps(be_rank(**json.loads(arguments.as_rank))), flush=True)
        os._exit(0)
    lines = [line for name, attack in ATTACKS.items() if arguments.only in (None, name) for line in attack()]
    print("| tried | key | outcome |\n|---|---|---|")
    for line in lines:
        print(f"| {line.attack} | {'yes' if line.key else 'no'} | {line.happened} |")
    if arguments.out:
        arguments.out.write_text(json.dumps([asdict(line) for line in lines], indent=2) + "\n")


# A run of two ranks


def be_rank(rank: int, port: int, key: str, tamper: str, tape: str, day: int) -> dict[str, Any]:
    """Trains as one of two ranks; returns the outcome. Rank 0's incoming bytes pass through `tamper`."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    inner: Exchange = Collective()
    if rank == 0 and tamper:
        inner = Faulty(inner, TAMPER[tamper](Path(tape)))
    exchange: Exchange = Sealed(inner, bytes.fromhex(key)) if key else inner
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    begun = time.monotonic()
    optimizer = demopt.DeMo(model.parameters(), lr=1e-3, process_group=exchange)
    done = 0
    try:
        for step in range(STEPS):
            torch.manual_seed(10_000 * day + 100 * step + rank)
            inputs = torch.randn(16, 64)
            optimizer.zero_grad()
            (model(inputs) - inputs).square().mean().backward()
            optimizer.step()
            done += 1
            time.sleep(PAUSE)
    except demopt.DemoptError as error:
        said = f"{type(error).__name__}: {error}".partition(" ([")[0]
        return {"steps": done, "error": said, "fingerprint": 0, "seconds": time.monotonic() - begun}
    return {"steps": done, "error": "", "fingerprint": optimizer.fingerprint(), "seconds": time.monotonic() - begun}


def record(tape: Path) -> Callable[[Tensor], Tensor]:
    """Keeps every row of rank 1, as an outsider could record it."""
    rows: list[Tensor] = []

    def pass_on(received: Tensor) -> Tensor:
        rows.append(received[1].clone())
        torch.save(rows, tape)
        return received

    return pass_on


def replay(tape: Path) -> Callable[[Tensor], Tensor]:
    """Delivers yesterday's message of the same step in place of rank 1's, from the tenth on."""
    rows, at = torch.load(tape), [0]

    def exchange_for_old(received: Tensor) -> Tensor:
        at[0] += 1
        if at[0] > 10 and at[0] <= len(rows) and rows[at[0] - 1].shape == received[1].shape:
            received[1] = rows[at[0] - 1]
        return received

    return exchange_for_old


def forge(tape: Path) -> Callable[[Tensor], Tensor]:
    """Delivers one old message of rank 1 in every step from the tenth on, its step number and checksum mended."""
    del tape  # today's messages serve
    rows: list[Tensor] = []

    def write_anew(received: Tensor) -> Tensor:
        mine = received[1]
        begins = bytes(mine[:4].tolist()) == b"DeMo"
        if begins:
            rows.append(mine.clone())
        if not begins or len(rows) <= 10:
            return received
        size = HEADER_BYTES + int(rows[3][BODY_BYTES].view(torch.int64))  # without the tag that may follow
        message = rows[3][:size].clone()
        message[STEP] = mine[STEP]
        message[CHECKSUM] = 0
        message[CHECKSUM] = torch.frombuffer(bytearray(checksum(message)), dtype=torch.uint8)
        received[1, :size] = message
        return received

    return write_anew


def checksum(message: Tensor) -> bytes:
    """Returns the checksum of a short message, as docs/wire-format.md defines it."""
    total, mask = 0, 2**64 - 1
    for number, (word,) in enumerate(struct.iter_unpack("<Q", bytes(message.tolist())), start=1):
        mixed = number * 0x9E3779B97F4A7C15 & mask
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
        total += word * ((mixed ^ mixed >> 31) | 1)
    return struct.pack("<Q", total & mask)


TAMPER = {"record": record, "replay": replay, "forge": forge}


@dataclass
class Pair:
    """Two ranks that run, and the port of their store."""

    processes: list[subprocess.Popen[str]]
    port: int

    def outcomes(self) -> list[dict[str, Any]]:
        """Returns each rank's outcome; of a rank that ended without one, its last line of errors."""
        found = []
        for process in self.processes:
            out, err = process.communicate(timeout=180)
            lines = [line for line in out.splitlines() if line.startswith("{")]
            last = err.strip().splitlines()[-1][:160] if err.strip() else f"exit code {process.returncode}"
            found.append(
                json.loads(lines[-1]) if lines else {"steps": 0, "error": last, "fingerprint": 0, "seconds": 0}
            )
        return found


def start(keys: tuple[bytes, bytes], tamper: str = "", tape: str = "", day: int = 1) -> Pair:
    """Starts two ranks, each with its key; b"" is none."""
    port = free_port()
    processes = []
    for rank, key in enumerate(keys):
        settings = {"rank": rank, "port": port, "key": key.hex(), "tamper": tamper, "tape": tape, "day": day}
        command = [sys.executable, "-m", "laboratory.hostile", "--as-rank", json.dumps(settings)]
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
    return Pair(processes, port)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# The outsider


def seats() -> list[Tried]:
    """The outsider starts before rank 1 does, in its seat."""
    attempts = [("an outsider takes seat 1", False, (b"", b"")), ("an outsider takes seat 1", True, (KEY, b""))]
    attempts.append(("an outsider takes seat 1, with another key", True, (KEY, OTHER_KEY)))
    lines = []
    for attack, key, keys in attempts:
        zero, _ = start(keys).outcomes()
        said = f"rank 0 trained with it, {zero['steps']} steps" if not zero["error"] else _refused(zero)
        lines.append(Tried(attack, key, said))
    return lines


def network() -> list[Tried]:
    """The outsider changes the messages that rank 0 receives from rank 1."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for key in (b"", KEY):
            tape = f"{folder}/tape-{len(key)}"
            start((key, key), "record", tape, day=0).outcomes()
            honest, _ = start((key, key)).outcomes()
            for attack, words in (
                ("replay", "yesterday's messages are replayed, from the eleventh on"),
                ("forge", "one message of rank 1 is sent in every step from 10 on, step number and checksum mended"),
            ):
                zero, one = start((key, key), attack, tape).outcomes()
                lines.append(Tried(words, bool(key), _of_change(zero, one, honest)))
    return lines


def floods() -> list[Tried]:
    """The outsider sends junk to every port, holds connections, and writes into the store, while ranks train."""
    honest, _ = start((KEY, KEY)).outcomes()
    pair = start((KEY, KEY))
    ports = listening(pair)
    held, refused = 0, 0
    connections: list[socket.socket] = []
    for port in ports:
        for size in (*JUNK, *([0] * 200)):
            try:
                connection = socket.create_connection(("127.0.0.1", port), 2)
                connection.settimeout(2)
                connection.sendall(secrets.token_bytes(size))
                connections.append(connection)
                held += 1
            except OSError:
                refused += 1
    junk = _of_flood(pair, honest)
    lines = [
        Tried(f"{held} connections and junk of 1 B to 1 MB to the store's and gloo's {len(ports)} ports", True, junk)
    ]
    for connection in connections:
        connection.close()
    pair = start((KEY, KEY))
    listening(pair)
    said = write_into_store(pair.port)
    lines.append(Tried(f"keys of the roll call written into the store ({said})", True, _of_flood(pair, honest)))
    return lines


def listening(pair: Pair) -> list[int]:
    """Waits until both ranks train, and returns the ports that they listen on."""
    ports: set[int] = set()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not ports - {pair.port}:
        time.sleep(0.2)
        ports = set()
        for process in pair.processes:
            table = Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]
            table += Path(f"/proc/{process.pid}/net/tcp6").read_text().splitlines()[1:]
            mine = {os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir() if link.is_symlink()}
            for fields in map(str.split, table):
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    time.sleep(1)
    return sorted(ports)


def write_into_store(port: int) -> str:
    """Sets keys with plain sockets: the protocol of torch 2.13's TCPStore has no password."""

    def text(data: bytes) -> bytes:
        return struct.pack("<Q", len(data)) + data

    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(struct.pack("<BI", 0, 0x3C85F7CE))
        for key in (b"demopt/calls", b"demopt/verdict", b"demopt/member/1"):
            for prefix in (b"", b"default_pg/0//", b"default_pg/0//cpu//"):
                connection.sendall(b"\x01" + text(prefix + key) + text(b"junk"))
        time.sleep(0.5)
    return "taken without a password"


def _of_flood(pair: Pair, honest: dict[str, Any]) -> str:
    zero, _ = pair.outcomes()
    if zero["error"]:
        return _refused(zero)
    same = "the same weights" if zero["fingerprint"] == honest["fingerprint"] else "OTHER weights"
    return f"{zero['steps']} of {STEPS} steps, {same}; {zero['seconds']:.1f} s, undisturbed {honest['seconds']:.1f}"


def _of_change(zero: dict[str, Any], one: dict[str, Any], honest: dict[str, Any]) -> str:
    if zero["error"]:
        return _refused(zero)
    if zero["fingerprint"] == honest["fingerprint"]:
        return "nothing noticed; the same weights, as the runs are equal"
    apart = "replicas apart" if zero["fingerprint"] != one["fingerprint"] else "replicas equal"
    return f"accepted: {zero['steps']} steps with other weights, {apart}"


def _refused(outcome: dict[str, Any]) -> str:
    return f"refused after {outcome['steps']} steps: {outcome['error']}"


# A member that lies

WORLD = 8
LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "no member lies": lambda gradient: gradient,
    "scaled by 1000": lambda gradient: 1000 * gradient,
    "inverted, times 10": lambda gradient: -10 * gradient,
    "random, of 100 times its size": lambda gradient: 100 * gradient.norm() * torch.randn_like(gradient),
}


def liars() -> list[Tried]:
    """One of eight members sends coefficients of its choosing: the loss after 150 steps, and with clip_to_median."""
    lines = []
    for what, train in (("DeMo, sgd", _demo), ("LocalDeMo around SGD", _local_demo)):
        for name, lie in LIES.items():
            plain, clipped = train(lie, False), train(lie, True)
            lines.append(Tried(f"{what}: {name}", True, f"loss {plain:.3g}; with clip_to_median {clipped:.3g}"))
    return lines


def _demo(lie: Callable[[Tensor], Tensor], clip: bool) -> float:
    def optimizer(model: nn.Module, exchange: Exchange) -> Any:
        how: dict[str, Any] = {"update": "sgd", "momentum_decay": 0.9, "top_k": 64}
        return demopt.DeMo(model.parameters(), lr=0.2, clip_to_median=clip, process_group=exchange, **how)

    return _train(optimizer, lie)


def _local_demo(lie: Callable[[Tensor], Tensor], clip: bool) -> float:
    def optimizer(model: nn.Module, exchange: Exchange) -> Any:
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        return demopt.LocalDeMo(inner, sync_every=5, top_k=64, clip_to_median=clip, process_group=exchange)

    return _train(optimizer, lie)


def _train(make: Callable[[nn.Module, Exchange], Any], lie: Callable[[Tensor], Tensor]) -> float:
    """Returns the loss of the global weights on unseen data; the last of eight ranks lies about its gradients."""
    torch.manual_seed(7)
    truth = torch.randn(32, 8)
    unseen = torch.randn(512, 32)
    models = []
    for _ in range(WORLD):
        torch.manual_seed(1)
        models.append(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)))

    def work(exchange: Exchange) -> float:
        model, generator = models[exchange.rank], torch.Generator().manual_seed(exchange.rank)
        optimizer = make(model, exchange)
        for _ in range(150):
            inputs = torch.randn(32, 32, generator=generator)
            optimizer.zero_grad()
            (model(inputs) - torch.tanh(inputs @ truth / 6)).square().mean().backward()
            if exchange.rank == WORLD - 1:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad = lie(parameter.grad)
            optimizer.step()
        shared = optimizer.shared() if isinstance(optimizer, demopt.LocalDeMo) else nullcontext()
        with shared, torch.no_grad():
            return float((model(unseen) - torch.tanh(unseen @ truth / 6)).square().mean())

    ranks = Threads(WORLD)
    try:
        return ranks.run(work)[0]
    finally:
        ranks.close()


ATTACKS: dict[str, Callable[[], list[Tried]]] = {"seats": seats, "network": network, "floods": floods, "liars": liars}


if __name__ == "__main__":
    main()
