"""The cost of faults in a run through a folder: loss, equal weights, and local steps that count twice or never.

    python -m laboratory.churn --out churn.json
    python -m laboratory.churn --scenarios calm --seeds 1,2 --out churn.json     # the spread, added to the file
    python -m laboratory.churn --workers 8 --out churn.json

Each worker is a process with LocalDeMo around AdamW, five local steps per round. A killed worker is replaced at once.
The seed is of the first weights, the batches and the faults. Rows that --out has already are not measured again.

calm     no fault
kills    a SIGKILL every 50 rounds
faults   two killed at once, one asleep for 20 rounds (SIGSTOP), all killed, a joiner killed before it has joined
busy     as kills, through an S3 server (SeaweedFS), that answers 503 to one request in ten, half after the work

Every message says which local steps it holds. A worker's intervals in the manifests must follow each other without gap
or overlap. Nothing here depends on speed, so that pauses are not reported: measure those on an idle machine.
"""

import argparse
import hashlib
import http.client
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import nn

import demopt
from laboratory import seaweed

CONTEXT, BATCH, SYNC_EVERY, KILL_EVERY, ASLEEP = 8, 32, 5, 50, 20
BUSY, PORT, BEHIND = 0.1, 25999, 25998  # share of requests that are answered 503, and where the servers listen
processes = multiprocessing.get_context("forkserver")


# A worker


def text() -> torch.Tensor:
    """The bytes of a few files of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    names = ("argparse", "ast", "calendar", "copy", "csv", "datetime", "difflib", "inspect", "json/decoder", "shlex")
    content = b"".join((library / f"{name}.py").read_bytes() for name in names)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def small_model(seed: int = 0) -> nn.Module:
    """Predicts a byte from the eight before it."""
    torch.manual_seed(seed)
    layers = nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 128), nn.GELU(), nn.Linear(128, 256)
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, data: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The mean loss of the windows that begin at `starts`."""
    rows = data[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)].long()
    return nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1])


def work(address: str, seed: int, life: int, rounds: int, late: float, reports: Any) -> None:
    """Trains until the run has `rounds` rounds; sends each round's number, and at the end the loss and the weights."""
    torch.set_num_threads(1)
    model, data, draw = small_model(seed), text(), torch.Generator().manual_seed(1_000_000 * seed + life)
    cut = int(0.9 * len(data))
    run = demopt.FolderExchange(address, late=late, keep_log=True)
    run.rounds = rounds
    run.say = lambda line: reports.send(("said", line))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = demopt.LocalDeMo(inner, sync_every=SYNC_EVERY, process_group=run)
    optimizer.join()
    reports.send(("joined", run.worker))
    taken = listed = 0  # local steps, and those of them in a message that took part
    while (number := rounds_of(run)) < rounds:
        optimizer.zero_grad()
        loss = loss_of(model, data, torch.randint(cut - CONTEXT - 1, (BATCH,), generator=draw))
        loss.backward()
        taken += 1
        run.note = {"steps": [listed, taken], "loss": loss.item()}
        optimizer.step()
        if rounds_of(run) > number:
            listed = taken if run.row is not None else listed
            reports.send(("round", rounds_of(run)))
    with optimizer.shared(), torch.no_grad():
        held_out = loss_of(model, data, torch.linspace(cut, len(data) - CONTEXT - 2, 4000).long()).item()
    reports.send(("end", (held_out, weights_digest(model, optimizer))))
    os._exit(0)


def rounds_of(run: demopt.FolderExchange) -> int:
    """The rounds that a worker has applied."""
    return run.decided.round + 1 if run.decided is not None else 0


def weights_digest(model: nn.Module, optimizer: demopt.LocalDeMo) -> str:
    """The SHA-256 of the global weights, as `demopt replay` prints it."""
    digest = hashlib.sha256()
    with optimizer.shared(), torch.no_grad():
        for parameter in model.parameters():
            digest.update(parameter.numpy().tobytes())
    return digest.hexdigest()


