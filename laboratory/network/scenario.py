"""A scenario: machines, links, and the program that runs on each machine.

`run` brings the machines up, takes their programs through the links, and takes the machines down.
"""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from laboratory.network.machines import Link, Network, bring_up

ROOT = Path(__file__).resolve().parents[2]
PORT = "29500"
Process = subprocess.Popen[str]
Result = dict[str, Any]


@dataclass(frozen=True)
class Scenario:
    """Machines, links and work.

    `command` runs on every machine, with the repository on Python's path. On each link the programs get a line of JSON
    (`settings`, and the link) on standard input and answer with a line of JSON.
    """

    machines: int
    command: tuple[str, ...]
    links: tuple[Link, ...] = (Link(),)
    limit_seconds: float = 300.0
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def run(scenario: Scenario) -> list[Result]:
    """Runs a scenario; returns a result for each of its links."""
    results = []
    with (
        bring_up(scenario.machines) as network,
        _started(scenario, network) as processes,
        _limited(scenario, network),
    ):
        for link in scenario.links:
            network.set_link(link)
            before = network.bytes()
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(json.dumps({"link": asdict(link), **scenario.settings}) + "\n")
                process.stdin.flush()
            answers = [_answer(process) for process in processes]
            results.append({"link": link.name, **_measured(network, before), "answers": answers})
    return results


def _answer(process: Process) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a program of the scenario ended early, with {process.wait()}")
    return json.loads(line)


def _measured(network: Network, before: list[tuple[int, int]]) -> Result:
    pairs = list(zip(before, network.bytes(), strict=True))
    return {
        "sent_bytes": [after[0] - first[0] for first, after in pairs],
        "received_bytes": [after[1] - first[1] for first, after in pairs],
        "congestion_control": network.congestion,
        "load": round(os.getloadavg()[0], 1),
    }


@contextmanager
def _started(scenario: Scenario, network: Network) -> Iterator[list[Process]]:
    """The context in which the command runs on every machine; its standard error is the user's to see."""
    processes: list[Process] = []
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    try:
        for machine in network.machines:
            ranks = {  # as a launcher such as torchrun would set them
                "RANK": str(machine.number), "WORLD_SIZE": str(scenario.machines), "PYTHONPATH": path,
                "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth0",
                "MASTER_ADDR": network.machines[0].address, "MASTER_PORT": PORT,
            }  # fmt: skip
            environment, pipe = {**os.environ, **ranks, **scenario.environment}, subprocess.PIPE
            words = network.command(machine, scenario.command)
            processes.append(Process(words, stdin=pipe, stdout=pipe, text=True, env=environment))
        yield processes
    finally:
        for number, process in enumerate(processes):
            network.kill(number)
            process.wait()
            with suppress(BrokenPipeError):
                process.communicate()  # closes its pipes


@contextmanager
def _limited(scenario: Scenario, network: Network) -> Iterator[None]:
    """Kills all processes when the time is up."""

    def end() -> None:
        for machine in network.machines:
            network.kill(machine.number)

    timer = threading.Timer(scenario.limit_seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
