"""The picture of a run: losses, rounds and bytes as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import accumulate

from rich.filesize import decimal

from demopt.train.out import Row

WIDE, HIGH, EDGE = 720, 260, 56  # of the SVG: a panel, and the room for numbers beside it
DETAIL = 400  # points of a curve, at most
TRAIN, VALIDATION, SENT, RECEIVED = "#7aa6da", "#c2410c", "#15803d", "#7e22ce"

Points = list[tuple[float, float]]


def svg(rows: Sequence[Row], title: str) -> str:
    """Returns an SVG with two panels over the steps: losses; and the bytes of one worker, with its rounds."""
    train = [(row["step"], row["loss"]) for row in rows if row["loss"] is not None]
    val = [(row["step"], row["val_loss"]) for row in rows if row.get("val_loss") is not None]
    sent, received = (
        [*zip([row["step"] for row in rows], accumulate(row[name] for row in rows), strict=True)]
        for name in ("sent_bytes", "received_bytes")
    )
    rounds = [row["step"] for row in rows if row["payload_bytes"]]
    first, last = (rows[0]["step"], rows[-1]["step"]) if rows else (0, 1)
    steps, known = (first, max(last, first + 1)), [y for _, y in train + val] or [0.0]
    losses, top = (min(known), max(known)), 36 + HIGH + 30
    counts = (0.0, float(max([1, *(total for _, total in sent[-1:] + received[-1:])])))
    ticks = "".join(f"M{_x(step, steps):.1f} {top + HIGH}v-6" for step in rounds[:: -(-len(rounds) // DETAIL) or 1])
    body = [
        f'<text x="{EDGE}" y="20" font-size="14">{escape(title)}</text>',
        *_panel(36, losses, "{:.2f}".format),
        _curve(_thinned(train, DETAIL), steps, losses, 36, TRAIN, "training loss, nats", 0),
        _curve(val, steps, losses, 36, VALIDATION, "validation", 1),
        *_panel(top, counts, lambda value: decimal(round(value))),
        _curve(_thinned(sent, DETAIL), steps, counts, top, SENT, "bytes sent by one worker", 0),
        _curve(_thinned(received, DETAIL), steps, counts, top, RECEIVED, "received", 1),
        f'<path d="{ticks}" stroke="#888" fill="none"><title>{len(rounds)} rounds</title></path>',
        f'<text x="{EDGE}" y="{top + HIGH + 18}">step {first}; {len(rounds)} rounds, as ticks</text>',
        f'<text x="{EDGE + WIDE}" y="{top + HIGH + 18}" text-anchor="end">{last}</text>',
    ]
    size = f'width="{WIDE + EDGE + 16}" height="{top + HIGH + 30}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11" fill="#777">'
    return "\n".join([head, *body, "</svg>\n"])


def _panel(top: float, limits: tuple[float, float], text: Callable[[float], str]) -> list[str]:
    """Returns the frame of a panel, with its limits and its middle."""
    parts = [f'<rect x="{EDGE}" y="{top}" width="{WIDE}" height="{HIGH}" fill="none" stroke="#999"/>']
    for part in (0.0, 0.5, 1.0):
        value, y = limits[0] + part * (limits[1] - limits[0]), top + HIGH * (1 - part)
        parts.append(f'<text x="{EDGE - 6}" y="{y + 4:.0f}" text-anchor="end">{escape(text(value))}</text>')
    return parts


def _curve(
    points: Points, steps: tuple[int, int], limits: tuple[float, float], top: float, color: str, name: str, place: int
) -> str:
    """Returns a line, and its name in the corner of the panel."""
    span = (limits[1] - limits[0]) or 1.0
    way = " ".join(f"{_x(x, steps):.1f},{top + HIGH * (1 - (y - limits[0]) / span):.1f}" for x, y in points)
    legend = f'<text x="{EDGE + WIDE - 8}" y="{top + 18 + 16 * place}" text-anchor="end" fill="{color}">{name}</text>'
    return f'<polyline points="{way}" fill="none" stroke="{color}" stroke-width="1.6"/>{legend}'


def _x(step: float, steps: tuple[int, int]) -> float:
    return EDGE + WIDE * (step - steps[0]) / (steps[1] - steps[0])


def _thinned(points: Points, most: int) -> Points:
    """Returns at most `most` points, each the mean of its neighbours."""
    size = max(1, math.ceil(len(points) / most))
    parts = [points[first : first + size] for first in range(0, len(points), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]
