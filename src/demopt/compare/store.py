"""runs.jsonl: one line per finished run, whichever study asked for it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from demopt.compare.run import Row

BYTES = ("payload_bytes", "sent_bytes", "received_bytes")

PROVENANCE = ("date", "machine", "torch", "demopt")


def read_rows(path: Path) -> dict[str, Row]:
    """Reads all complete lines by key; ignores a line that was cut short, damaged, or is not a run's.

    Examples:
        >>> read_rows(Path("no/such/file"))
        {}
    """
    if not path.exists():
        return {}
    rows = {}
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if _is_run(row):
            rows[row["key"]] = row
    return rows


def _is_run(row: Any) -> bool:
    """Whether a line has what tables and plots are made from; otherwise its run is done again."""
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("key", "name", "command")):
        return False
    curve = row.get("curve")
    if not isinstance(curve, list) or not curve or not all(_is_point(point) for point in curve):
        return False
    if curve[-1]["step"] < 1 or not all(isinstance(row.get(name), str) for name in PROVENANCE):
        return False
    numbers = (row.get(name) for name in (*BYTES, "lr", "seed", "seconds", "step_seconds"))
    return _is_loss(row.get("val_loss", "")) and all(map(_is_number, numbers))


def _is_point(point: Any) -> bool:
    if not isinstance(point, dict):
        return False
    numbers = (point.get(name) for name in ("step", "sent_bytes", "received_bytes"))
    return _is_loss(point.get("val_loss", "")) and all(map(_is_number, numbers))


def _is_loss(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def append_row(path: Path, row: Row) -> None:
    """Appends a line; starts a new one if an earlier process was killed while writing its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - 1))
        torn = end > 0 and file.read(1) != b"\n"
        file.write((b"\n" if torn else b"") + json.dumps(row, allow_nan=False).encode() + b"\n")
