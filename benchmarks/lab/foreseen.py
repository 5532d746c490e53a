"""What `demopt plan` foresees beside what the laboratory measured: a Markdown table of results of exchange.toml.

python benchmarks/lab/foreseen.py exchange-2.json exchange-4.json
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import network

from demopt.plan.network import Call, Link


def main() -> None:
    show([Path(name) for name in sys.argv[1:]])


def show(files: list[Path]) -> None:
    """Print the table."""
    print(
        "| machines | link | collective | bytes | measured, s (range) | foreseen, s | |\n|---|---|---|---|---|---|---|"
    )
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        for link, result in zip(found["scenario"]["links"], found["results"], strict=True):
            for measured in result["answers"][0]:
                print(line(found["scenario"]["machines"], network.Link(**link), measured))


def line(machines: int, link: network.Link, measured: dict[str, Any]) -> str:
    """Return a row: a collective on a link, measured and foreseen."""
    rate, seconds = link.bits_per_second, measured["seconds"]
    assert rate is not None
    call = Call(measured["call"], measured["bytes"])
    foreseen = Link(rate, link.rtt_ms / 1e3).seconds([call], machines)
    middle = statistics.median(seconds)
    spread = f"{middle:.3f} ({min(seconds):.3f}-{max(seconds):.3f})"
    what = f"| {machines} | {link.name} | {call.kind} | {call.size:,}"
    return f"{what} | {spread} | {foreseen:.3f} | {foreseen / middle - 1:+.0%} |"


if __name__ == "__main__":
    main()
