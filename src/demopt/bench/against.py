"""Loads an optimizer from a user's file, to measure it beside DeMo."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from demopt.errors import kind_and_line
from demopt.train.config import InputError

_MODULE = "demopt_bench_against"  # the name the file is imported under


def split(against: str) -> tuple[Path, str]:
    """Split FILE:CLASS into file and class; the file must exist.

    Examples:
        >>> split("setup.py")
        Traceback (most recent call last):
        demopt.train.config.InputError: --against is 'setup.py', wanted FILE:CLASS, such as other.py:Other
    """
    file, _, name = against.rpartition(":")
    if not file or not name.isidentifier():
        raise InputError(f"--against is {against!r}, wanted FILE:CLASS, such as other.py:Other")
    if not Path(file).is_file():
        raise InputError(f"--against {against}: there is no file {file}")
    return Path(file), name


def load(against: str) -> type[Optimizer]:
    """Import the file under a name of its own, and return its class."""
    file, name = split(against)
    spec = importlib.util.spec_from_file_location(_MODULE, file)
    if spec is None or spec.loader is None:
        raise InputError(f"--against {against}: {file.name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses and pickle look the module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file raises is the user's to fix
        raise InputError(f"--against {against}: {kind_and_line(error)}") from error
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise InputError(f"--against {against}: {file.name} has no torch optimizer {name}")
    return found


def make(against: str, parameters: Iterable[Parameter], lr: float, arguments: dict[str, Any]) -> Optimizer:
    """Construct CLASS(parameters, lr=lr, ...); whatever it raises becomes an InputError."""
    kind: Any = load(against)
    try:
        made: Optimizer = kind(parameters, **{"lr": lr, **arguments})
    except Exception as error:
        raise InputError(f"--against {against}: {kind_and_line(error)}") from error
    return made
