"""What a loss of members costs: replicas of a small model, killed by SIGKILL at named instants, beside a calm run.

    python benchmarks/churn.py --members 4 --steps 1000 --kill-every 50 --out churn.json
    python benchmarks/churn.py --faults two,stop,lighthouse,joiner --steps 400 --out faults.json

A victim dies before the named call: in backward, extract, exchange, check (between exchange and vote), apply (between
vote and apply), or save. It is replaced at once by a new process. A pause is the time without an applied round, over
all that live, from the last round before a fault to the first after it.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import queue
import random
import signal
import statistics
import sysconfig
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore

import demopt
from demopt.integrations.torchft import Optimizer

INSTANTS = ("backward", "extract", "exchange", "check", "apply", "save")
CONTEXT, BATCH, SAVE_EVERY, STEP_SECONDS = 8, 32, 10, 0.03
LONG = ("pauses", "instants", "losses", "kills_at")  # not printed
fork = multiprocessing.get_context("forkserver")


def text() -> torch.Tensor:
    """The bytes of a few files of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    names = ("argparse", "ast", "calendar", "copy", "csv", "datetime", "difflib", "inspect", "json/decoder", "shlex")
    return torch.frombuffer(
        bytearray(b"".join((library / f"{name}.py").read_bytes() for name in names)), dtype=torch.uint8
    )


def small_model() -> nn.Module:
    """Predicts a byte from the eight before it."""
    torch.manual_seed(0)
    layers = nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 128), nn.GELU(), nn.Linear(128, 256)
    return nn.Sequential(*layers)


