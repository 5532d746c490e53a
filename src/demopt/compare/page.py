"""One self-contained HTML page: a verdict, a table, plots that a script of its own draws. It fetches nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from demopt.compare import table
from demopt.compare.catalogue import METHODS
from demopt.compare.links import LINK, LINKS
from demopt.compare.results import Result, on_front
from demopt.compare.run import Row
from demopt.compare.sweep import FACTOR, Plan
from demopt.compare.verdict import OURS, sentences, tag_of

TEMPLATES = Path(__file__).with_name("template")


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

    Examples:
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


def render(plan: Plan, results: Sequence[Result], facts: Facts) -> str:
    """Renders the page as HTML."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"bytes": table.bytes_text, "seconds": table.seconds_text, "loss": table.loss_text}
    up, down = on_front(results, "sent_bytes"), on_front(results, "received_bytes")
    ordered = sorted(zip(results, up, down, strict=True), key=lambda each: each[0].mean)
    tags = {result.name: tag_of(result) for result in results}
    if set(tags.values()) == {OURS}:
        tags = dict.fromkeys(tags, "")  # where all rows are demopt's, a mark tells nothing
    used = {result.method for result in results}
    plotted = [_plotted(result, front, tags[result.name]) for result, front, _ in ordered]
    return environment.get_template("page.html.jinja").render(
        study=plan.study, scale=asdict(plan.scale), plan=plan, factor=FACTOR, facts=facts, links=LINKS, link=LINK,
        verdict=sentences(results), rows=ordered, tags=tags, ours=OURS, dense=4 * facts.parameters,
        kinds={name: kind for name, kind in METHODS.items() if name in used},
        one_way=all(result.sent_bytes == result.received_bytes for result in results),
        one_size=len({result.workers for result in results}) < 2,
        data={"link": LINKS[LINK], "rows": plotted},
    )  # fmt: skip


def _plotted(result: Result, front: bool, tag: str) -> dict[str, Any]:
    """Returns what the page's script has to know of a row. Points: step, mean, least, most, sent and received bytes."""
    return {
        "name": result.name, "tag": tag, "ours": tag == OURS, "front": front, "workers": result.workers,
        "mean": result.mean if math.isfinite(result.mean) else None,
        "spread": result.spread if math.isfinite(result.spread) else 0.0, "payload": result.payload_bytes,
        "sent": result.sent_bytes, "received": result.received_bytes, "exchanges": result.exchanges,
        "seconds": result.step_seconds,
        "curve": [[p.step, p.mean, p.least, p.most, p.sent_bytes, p.received_bytes] for p in result.curve],
    }  # fmt: skip
