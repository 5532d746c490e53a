"""Kills workers of a small run at named instants, by SIGKILL, and replaces them at once by new processes.

    python -m laboratory.churn --members 4 --kinds demo,restarting,ddp --kill-every 50 --out churn.json
    python -m laboratory.churn --faults two,stop,lighthouse,joiner --steps 400 --out faults.json

A victim dies before the named call: in backward, extract, exchange, check (between exchange and vote), apply (between
vote and apply), or save. A pause is the longest time between two applied rounds, over all living workers, around a
fault. Takes torchft.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import queue
import random
import signal
import socket
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from laboratory.churn.members import INSTANTS, Member, serve_lighthouse, train

LONG = ("pauses", "instants", "losses", "kills_at")  # not printed
fork = multiprocessing.get_context("forkserver")


def free_port() -> int:
    """Returns a free port."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def listens(port: int) -> bool:
    """Whether a process of this machine listens at a port."""
    with socket.socket() as caller:
        return caller.connect_ex(("localhost", port)) == 0


class Run:
    """A lighthouse, workers, and their reports."""

    def __init__(self, members: int, steps: int, kind: str, start_seconds: float) -> None:
        self.members, self.steps, self.kind, self.start_seconds = members, steps, kind, start_seconds
        self.reports: Any = fork.Queue()
        self.rounds: list[tuple[float, int, int, int, float]] = []  # time, member, round, members, loss
        self.repeated = 0  # rounds that were trained once more after a restart
        self.floor = 0  # the last round before the last restart
        self.ends: dict[int, tuple[float, int, int]] = {}
        self.deaths: list[tuple[float, str]] = []
        self.fallen = 0  # workers that ended by an error
        self.folder = tempfile.TemporaryDirectory()
        self.processes: dict[int, Any] = {}
        self.orders: dict[int, Any] = {}
        if kind == "restarting":
            self.restart(0)
            return
        self.port = free_port()
        self.address = f"http://localhost:{self.port}"
        self.light()
        for number in range(members):
            self.start(number, 0)

    def light(self) -> None:
        """Starts the lighthouse, in another process, and waits until it answers."""
        self.lighthouse = fork.Process(target=serve_lighthouse, args=(self.port,), daemon=True)
        self.lighthouse.start()
        while not listens(self.port):
            time.sleep(0.01)

    def start(self, number: int, life: int) -> None:
        """Starts a member, or its replacement."""
        self.orders[number] = fork.Queue()
        run = (self.kind, self.steps, self.address, self.members, self.folder.name, self.start_seconds)
        member = Member(number, life, *run, self.reports, self.orders[number])
        self.processes[number] = fork.Process(target=train, args=(member,), daemon=True)
        self.processes[number].start()

    def restart(self, life: int) -> None:
        """Ends all members and starts all of them again, as a launcher does for a run that lost one."""
        for process in self.processes.values():
            process.kill()
            process.join()
        while not self.reports.empty():
            self.hear()
        self.floor = self.last
        self.address = str(free_port())
        for number in range(self.members):
            self.start(number, life)

    def replace(self, number: int, life: int) -> None:
        """A member has died: a new one in its place, or a new run."""
        self.processes[number].join(5)
        if self.kind == "restarting":
            self.restart(life)
        else:
            self.start(number, life)

    def hear(self, seconds: float = 0.05) -> None:
        """Takes in a report."""
        try:
            kind, number, when, value = self.reports.get(timeout=seconds)
        except queue.Empty:
            return
        if kind == "round" and value[0] <= self.floor:
            self.repeated += 1
        elif kind == "round":
            self.rounds.append((when, number, *value))
        elif kind == "died":
            self.deaths.append((when, value))
        else:
            self.ends[number] = value

    def until(self, condition: Any, seconds: float = 120.0) -> bool:
        """Takes in reports until a condition holds; False if that takes too long."""
        deadline = time.time() + seconds
        while not condition() and time.time() < deadline:
            self.hear()
            self.raise_the_fallen()
        return bool(condition())

    def raise_the_fallen(self) -> None:
        """Replaces workers that ended by an error, as a supervisor would."""
        for number, process in list(self.processes.items()):
            if process.exitcode is not None and process.exitcode > 0 and number not in self.ends:
                self.fallen += 1
                self.replace(number, 100 + self.fallen)

    @property
    def last(self) -> int:
        """The last applied round."""
        return max((row[2] for row in self.rounds), default=0)

    def pause(self, at: float) -> float:
        """The longest time between two rounds, one after the other, of those around and after `at`.

        The round that was under way may still be applied by the others, and the one after it waits.
        """
        first: dict[int, float] = {}
        for when, _, number, _, _ in sorted(self.rounds):
            first.setdefault(number, when)
        times = sorted(first.values())
        before = sum(when <= at for when in times)
        around = times[max(before - 1, 0) : before + 3]
        return max((later - earlier for earlier, later in itertools.pairwise(around)), default=0.0)

    def round_at(self, when: float) -> int:
        """Returns the last round that was applied before a time."""
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
        if self.kind != "restarting":
            self.lighthouse.kill()
        self.folder.cleanup()

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
            "rounds_repeated": self.repeated // self.members, "fell_along": self.fallen,
            "losses": self.losses(), "kills_at": [self.round_at(when) for when, _ in self.deaths],
            "instants": [name for _, name in self.deaths], "pauses": pauses,
            "median_pause": statistics.median(pauses) if pauses else 0.0,
            "longest_pause": max(gaps, default=0.0),
            "seconds": max(row[0] for row in self.rounds) - min(row[0] for row in self.rounds),
        }  # fmt: skip