# All workers


class Crew:
    """The workers of a run, and their reports."""

    def __init__(self, address: str, seed: int, count: int, rounds: int, late: float) -> None:
        self.address, self.seed, self.rounds, self.late = address, seed, rounds, late
        self.lives, self.kills, self.failed, self.round = 0, 0, 0, 0
        self.ends: list[tuple[float, str]] = []
        self.said: list[str] = []
        self.workers: list[tuple[Any, multiprocessing.connection.Connection]] = []
        for _ in range(count):
            self.start()

    def start(self) -> None:
        """Starts a worker; its data differ from those of all others."""
        self.lives += 1
        hear, say = processes.Pipe(duplex=False)
        given = self.address, self.seed, self.lives, self.rounds, self.late, say
        process = processes.Process(target=work, args=given)
        process.start()
        say.close()
        self.workers.append((process, hear))

    def kill(self, numbers: Iterable[int]) -> None:
        """Kills workers at the same time, and then replaces them."""
        chosen = [self.workers[number] for number in numbers]
        for process, _ in chosen:
            os.kill(process.pid, signal.SIGKILL)
        for each in chosen:
            self.kills += 1
            self.workers.remove(each)
            self.start()

    def until(self, number: int) -> None:
        """Takes in reports until the run has `number` rounds, or all have ended; RuntimeError if that is too early."""
        while self.round < number and self.workers:
            ready = multiprocessing.connection.wait([hear for _, hear in self.workers], timeout=60)
            for each in [each for each in self.workers if each[1] in ready]:
                try:
                    kind, value = each[1].recv()
                except EOFError:
                    each[0].join()
                    self.workers.remove(each)
                    self.failed += each[0].exitcode != 0
                    continue
                if kind == "round":
                    self.round = max(self.round, value)
                elif kind in ("end", "said"):
                    (self.ends if kind == "end" else self.said).append(value)
        if self.round < min(number, self.rounds):
            raise RuntimeError(f"no worker is left after {self.round} rounds: {self.failed} failed, {self.said[-9:]}")


def sleep_through(crew: Crew) -> None:
    """Stops a worker until the others are some rounds further."""
    process, _ = crew.workers[0]
    os.kill(process.pid, signal.SIGSTOP)
    crew.until(crew.round + ASLEEP)
    os.kill(process.pid, signal.SIGCONT)


def kill_joiner(crew: Crew) -> None:
    """Starts one more worker, and kills it on its way into the run."""
    crew.start()
    process, _ = crew.workers.pop()
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGKILL)
    crew.kills += 1


