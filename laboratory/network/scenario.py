"""A scenario: machines, links, the command that runs on each machine, and a cut of the network.

`run` brings the machines up, runs the scenario on each link, and takes them down.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from laboratory.network.machines import Link, Network, bring_up

ROOT = Path(__file__).resolve().parents[2]
PORT = "29500"
Process = subprocess.Popen[str]
Result = dict[str, Any]


@dataclass(frozen=True)
class Cut:
    """All that machine 0 sends and receives is lost for some seconds, after machine 1 has printed `after`."""

    after: str
    seconds: float


@dataclass(frozen=True)
class Scenario:
    """Machines, links and work.

    `command` runs on every machine, with the repository on Python's path; {python} and {rank} are replaced in it. With
    `stages`, one set of processes goes through all links: each gets a line of JSON (`settings`, and the link) on
    standard input and answers with a line of JSON. Without, the command runs anew for each link, and its output is
    kept.
    """

    machines: int
    command: tuple[str, ...]
    links: tuple[Link, ...] = (Link(),)
    stages: bool = False
    limit_seconds: float = 300.0
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    cut: Cut | None = None  # without stages
    hub: bool = False  # machines reach the first one alone


def run(scenario: Scenario) -> list[Result]:
    """Runs a scenario; returns a result for each of its links."""
    with bring_up(scenario.machines, scenario.hub) as network:
        return list(_stages(scenario, network) if scenario.stages else _runs(scenario, network))


def _stages(scenario: Scenario, network: Network) -> Iterator[Result]:
    """Takes one set of processes through all links."""
    pipe = subprocess.PIPE
    with _started(scenario, network, pipe, [pipe] * scenario.machines) as processes, _limited(scenario, network):
        for link in scenario.links:
            network.set_link(link)
            before = network.bytes()
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(json.dumps({"link": asdict(link), **scenario.settings}) + "\n")
                process.stdin.flush()
            answers = [_answer(process) for process in processes]
            yield {"link": link.name, **_measured(network, before), "answers": answers}


def _answer(process: Process) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a program of the scenario ended early, with {process.wait()}")
    return json.loads(line)


def _runs(scenario: Scenario, network: Network) -> Iterator[Result]:
    """Runs the command anew on each link."""
    for link in scenario.links:
        network.set_link(link)
        before = network.bytes()
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            outputs = [Path(folder, str(number)) for number in range(scenario.machines)]
            files = [stack.enter_context(output.open("w", encoding="utf-8")) for output in outputs]
            with (
                _started(scenario, network, subprocess.DEVNULL, files) as processes,
                _limited(scenario, network) as late,
            ):
                if scenario.cut is not None and _says(processes[1], outputs[1], scenario.cut.after):
                    network.cut(0)
                    time.sleep(scenario.cut.seconds)
                    network.mend(0)
                codes = [process.wait() for process in processes]
            lines = [output.read_text(encoding="utf-8").splitlines() for output in outputs]
        answers = [{"exit": code, "output": output} for code, output in zip(codes, lines, strict=True)]
        yield {"link": link.name, **_measured(network, before), "late": bool(late), "answers": answers}


def _says(process: Process, output: Path, text: str) -> bool:
    """Waits for a text in a process's output; False if the process ended before."""
    while (alive := process.poll() is None) and text not in output.read_text(encoding="utf-8"):
        time.sleep(0.1)
    return alive


def _measured(network: Network, before: list[tuple[int, int]]) -> Result:
    pairs = list(zip(before, network.bytes(), strict=True))
    return {
        "sent_bytes": [after[0] - first[0] for first, after in pairs],
        "received_bytes": [after[1] - first[1] for first, after in pairs],
        "congestion_control": network.congestion,
        "load": round(os.getloadavg()[0], 1),
    }


@contextmanager
def _started(scenario: Scenario, network: Network, given: int, outputs: list[Any]) -> Iterator[list[Process]]:
    """The context in which the command runs on every machine."""
    processes: list[Process] = []
    # With stages, programs answer on standard output; their standard error is the user's to see.
    errors = None if scenario.stages else subprocess.STDOUT
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    try:
        for machine, output in zip(network.machines, outputs, strict=True):
            ranks = {  # as a launcher such as torchrun would set them
                "RANK": str(machine.number), "WORLD_SIZE": str(scenario.machines), "PYTHONPATH": path,
                "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth0",
                "MASTER_ADDR": network.machines[0].address, "MASTER_PORT": PORT,
            }  # fmt: skip
            places = {"{python}": sys.executable, "{rank}": str(machine.number)}
            words = network.command(machine, [places.get(word, word) for word in scenario.command])
            environment = {**os.environ, **ranks, **scenario.environment}
            processes.append(Process(words, stdin=given, stdout=output, stderr=errors, text=True, env=environment))
        yield processes
    finally:
        for number, process in enumerate(processes):
            network.kill(number)
            process.wait()
            with suppress(BrokenPipeError):
                process.communicate()  # closes its pipes


@contextmanager
def _limited(scenario: Scenario, network: Network) -> Iterator[list[bool]]:
    """Kills all processes when the time is up; the yielded list is then not empty."""
    late: list[bool] = []

    def end() -> None:
        late.append(True)
        for machine in network.machines:
            network.kill(machine.number)

    timer = threading.Timer(scenario.limit_seconds, end)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