def kills(members: int, steps: int, start_seconds: float, every: int, kind: str) -> dict[str, Any]:
    """A run in which a member is killed every so many steps, at one instant after the other, and replaced."""
    run, dice = Run(members, steps, kind, start_seconds), random.Random(0)
    per_round = 5 if kind == "local" else 1
    instants = [name for name in INSTANTS if kind != "ddp" or name != "extract"]
    run.until(lambda: any(row[3] == members for row in run.rounds))
    at, life = every, 1
    while every and at < steps - every // 2:
        if not run.until(lambda at=at: run.last * per_round >= at, 60):
            break
        victim, before = dice.randrange(members), len(run.deaths)
        run.orders[victim].put(instants[(life - 1) % len(instants)])
        run.until(lambda before=before: len(run.deaths) > before, 30)
        run.replace(victim, life)
        at, life = at + every, life + 1
    run.finish()
    return run.result()


def fault(name: str, steps: int, start_seconds: float) -> dict[str, Any]:
    """One fault in a run of four."""
    run = Run(4, steps, "demo", start_seconds)
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
        run.lighthouse.kill()
        run.lighthouse.join()
        run.until(lambda: time.time() > began + 3)
        run.light()
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


def draw(calm: dict[str, Any], killed: dict[str, Any], path: Path) -> None:
    """Draws the training loss with kills and without, and the pauses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    for name, losses in (("calm", calm["losses"]), ("killed", killed["losses"])):
        smooth = [statistics.mean(losses[first : first + 20]) for first in range(len(losses) - 19)]
        above.plot(range(20, 20 + len(smooth)), smooth, label=name, linewidth=1)
    for at in killed["kills_at"]:
        above.axvline(at, color="0.8", linewidth=0.8, zorder=0)
    above.set(xlabel="round", ylabel="training loss, mean of 20 rounds, nats per byte")
    above.legend()
    below.plot(killed["pauses"], killed["instants"], "o", alpha=0.6)
    below.set(xlabel="seconds without a round around a kill", xlim=(0, None))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kill-every", type=int, default=50)
    parser.add_argument("--start-seconds", type=float, default=5.0, help="of a new process: Python, torch, models")
    parser.add_argument("--kinds", default="demo", help="of demo, local, ddp, restarting")
    parser.add_argument("--faults", default="")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path, help="a picture of the losses and pauses of the first kind")
    given = parser.parse_args()
    shape = (given.members, given.steps, given.start_seconds)
    tasks: dict[str, Any] = {}
    for kind in given.kinds.split(","):
        tasks[f"{kind}, calm"] = partial(kills, *shape, 0, kind)
        tasks[f"{kind}, killed"] = partial(kills, *shape, given.kill_every, kind)
    if given.faults:
        tasks = {name: partial(fault, name, given.steps, given.start_seconds) for name in given.faults.split(",")}
    found: dict[str, Any] = {}
    for name, task in tasks.items():
        found[name] = task()
        given.out.write_text(json.dumps(found, indent=1) + "\n")
        short = {key: value for key, value in found[name].items() if key not in LONG}
        print(name, json.dumps(short), flush=True)
    if given.plot and not given.faults:
        kind = given.kinds.split(",")[0]
        draw(found[f"{kind}, calm"], found[f"{kind}, killed"], given.plot)


if __name__ == "__main__":
    os.environ.setdefault("RUST_LOG", "error")
    fork.set_forkserver_preload(["demopt.integrations.torchft", "torch._dynamo", "torchft"])
    main()
