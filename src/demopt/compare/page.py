"""One self-contained HTML page: embedded plots, no scripts, no network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from demopt.compare import table
from demopt.compare.catalogue import METHODS
from demopt.compare.links import LINKS
from demopt.compare.results import Result, on_front
from demopt.compare.run import Row
from demopt.compare.sweep import FACTOR, Plan

TEMPLATE = Path(__file__).with_name("page.html.jinja")
CAPTIONS = {
    "loss-by-steps": "Validation loss against steps. Lines are means over seeds, bands reach from the least to the "
    "largest.",
    "loss-by-bytes-uploaded": "The same against what one worker has sent until then (logarithmic).",
    "loss-by-bytes-received": "The same against what one worker has received.",
    "loss-by-time": "The same against computed time: a worker's own measured computing, plus its bytes at the link's "
    "speed, not overlapped, no latency.",
    "pareto": "Final loss against bytes a step. Filled and joined: no other entry has both a lower mean loss and fewer "
    "bytes. Bars reach from the least to the largest seed.",
}


@dataclass(frozen=True)
class Facts:
    """What the page reports about the runs as a whole."""

    parameters: int
    data: str
    machines: list[str]
    dates: str
    versions: list[str]
    runs: int


def facts_of(plan: Plan, rows: Sequence[Row]) -> Facts:
    """Collects the facts from the records of the runs behind the page.

    Example:
        >>> from demopt.compare.scale import Scale
        >>> from demopt.compare.studies import chosen
        >>> from demopt.compare.run import Source
        >>> facts_of(Plan(chosen("reduction", []), Scale(), Source("")), []).runs
        0
    """
    dates = sorted({row["date"] for row in rows})
    names = ", ".join(plan.source.names) or "the text of the Python standard library"
    return Facts(
        parameters=rows[0]["parameters"] if rows else 0,
        data=f"{names} (fingerprint {plan.source.fingerprint[:12]})",
        machines=sorted({row["machine"] for row in rows}),
        dates=" to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])),
        versions=sorted({f"demopt {row['demopt']}, torch {row['torch']}" for row in rows}),
        runs=len(rows),
    )


def render(plan: Plan, results: Sequence[Result], facts: Facts, plots: Mapping[str, bytes]) -> str:
    """Renders the page as HTML."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"bytes": table.bytes_text, "seconds": table.seconds_text, "loss": table.loss_text}
    up, down = on_front(results, "sent_bytes"), on_front(results, "received_bytes")
    ordered = sorted(zip(results, up, down, strict=True), key=lambda each: each[0].mean)
    used = {result.method for result in results}
    images: list[dict[str, Any]] = [
        {"name": name, "data": base64.b64encode(image).decode(), "caption": CAPTIONS[name]}
        for name, image in plots.items()
    ]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        study=plan.study, scale=asdict(plan.scale), plan=plan, factor=FACTOR, facts=facts, links=list(LINKS),
        rows=ordered, images=images, kinds={name: kind for name, kind in METHODS.items() if name in used},
        dense=4 * facts.parameters,
    )  # fmt: skip