def carry_out(scenario: str, crew: Crew) -> None:
    """Lets the faults of a scenario happen, and waits for the end of the run."""
    dice, rounds = random.Random(crew.seed), crew.rounds
    if scenario in ("kills", "busy"):
        for at in range(KILL_EVERY, rounds - KILL_EVERY // 2, KILL_EVERY):
            crew.until(at)
            crew.kill([dice.randrange(len(crew.workers))])
    elif scenario == "faults":
        crew.until(rounds // 5)
        crew.kill([0, 1])
        crew.until(2 * rounds // 5)
        sleep_through(crew)
        crew.until(3 * rounds // 5)
        crew.kill(range(len(crew.workers)))
        crew.until(4 * rounds // 5)
        kill_joiner(crew)
    crew.until(rounds + 1)  # until all have ended


# The store, and what it holds at the end


class Busy(BaseHTTPRequestHandler):
    """Passes requests on to the server behind, and answers 503 to a share of them, half of these after the work."""

    protocol_version, wbufsize, dice = "HTTP/1.1", -1, random.Random(1)  # head and body go out together

    def handle_request(self) -> None:
        """Answers a request of any kind."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fate, status, headers, content = self.dice.random(), 503, dict[str, str](), b""
        if fate >= BUSY / 2:
            link = http.client.HTTPConnection("127.0.0.1", BEHIND, timeout=60)
            link.request(self.command, self.path, body, dict(self.headers))
            answer = link.getresponse()
            found = answer.read()
            if fate >= BUSY:
                status, headers, content = answer.status, dict(answer.headers), found
            link.close()
        headers = {name: text for name, text in headers.items() if name not in ("Date", "Transfer-Encoding")}
        self.send_response(status)
        for name, text in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_request  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Not a line per request."""


def serve_busily() -> None:
    """Serves until it is killed."""
    ThreadingHTTPServer(("127.0.0.1", PORT), Busy).serve_forever()


def counted(address: str, rounds: int) -> dict[str, Any]:
    """Reads the manifests: senders per round, and whether each worker's local steps follow each other."""
    store, senders, listed, wrong = demopt.FolderExchange(address).store, list[int](), dict[str, int](), list[str]()
    for number in range(rounds):
        manifest = json.loads(store.get(f"rounds/{number:08d}/manifest", 1 << 20) or b"{}")
        senders.append(len(manifest["senders"]))
        for sender in manifest["senders"]:
            first, last = sender["note"]["steps"]
            if first != listed.get(sender["worker"], 0):
                wrong.append(f"round {number}: {sender['worker']} sends steps {first} to {last}")
            listed[sender["worker"]] = last
    return {"mean_senders": statistics.mean(senders), "steps": sum(listed.values()), "counted_wrongly": wrong}


def measure(scenario: str, seed: int, workers: int, rounds: int, late: float) -> dict[str, Any]:
    """Carries out one scenario."""
    servers = list[Any]()
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/run"
        if scenario == "busy":
            servers = [seaweed.start(Path(folder), "127.0.0.1", BEHIND, subprocess.DEVNULL)]
            seaweed.make_bucket("127.0.0.1", BEHIND, servers[0])
            servers.append(processes.Process(target=serve_busily, daemon=True))
            servers[-1].start()
            address = "s3://bucket/run"
        crew = Crew(address, seed, workers, rounds, late)
        carry_out(scenario, crew)
        replay = subprocess.run(
            [sys.executable, "-m", "demopt.cli", "replay", address], capture_output=True, text=True, check=False
        )
        found = counted(address, rounds)
        for server in servers:
            server.kill()
    digests = {digest for _, digest in crew.ends}
    return {
        "workers": workers, "rounds": rounds, "seed": seed,
        "kills": crew.kills, "ended": len(crew.ends), "failed": crew.failed,
        "loss": crew.ends[0][0] if crew.ends else None, "same_weights": len(digests) == 1,
        "replay_agrees": len(digests) == 1 and f"sha256 {min(digests)}" in replay.stdout,
        **found, "said": len(crew.said),
    }  # fmt: skip


def main() -> None:
    """Prints and writes the results of each scenario."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", default="calm,kills,faults,busy")
    parser.add_argument("--seeds", default="0", help="each scenario runs with every one")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--late", type=float, default=10.0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    os.environ |= seaweed.environment("127.0.0.1", PORT)  # before the fork server starts
    for scenario, seed in itertools.product(given.scenarios.split(","), map(int, given.seeds.split(","))):
        name = f"{scenario}, {given.workers} workers, {given.rounds} rounds, seed {seed}"
        add_row(given.out, name, partial(measure, scenario, seed, given.workers, given.rounds, given.late))


def add_row(out: Path, name: str, measure: Callable[[], dict[str, Any]]) -> None:
    """Measures a row and adds it to a file of rows by name, unless it has one of this name that did not fail."""
    rows = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    if name in rows and not rows[name].get("failed"):
        print(f"{name}: in {out} already")
        return
    rows[name] = measure()
    out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(name, json.dumps(rows[name]), flush=True)


if __name__ == "__main__":
    processes.set_forkserver_preload(
        ["torch", "torch._dynamo", "demopt", "demopt.runs.exchange", "demopt.optim.local_demo"]
    )
    main()
