"""Brings a laboratory up, runs a scenario in it, takes it down, and prints what came of it.

    python benchmarks/lab/lab.py benchmarks/lab/scenarios/rates.toml [--out results.json]
    python benchmarks/lab/lab.py --sweep          # remove what a laboratory that was killed has left behind

Needs Linux, root, ip, tc, bridge and, for latency, a C compiler; where they are missing it says so and ends.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from network import Lab, Machine, MissingError, laboratory, sweep
from scenario import Event, Scenario, ScenarioError, read

HERE = Path(__file__).resolve().parent
PORT = "29500"
Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--machines", type=int, help="instead of the scenario's number")
    parser.add_argument("--sweep", action="store_true", help="remove what killed laboratories have left behind")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        if arguments.sweep:
            sweep()
            return
        if arguments.scenario is None:
            raise ScenarioError("give a scenario, such as benchmarks/lab/scenarios/rates.toml")
        scenario = read(arguments.scenario)
        if arguments.machines:
            scenario = replace(scenario, machines=arguments.machines)
        results = run(scenario)
    except MissingError as error:
        print(f"no laboratory here: it needs {error}. Nothing was run.")
        return
    except ScenarioError as error:
        raise SystemExit(f"lab: {error}") from None
    for result in results:
        print(json.dumps(result))
    if arguments.out:
        told = {"scenario": asdict(scenario), "date": datetime.date.today().isoformat(), "results": results}
        arguments.out.write_text(json.dumps(told) + "\n", encoding="utf-8")


def run(scenario: Scenario) -> list[Result]:
    """Run a scenario; return a result for each of its links."""
    with laboratory(scenario.machines, scenario.hosts) as lab:
        return list(_stages(scenario, lab) if scenario.stages else _runs(scenario, lab))


def _stages(scenario: Scenario, lab: Lab) -> Iterator[Result]:
    """Take one set of processes through all links."""
    with _started(scenario, lab, talk=True) as processes, _limited(lab, scenario.limit_seconds):
        for link in scenario.links:
            lab.set_link(link)
            before, began = lab.bytes(), time.monotonic()
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(json.dumps({"link": asdict(link), **scenario.settings}) + "\n")
                process.stdin.flush()
            answers = [_answer(process) for process in processes]
            yield {"link": link.name, **_measured(lab, before, began), "answers": answers}


def _answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"lab: a program ended early, with {process.wait()}")
    return json.loads(line)


def _runs(scenario: Scenario, lab: Lab) -> Iterator[Result]:
    """Run the command anew on each link."""
    for link in scenario.links:
        lab.set_link(link)
        before, began = lab.bytes(), time.monotonic()
        with _started(scenario, lab, talk=False) as processes:
            outputs = [_Output(process) for process in processes]
            happenings = [_Happening(event, lab, outputs[event.on]) for event in scenario.events]
            with _limited(lab, scenario.limit_seconds) as late:
                codes = [process.wait() for process in processes]
                seconds = [round(output.ended() - began, 3) for output in outputs]
            for happening in happenings:
                happening.cancel()
        for number in range(scenario.machines):
            lab.mend(number)
        told = [
            {"exit": code, "seconds": after, "output": output.lines}
            for code, after, output in zip(codes, seconds, outputs, strict=True)
        ]
        yield {"link": link.name, **_measured(lab, before, began), "late": bool(late), "answers": told}


def _measured(lab: Lab, before: list[tuple[int, int]], began: float) -> Result:
    after = lab.bytes()
    moved = [[b - a for a, b in zip(one, other, strict=True)] for one, other in zip(before, after, strict=True)]
    return {
        "seconds": round(time.monotonic() - began, 3),
        "sent_bytes": [sent for sent, _ in moved],
        "received_bytes": [received for _, received in moved],
        "congestion_control": lab.congestion,
        "load": round(os.getloadavg()[0], 1),
    }


@contextmanager
def _started(scenario: Scenario, lab: Lab, talk: bool) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the command on every machine, and end it."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for machine in lab.machines:
            # With stages, what a program says on standard error is the user's to see.
            errors = None if talk else subprocess.STDOUT
            pipes: Any = {"stdin": subprocess.PIPE if talk else subprocess.DEVNULL, "stdout": subprocess.PIPE}
            environment = {**os.environ, **_environment(scenario, machine, lab), **scenario.environment}
            words = lab.command(machine, [_filled(word, scenario, machine, lab) for word in scenario.command])
            processes.append(subprocess.Popen(words, stderr=errors, text=True, env=environment, **pipes))
        yield processes
    finally:
        for number, process in enumerate(processes):
            lab.signal(number, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout) if talk else ():
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()


def _environment(scenario: Scenario, machine: Machine, lab: Lab) -> dict[str, str]:
    """Return what a launcher such as torchrun would set on this machine."""
    ranks = {"RANK": machine.number, "WORLD_SIZE": scenario.machines, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    where = {"MASTER_ADDR": lab.machines[0].address, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "eth0"}
    return {**{name: str(value) for name, value in ranks.items()}, **where}


def _filled(word: str, scenario: Scenario, machine: Machine, lab: Lab) -> str:
    places = {"python": sys.executable, "here": str(HERE), "rank": str(machine.number), "disk": str(lab.disk)}
    for name, value in {**places, "machines": str(scenario.machines)}.items():
        word = word.replace("{" + name + "}", value)
    return word


@contextmanager
def _limited(lab: Lab, seconds: float) -> Iterator[list[bool]]:
    """Kill all processes when the time is up; what is yielded is then not empty."""
    late: list[bool] = []

    def end() -> None:
        late.append(True)
        for machine in lab.machines:
            lab.signal(machine.number, signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


class _Output:
    """What a process prints, read as it comes, so that events can wait for it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
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
        """Wait until a line holds `text`; False if the process ended before."""
        with self._changed:
            self._changed.wait_for(lambda: self._end or any(text in line for line in self.lines))
            return any(text in line for line in self.lines)

    def ended(self) -> float:
        """Return when the output ended."""
        self._reader.join()
        return self._end


class _Happening:
    """An event that waits for its time."""

    def __init__(self, event: Event, lab: Lab, output: _Output) -> None:
        self._event, self._lab, self._output = event, lab, output
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Let the event not happen any more."""
        self._over.set()
        self._thread.join()

    def _wait(self) -> None:
        event = self._event
        if event.after and not self._output.wait_for(event.after):
            return
        if not self._over.wait(event.seconds):
            self._do()

    def _do(self) -> None:
        event = self._event
        if event.do == "mend":
            self._lab.mend(event.machine)
        elif event.do.startswith("cut"):
            self._lab.cut(event.machine, event.do.partition("-")[2] or "both")
        else:
            kinds = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}
            self._lab.signal(event.machine, kinds[event.do])


def middle(values: list[float]) -> dict[str, float]:
    """Return the median and the range of some times.

    Example:
        >>> middle([3.0, 1.0, 2.0])
        {'median': 2.0, 'least': 1.0, 'most': 3.0}
    """
    found = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 6) for name, value in found.items()}


if __name__ == "__main__":
    main()