def windows(data: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Contexts [n, 8] and the bytes after them [n]."""
    rows = data[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, -1]


def member(number: int, life: int, lighthouse: str, local: bool, steps: int, told: Any, orders: Any) -> None:
    """Trains until the run has `steps` rounds; dies when and where it is ordered to."""
    import torchft

    torch.set_num_threads(1)
    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    model, data = small_model(), text()
    cut = int(0.9 * len(data))
    inner: Any
    if local:
        inner = demopt.LocalDeMo(torch.optim.AdamW(model.parameters(), lr=3e-3), sync_every=5)
    else:
        inner = demopt.DeMo(model.parameters(), lr=3e-3)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    seconds = timedelta(seconds=15)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=seconds), min_replica_size=1, load_state_dict=None, state_dict=None,
        timeout=seconds, quorum_timeout=seconds, rank=0, world_size=1, store_addr="localhost", store_port=store.port,
        lighthouse_addr=lighthouse, replica_id=f"{number}", hostname="localhost",
    )  # fmt: skip
    optimizer = Optimizer(manager, inner)
    armed = ""

    def instant(name: str) -> None:
        if name == armed:
            told.put(("died", number, time.time(), name))
            time.sleep(0.02)  # for the message to leave
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(name: str) -> Any:
        method = getattr(inner, name)

        def call(*args: Any) -> Any:
            instant(name)
            return method(*args)

        return call

    for name in ("extract", "exchange", "check", "apply", "resync"):
        setattr(inner, name, watched(name))
    if life < 0:
        armed = "resync"  # a joiner that dies while it is healing
    draw = torch.Generator().manual_seed(1000 * number + max(life, 0))
    every = inner.sync_every if local else 1
    while True:
        optimizer.zero_grad()
        if manager.current_step() * every >= steps:
            break
        with suppress(queue.Empty):
            armed = orders.get_nowait()
        loss = nn.functional.cross_entropy(*_forward(model, windows(data[:cut], _starts(cut, draw))))
        instant("backward")
        loss.backward()
        time.sleep(STEP_SECONDS)  # a step of a larger model
        rounds = manager.current_step()
        optimizer.step()
        if manager.current_step() > rounds:
            told.put(("round", number, time.time(), (manager.current_step(), optimizer.members, loss.item())))
            if manager.current_step() % SAVE_EVERY == 0:
                with tempfile.TemporaryFile() as file:
                    torch.save(optimizer.state_dict(), file)
                    instant("save")
    with torch.no_grad():
        starts = torch.linspace(cut, len(data) - CONTEXT - 2, 4000).long()
        held_out = float(nn.functional.cross_entropy(*_forward(model, windows(data, starts))))
    told.put(("end", number, time.time(), (held_out, inner.fingerprint(), optimizer.churn.retries)))
    told.close()
    told.join_thread()
    os._exit(0)


def _starts(cut: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randint(cut - CONTEXT - 1, (BATCH,), generator=draw)


def _forward(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return model(pair[0]), pair[1]


class Run:
    """A lighthouse, members, and what they tell."""

    def __init__(self, members: int, steps: int, local: bool) -> None:
        self.steps, self.local = steps, local
        self.told: Any = fork.Queue()
        self.rounds: list[tuple[float, int, int, int, float]] = []  # time, member, round, members, loss
        self.ends: dict[int, tuple[float, int, int]] = {}
        self.deaths: list[tuple[float, str]] = []
        self.light(0)
        self.processes: dict[int, Any] = {}
        self.orders: dict[int, Any] = {}
        for number in range(members):
            self.start(number, 0)

    def light(self, port: int) -> None:
        """Starts the lighthouse."""
        from torchft.coordination import LighthouseServer

        self.server = LighthouseServer(
            bind=f"[::]:{port}", min_replicas=1, join_timeout_ms=3000, heartbeat_timeout_ms=1000
        )
        self.port = int(self.server.address().rpartition(":")[2])

    def start(self, number: int, life: int) -> None:
        """Starts a member, or its replacement."""
        self.orders[number] = fork.Queue()
        address = f"http://localhost:{self.port}"
        args = (number, life, address, self.local, self.steps, self.told, self.orders[number])
        self.processes[number] = fork.Process(target=member, args=args, daemon=True)
        self.processes[number].start()

    def hear(self, seconds: float = 0.05) -> None:
        """Takes in what members tell."""
        try:
            what, number, when, value = self.told.get(timeout=seconds)
        except queue.Empty:
            return
        if what == "round":
            self.rounds.append((when, number, *value))
        elif what == "died":
            self.deaths.append((when, value))
        else:
            self.ends[number] = value

    def until(self, condition: Any, seconds: float = 120.0) -> bool:
        """Hears until a condition holds; False if it takes too long."""
        deadline = time.time() + seconds
        while not condition() and time.time() < deadline:
            self.hear()
        return bool(condition())

    @property
    def last(self) -> int:
        """The last round that was applied."""
        return max((row[2] for row in self.rounds), default=0)

    def pause(self, at: float) -> float:
        """The time without an applied round around `at`."""
        times = sorted(row[0] for row in self.rounds)
        return next((when for when in times if when > at), at) - max((when for when in times if when <= at), default=at)

    def round_at(self, when: float) -> int:
        """The last round that was applied before a time."""
        return max((row[2] for row in self.rounds if row[0] <= when), default=0)

    def losses(self) -> list[float]:
        """The members' mean training loss, by round."""
        by_round: dict[int, list[float]] = {}
        for _, _, number, _, loss in self.rounds:
            by_round.setdefault(number, []).append(loss)
        return [statistics.mean(by_round[number]) for number in sorted(by_round)]

    def finish(self) -> None:
        """Waits for the end of the run."""
        self.until(lambda: all(not p.is_alive() or n in self.ends for n, p in self.processes.items()), 200)
        for process in self.processes.values():
            process.kill()
        self.server.shutdown()

    def result(self) -> dict[str, Any]:
        """Losses, fingerprints, pauses."""
        gaps = [
            later[0] - earlier[0] for earlier, later in zip(sorted(self.rounds), sorted(self.rounds)[1:], strict=False)
        ]
        pauses = [self.pause(when) for when, _ in self.deaths]
        return {
            "held_out_loss": {number: end[0] for number, end in self.ends.items()},
            "fingerprints_equal": len({end[1] for end in self.ends.values()}) == 1,
            "ended": len(self.ends), "rounds": self.last, "kills": len(self.deaths),
            "losses": self.losses(), "kills_at": [self.round_at(when) for when, _ in self.deaths],
            "instants": [name for _, name in self.deaths], "pauses": pauses,
            "median_pause": statistics.median(pauses) if pauses else 0.0,
            "longest_pause": max(gaps, default=0.0),
            "seconds": max(row[0] for row in self.rounds) - min(row[0] for row in self.rounds),
        }  # fmt: skip


def kills(members: int, steps: int, every: int, local: bool) -> dict[str, Any]:
    """A run in which a member is killed every so many steps, at a random instant, and replaced."""
    run, dice = Run(members, steps, local), random.Random(0)
    per_round = 5 if local else 1
    run.until(lambda: any(row[3] == members for row in run.rounds))
    at, life = every, 1
    while every and at < steps - every // 2:
        if not run.until(lambda at=at: run.last * per_round >= at, 60):  # type: ignore[misc]
            break
        victim, before = dice.randrange(members), len(run.deaths)
        run.orders[victim].put(INSTANTS[(life - 1) % len(INSTANTS)])
        run.until(lambda before=before: len(run.deaths) > before, 30)  # type: ignore[misc]
        run.processes[victim].join(5)
        run.start(victim, life)
        at, life = at + every, life + 1
    run.finish()
    return run.result()


def fault(name: str, steps: int) -> dict[str, Any]:
    """One fault in a run of four."""
    run = Run(4, steps, False)
    run.until(lambda: any(row[3] == 4 for row in run.rounds) and run.last > 40)
    began = time.time()
    if name == "two":
        for number in (1, 2):
            run.processes[number].kill()
        for number in (1, 2):
            run.start(number, 1)
    elif name == "stop":
        os.kill(run.processes[2].pid, signal.SIGSTOP)
        run.until(lambda: time.time() > began + 20)
        os.kill(run.processes[2].pid, signal.SIGCONT)
    elif name == "lighthouse":
        run.server.shutdown()
        run.until(lambda: time.time() > began + 3)
        run.light(run.port)
    elif name == "joiner":
        run.processes[3].kill()
        run.start(3, -1)  # dies while weights come
        run.until(lambda: bool(run.deaths), 30)
        run.start(3, 2)
    run.finish()
    after = [row[0] for row in run.rounds if row[0] > began]
    found = run.result() | {"fault": name, "pause": run.pause(began + (0.05 if name != "lighthouse" else 0.5))}
    members = [row[3] for row in sorted(run.rounds) if row[0] > began]
    return found | {"least_members": min(members, default=0), "members_at_the_end": members[-1] if after else 0}


def plot(found: dict[str, Any], path: Path) -> None:
    """Training loss with kills and without, and the pauses."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), height_ratios=(3, 2))
    for name, one in found.items():
        losses = torch.tensor(one["losses"])
        smooth = losses.unfold(0, 20, 1).mean(1)
        above.plot(range(20, 20 + len(smooth)), smooth, label=name, linewidth=1)
    for at in found["kills"]["kills_at"]:
        above.axvline(at, color="0.8", linewidth=0.8, zorder=0)
    above.set(xlabel="round", ylabel="training loss, mean of 20 rounds, nats a byte")
    above.legend()
    names = sorted(set(found["kills"]["instants"]), key=INSTANTS.index)
    pairs = list(zip(found["kills"]["instants"], found["kills"]["pauses"], strict=True))
    for row, name in enumerate(names):
        seconds = [pause for instant, pause in pairs if instant == name]
        below.plot(seconds, [row] * len(seconds), "o", alpha=0.6)
    below.set(
        xlabel="seconds without a round around a kill", yticks=range(len(names)), yticklabels=names, xlim=(0, None)
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kill-every", type=int, default=50)
    parser.add_argument("--local", action="store_true", help="LocalDeMo, H = 5, in place of DeMo")
    parser.add_argument("--faults", default="")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path, help="picture of the losses and pauses")
    told = parser.parse_args()
    shape = (told.members, told.steps)
    tasks = {
        "calm": partial(kills, *shape, 0, told.local),
        "kills": partial(kills, *shape, told.kill_every, told.local),
    }
    if told.faults:
        tasks = {name: partial(fault, name, told.steps) for name in told.faults.split(",")}
    found: dict[str, Any] = {}
    for name, task in tasks.items():
        found[name] = task()
        told.out.write_text(json.dumps(found, indent=1) + "\n")
        short = {key: value for key, value in found[name].items() if key not in LONG}
        print(name, json.dumps(short), flush=True)
    if told.plot and not told.faults:
        plot(found, told.plot)


if __name__ == "__main__":
    os.environ.setdefault("RUST_LOG", "error")
    fork.set_forkserver_preload(["demopt.integrations.torchft", "torch._dynamo", "torchft"])
    main()
