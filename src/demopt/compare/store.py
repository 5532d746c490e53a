"""runs.jsonl: one line per finished run, whichever study asked for it."""

from __future__ import annotations

import json
from pathlib import Path

from demopt.compare.run import Row

NEEDED = {"key", "name", "val_loss", "curve", "command"}


def read_rows(path: Path) -> dict[str, Row]:
    """Reads all complete lines by key; ignores a line that was cut short or is not a run's.

    Example:
        >>> read_rows(Path("no/such/file"))
        {}
    """
    if not path.exists():
        return {}
    rows = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.keys() >= NEEDED:
            rows[row["key"]] = row
    return rows


def append_row(path: Path, row: Row) -> None:
    """Appends a line; starts a new one if an earlier process was killed while writing its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - 1))
        torn = end > 0 and file.read(1) != b"\n"
        file.write((b"\n" if torn else b"") + json.dumps(row, allow_nan=False).encode() + b"\n")
