"""A scenario: how many machines, which links, what runs on each machine, what breaks. It is a TOML file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib
from network import Link

ACTIONS = ("cut-in", "cut-out", "cut", "mend", "kill", "stop", "continue")


class ScenarioError(ValueError):
    """A mistake in a scenario file."""


@dataclass(frozen=True)
class Event:
    """Something that happens to a machine: when `text` has been printed on a machine `times` times, and then `seconds`.

    cut-in, cut-out, cut: what it receives, sends or both vanishes; mend undoes it. kill, stop, continue: its processes.
    """

    do: str
    machine: int
    after: str = ""
    on: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Raise ScenarioError for an unknown action."""
        if self.do not in ACTIONS:
            raise ScenarioError(f"an event does {self.do!r}, wanted one of {', '.join(ACTIONS)}")


@dataclass(frozen=True)
class Scenario:
    """What a scenario file says.

    `command` runs on every machine; {python}, {here} (this folder), {rank}, {machines} and {disk} are replaced in it.
    With `stages`, one set of processes goes through all links: each gets a line of JSON (link) on standard input and
    answers with a line of JSON. Without, the command runs anew for each link, and what it prints is kept.
    """

    name: str
    machines: int
    command: tuple[str, ...]
    links: tuple[Link, ...] = (Link(),)
    stages: bool = False
    hosts: str = "real"
    limit_seconds: float = 300.0
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    events: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        """Raise ScenarioError for values that no laboratory can use."""
        if not 1 <= self.machines <= 64:
            raise ScenarioError(f"machines is {self.machines}, wanted 1 to 64")
        if not self.command:
            raise ScenarioError("command is empty, wanted what runs on every machine")
        if self.hosts not in ("real", "debian", "none"):
            raise ScenarioError(f"hosts is {self.hosts!r}, wanted real, debian or none")
        if self.stages and self.events:
            raise ScenarioError("events are for scenarios without stages")
        for event in self.events:
            if not (0 <= event.machine < self.machines and 0 <= event.on < self.machines):
                raise ScenarioError(f"an event is about machine {event.machine} of {self.machines}")


def read(path: Path) -> Scenario:
    """Read a scenario; ScenarioError says what is wrong with it."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ScenarioError(f"{path}: {error}") from None
    try:
        links = tuple(_made(Link, link) for link in found.pop("links", [{}]))
        for link in links:
            _ = link.bits_per_second
        events = tuple(_made(Event, event) for event in found.pop("events", []))
        command = tuple(found.pop("command", ()))
        return _made(Scenario, {"name": path.stem, "machines": 0, **found, "command": command} | _both(links, events))
    except ValueError as error:
        raise ScenarioError(f"{path}: {error}") from None


def _both(links: tuple[Link, ...], events: tuple[Event, ...]) -> dict[str, Any]:
    return {"links": links, "events": events}


def _made(kind: type, values: dict[str, Any]) -> Any:
    known = [item.name for item in dataclasses.fields(kind)]
    for name in values:
        if name not in known:
            raise ScenarioError(f"unknown {name!r}, wanted one of {', '.join(known)}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ScenarioError(str(error)) from None
