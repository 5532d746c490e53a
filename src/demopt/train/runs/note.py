"""The numbers that a worker of `demopt train` puts beside its message, and what others read of them."""

from __future__ import annotations

from typing import Any

#: The numbers that are read, and the largest of each that a training run can have.
NUMBERS = {"loss": 1e6, "val_loss": 1e6, "sequences": float(1 << 32), "speed": 1e9}


def numbers_of(note: Any) -> dict[str, float]:
    """Returns the known numbers in a note; anything else that another worker has put there is as good as nothing.

    Examples:
        >>> numbers_of({"loss": 2.5, "sequences": "boom", "more": 1})
        {'loss': 2.5}
        >>> numbers_of({"loss": float("inf"), "sequences": 10**400}), numbers_of(["loss"])
        ({}, {})
    """
    found = note if isinstance(note, dict) else {}
    return {
        name: found[name]
        for name, most in NUMBERS.items()
        if type(found.get(name)) in (int, float) and 0 <= found[name] <= most
    }
