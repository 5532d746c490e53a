"""The hardware and software of a run, and the command that repeats it."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from demopt.train.team import cores

_CPUINFO = Path("/proc/cpuinfo")


def describe() -> dict[str, Any]:
    """Return processor, cores and GPU."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {"cpu": cpu_model(), "cores": cores(), "gpu": gpu}


def cpu_model() -> str:
    """Return the processor's name."""
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def shown_command(arguments: Sequence[str]) -> str:
    """Return the command for others to repeat: files by name, without this machine's folders.

    Examples:
        >>> shown_command(["bench", "--against", "/home/me/other.py:Other", "--rounds", "3"])
        'demopt bench --against other.py:Other --rounds 3'
    """
    return shlex.join(["demopt", *map(_without_folder, arguments)])


def _without_folder(argument: str) -> str:
    flag, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return flag + equals + (value.rpartition("/")[2] if value.startswith(("/", "~")) else value)
