"""What race.toml says: the model, the methods, and the links of a race."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomllib

from demopt.compare.scale import Scale
from demopt.train.config import TrainConfig

RACE = Path(__file__).with_name("race.toml")


@dataclass(frozen=True)
class Entry:
    """A method as `demopt compare` knows it, and the learning rates that are tried (none: see `curve`)."""

    name: str
    method: str
    rates: tuple[float, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    curve: str = ""  # the method whose loss by step this one shares


@dataclass(frozen=True)
class Race:
    """A race: numbers of workers, model and schedule, methods."""

    workers: tuple[int, ...]
    seed: int
    model: dict[str, int]
    methods: tuple[Entry, ...]

    def config(self, lr: float) -> TrainConfig:
        """Return model, data and schedule as a `demopt train` config."""
        told = dict(self.model)
        every, batch = told.pop("eval_every"), told["batch"]
        return replace(Scale(**told).config(self.seed, batch), eval_every=every, lr=lr)


def read(path: Path = RACE) -> Race:
    """Read a race."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    methods = tuple(Entry(**{**entry, "rates": tuple(entry.get("rates", ()))}) for entry in found["methods"])
    return Race(tuple(found["workers"]), found["seed"], found["model"], methods)


def quick(race: Race) -> Race:
    """Return a race in which everything happens, and nothing is learnt.

    Example:
        >>> quick(read()).model["width"]
        32
    """
    small = {"steps": 30, "width": 32, "sequence": 16, "warmup": 5, "eval_every": 10, "eval_sequences": 8, "batch": 1}
    return replace(race, model={**race.model, **small})
