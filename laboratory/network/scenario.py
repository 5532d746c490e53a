"""A scenario: machines, links, the command that runs on each machine, and the faults that happen. It is a TOML file.

`run` brings the machines up, runs the scenario on each link, and takes them down.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from laboratory.network.machines import Link, Machine, Network, bring_up

ROOT = Path(__file__).resolve().parents[2]
PORT = "29500"
KINDS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}
ACTIONS = ("cut-in", "cut-out", "cut", "mend", *KINDS)
Result = dict[str, Any]


class ScenarioError(ValueError):
    """A mistake in a scenario file."""


@dataclass(frozen=True)
class Event:
    """A fault of a machine: some seconds after a line with the text `after` on machine `on`.

    cut-in, cut-out, cut: all that it receives, sends or both is lost; mend undoes it. kill, stop, continue: its
    processes.
    """

    do: str
    machine: int
    after: str = ""
    on: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """The contents of a scenario file.

    `command` runs on every machine, with the repository on Python's path; {python}, {rank}, {machines} and {disk} are
    replaced in it. With `stages`, one set of processes goes through all links: each gets a line of JSON (`settings`,
    and the link) on standard input and answers with a line of JSON. Without, the command runs anew for each link, and
    its output is kept.
    """

    machines: int
    command: tuple[str, ...]
    links: tuple[Link, ...] = (Link(),)
    stages: bool = False
    limit_seconds: float = 300.0
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    hub: bool = False  # machines reach the first one alone

    def __post_init__(self) -> None:
        if not 1 <= self.machines <= 64:
            raise ScenarioError(f"machines is {self.machines}; give 1 to 64")
        if not self.command:
            raise ScenarioError("command is empty; give the command that runs on every machine")
        if self.stages and self.events:
            raise ScenarioError("events are for scenarios without stages")
        for event in self.events:
            if event.do not in ACTIONS:
                raise ScenarioError(f"an event does {event.do!r}; give one of {', '.join(ACTIONS)}")
            if not (0 <= event.machine < self.machines and 0 <= event.on < self.machines):
                raise ScenarioError(f"an event is about machine {event.machine} of {self.machines}")


def read(path: Path) -> Scenario:
    """Reads a scenario; ScenarioError names the mistake in it."""
    import tomllib  # Python 3.11

    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        found["links"] = tuple(_made(Link, link) for link in found.get("links", [{}]))
        found["events"] = tuple(_made(Event, event) for event in found.get("events", []))
        _ = [link.bits_per_second for link in found["links"]]
        scenario: Scenario = _made(Scenario, {"machines": 0, **found, "command": tuple(found.get("command", ()))})
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{path}: {error}") from None
    return scenario


def _made(kind: type, values: dict[str, Any]) -> Any:
    known = [item.name for item in dataclasses.fields(kind)]
    for name in values:
        if name not in known:
            raise ScenarioError(f"unknown {name!r}; give one of {', '.join(known)}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ScenarioError(str(error)) from None


def run(scenario: Scenario) -> list[Result]:
    """Runs a scenario; returns a result for each of its links."""
    with bring_up(scenario.machines, scenario.hub) as network:
        return list(_stages(scenario, network) if scenario.stages else _runs(scenario, network))


def _stages(scenario: Scenario, network: Network) -> Iterator[Result]:
    """Takes one set of processes through all links."""
    with _started(scenario, network) as processes, _limited(network, scenario.limit_seconds):
        for link in scenario.links:
            network.set_link(link)
            before, began = network.bytes(), time.monotonic()
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(json.dumps({"link": asdict(link), **scenario.settings}) + "\n")
                process.stdin.flush()
            answers = [_answer(process) for process in processes]
            yield {"link": link.name, **_measured(network, before, began), "answers": answers}


def _answer(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a program of the scenario ended early, with {process.wait()}")
    return json.loads(line)


def _runs(scenario: Scenario, network: Network) -> Iterator[Result]:
    """Runs the command anew on each link."""
    for link in scenario.links:
        network.set_link(link)
        before, began = network.bytes(), time.monotonic()
        over = threading.Event()
        with _started(scenario, network) as processes:
            outputs = [_Output(process) for process in processes]
            faults = [
                threading.Thread(target=_happen, args=(event, network, outputs[event.on], over), daemon=True)
                for event in scenario.events
            ]
            for fault in faults:
                fault.start()
            with _limited(network, scenario.limit_seconds) as late:
                codes = [process.wait() for process in processes]
                seconds = [round(output.ended() - began, 3) for output in outputs]
            over.set()
            for fault in faults:
                fault.join()
        for number in range(scenario.machines):
            network.mend(number)
        answers = [
            {"exit": code, "seconds": after, "output": output.lines}
            for code, after, output in zip(codes, seconds, outputs, strict=True)
        ]
        yield {"link": link.name, **_measured(network, before, began), "late": bool(late), "answers": answers}


def _measured(network: Network, before: list[tuple[int, int]], began: float) -> Result:
    pairs = list(zip(before, network.bytes(), strict=True))
    return {
        "seconds": round(time.monotonic() - began, 3),
        "sent_bytes": [after[0] - first[0] for first, after in pairs],
        "received_bytes": [after[1] - first[1] for first, after in pairs],
        "congestion_control": network.congestion,
        "load": round(os.getloadavg()[0], 1),
    }


@contextmanager
def _started(scenario: Scenario, network: Network) -> Iterator[list["subprocess.Popen[str]"]]:
    """The context in which the command runs on every machine."""
    processes: list[subprocess.Popen[str]] = []
    # With stages, programs answer on standard output; their standard error is the user's to see.
    errors = None if scenario.stages else subprocess.STDOUT
    commands = subprocess.PIPE if scenario.stages else subprocess.DEVNULL
    try:
        for machine in network.machines:
            environment = {**os.environ, **_environment(scenario, machine, network), **scenario.environment}
            words = network.command(machine, [_filled(word, scenario, machine, network) for word in scenario.command])
            processes.append(
                subprocess.Popen(
                    words, stdin=commands, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
                )
            )
        yield processes
    finally:
        for number, process in enumerate(processes):
            network.signal(number, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout) if scenario.stages else ():
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()


def _environment(scenario: Scenario, machine: Machine, network: Network) -> dict[str, str]:
    """Returns the variables that a launcher such as torchrun would set on this machine."""
    ranks = {"RANK": machine.number, "WORLD_SIZE": scenario.machines, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    where = {"MASTER_ADDR": network.machines[0].address, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "eth0"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**{name: str(value) for name, value in ranks.items()}, **where, "PYTHONPATH": path}


def _filled(word: str, scenario: Scenario, machine: Machine, network: Network) -> str:
    places = {"python": sys.executable, "rank": str(machine.number), "disk": str(network.disk)}
    for name, value in {**places, "machines": str(scenario.machines)}.items():
        word = word.replace("{" + name + "}", value)
    return word


@contextmanager
def _limited(network: Network, seconds: float) -> Iterator[list[bool]]:
    """Kills all processes when the time is up; the yielded list is then not empty."""
    late: list[bool] = []

    def end() -> None:
        late.append(True)
        for machine in network.machines:
            network.signal(machine.number, signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


class _Output:
    """The output of a process, read as it comes, so that events can wait for it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.lines: list[str] = []
        self._process, self._changed, self._end = process, threading.Condition(), 0.0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._end = time.monotonic()
            self._changed.notify_all()

    def wait_for(self, text: str) -> bool:
        """Waits for a line with `text`; False if the process ended before."""
        with self._changed:
            self._changed.wait_for(lambda: self._end or any(text in line for line in self.lines))
            return any(text in line for line in self.lines)

    def ended(self) -> float:
        """Returns the time at which the output ended."""
        self._reader.join()
        return self._end


def _happen(event: Event, network: Network, output: _Output, over: threading.Event) -> None:
    """Waits for the time of an event, and carries it out unless the run is over."""
    if (event.after and not output.wait_for(event.after)) or over.wait(event.seconds):
        return
    if event.do == "mend":
        network.mend(event.machine)
    elif event.do in KINDS:
        network.signal(event.machine, KINDS[event.do])
    else:
        network.cut(event.machine, event.do.partition("-")[2] or "both")
