"""The store of runs: a file of JSON lines, one per finished run, whichever study asked for it."""

import json
from contextlib import suppress
from pathlib import Path

from laboratory.compare.run import Row

COUNTS = ("payload_bytes", "sent_bytes", "received_bytes")


def read_rows(path: Path) -> dict[str, Row]:
    """Reads all complete lines by key; a line that was cut short is ignored, so its run is done again."""
    rows = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError):
            row = json.loads(line)
            rows[row["key"]] = row
    return rows


def append_row(path: Path, row: Row) -> None:
    """Appends a line; starts a new one if an earlier process was killed in the middle of its line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - 1))
        torn = end > 0 and file.read(1) != b"\n"
        file.write((b"\n" if torn else b"") + json.dumps(row, allow_nan=False).encode() + b"\n")
