"""What both fuzzers count: their result file, and what they print."""

from __future__ import annotations

import collections
import json
import re
import sys
from pathlib import Path

Counts = collections.Counter[tuple[str, str]]  # by target and verdict


def write(place: Path, unit: str, counts: Counts, wrong: list[str], seconds: float) -> None:
    """Writes the counts by target and verdict, and the failures, as JSON."""
    by_target: dict[str, dict[str, int]] = collections.defaultdict(dict)
    for (name, says), count in sorted(counts.items()):
        by_target[name][says] = count
    told = {unit: sum(counts.values()), "seconds": round(seconds), "wrong": wrong, "by_target": by_target}
    place.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def tell(unit: str, counts: Counts, wrong: list[str], seconds: float) -> int:
    """Prints the counts, and one failure of each kind; returns the exit code."""
    verdicts = sorted({says for _, says in counts})
    for name in [*sorted({name for name, _ in counts}), "all"]:
        found = {says: sum(c for (n, s), c in counts.items() if s == says and name in (n, "all")) for says in verdicts}
        print(f"{name:30}" + "".join(f"{says} {found[says]:>8,}   " for says in verdicts))
    print(f"{sum(counts.values()):,} {unit} in {seconds:.0f} s")
    for text in {re.sub(r"[0-9.e+-]+", "#", text.partition("\n")[0])[:70]: text for text in reversed(wrong)}.values():
        print(text, file=sys.stderr)
    return 1 if wrong else 0
