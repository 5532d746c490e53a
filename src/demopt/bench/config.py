"""The settings of a `demopt bench` run, checked once, then passed to every worker as JSON."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demopt.core.names import wanted
from demopt.train.config import InputError

STUDIES = ("step", "train")
_COMMA = re.compile(r",(?![^(\[]*[)\]])")  # a comma outside brackets, unlike that in betas=(0.9,0.95)
_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class BenchConfig:
    """The settings of a run. `demo` has one entry of settings for each DeMo; `against` is FILE:CLASS or empty.

    `muon`: whether the step study has Muon, and LocalDeMo around it with the settings `local`.

    Examples:
        >>> BenchConfig(rounds=3).workers
        (1,)
    """

    studies: tuple[str, ...] = ("step",)
    shapes: str = "gpt2"
    preset: str = "small"
    batch: int = 4
    data: tuple[str, ...] = ()
    workers: tuple[int, ...] = (1,)
    rounds: int = 7
    warmup: int = 1
    demo: tuple[str, ...] = ("values=sign",)
    foreach: bool = True
    muon: bool = True
    local: str = ""
    against: str = ""
    against_args: str = ""
    powersgd_rank: int = 1
    bandwidth: str = ""
    device: str = "auto"
    threads: int = 0
    timeout: float = 600.0

    def __post_init__(self) -> None:
        """Raise InputError, naming the flag, for settings that cannot be measured."""
        for name in ("studies", "data", "workers", "demo"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, least in {"rounds": 1, "warmup": 1, "batch": 1, "powersgd_rank": 1, "threads": 0}.items():
            if getattr(self, name) < least:
                raise InputError(f"--{name.replace('_', '-')} is {getattr(self, name)}, wanted at least {least}")
        if not (math.isfinite(self.timeout) and self.timeout >= 1):
            raise InputError(f"--timeout is {self.timeout:g}, wanted at least 1 second")
        for study in self.studies:
            if study not in STUDIES:
                raise InputError(f"--study is {wanted(study, STUDIES)}")
        for count in self.workers:
            if not 1 <= count <= 64:
                raise InputError(f"--workers is {count}, wanted 1 to 64")
        for name in ("studies", "workers", "demo"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise InputError(f"--{'study' if name == 'studies' else name}: the same value is given twice")
        if self.against_args and not self.against:
            raise InputError("--against-args alone says nothing; give --against FILE:CLASS too")

    def save(self, path: Path) -> None:
        """Write the settings for the workers."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")


def read(path: Path) -> BenchConfig:
    """Read what `BenchConfig.save` wrote."""
    return BenchConfig(**json.loads(path.read_text(encoding="utf-8")))


def keywords(text: str, flag: str) -> dict[str, Any]:
    """Parse NAME=VALUE,NAME=VALUE into keyword arguments; values are Python literals, or words.

    Examples:
        >>> keywords("values=sign,top_k=8,exact=none", "--demo")
        {'values': 'sign', 'top_k': 8, 'exact': None}
    """
    found: dict[str, Any] = {}
    for part in filter(None, _COMMA.split(text)):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name.isidentifier() and equals and value):
            raise InputError(f"{flag} is {text!r}, wanted NAME=VALUE, with commas between several")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
