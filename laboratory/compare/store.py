"""The store of runs: a file of JSON lines, one per finished run, whichever study asked for it."""

import json
import math
from pathlib import Path
from typing import Any

from laboratory.compare.run import Row

COUNTS = ("payload_bytes", "sent_bytes", "received_bytes")


def read_rows(path: Path) -> dict[str, Row]:
    """Reads all complete lines by key; a line that was cut short or damaged is ignored, so its run is done again.

    Examples:
        >>> read_rows(Path("no/such/file"))
        {}
    """
    rows = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if _is_run(row):
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


def _is_run(row: Any) -> bool:
    """Whether a line has all that tables and pictures are made from."""
    if not (isinstance(row, dict) and isinstance(row.get("curve"), list) and row["curve"]):
        return False
    texts = [row.get(name) for name in ("key", "name", "command")]
    numbers = [row.get(name) for name in (*COUNTS, "step_seconds")]
    losses = [row.get("val_loss", "")]
    for point in row["curve"]:
        if not isinstance(point, dict):
            return False
        numbers += [point.get(name) for name in ("step", *COUNTS[1:])]
        losses.append(point.get("val_loss", ""))
    numbers += [loss for loss in losses if loss is not None]
    return all(isinstance(text, str) for text in texts) and all(map(_is_number, numbers)) and row["curve"][-1]["step"]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
