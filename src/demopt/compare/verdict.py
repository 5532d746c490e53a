"""What a comparison comes to, in a few plain sentences made from its results."""

from __future__ import annotations

import math
from collections.abc import Sequence

from demopt.compare.catalogue import METHODS
from demopt.compare.links import LINK, LINKS
from demopt.compare.results import Result
from demopt.compare.table import bytes_text, loss_text, seconds_text

BASELINES = {"adamw": "AdamW-DDP", "muon": "Muon-DDP"}
OURS = "demopt"
LEAST = 5e-4  # a difference that the three digits of a loss do not show
MOST_NAMES = 3


def tag_of(result: Result) -> str:
    """Returns "demopt" for this library's rows, the baseline's name for a baseline's, otherwise an empty text.

    Examples:
        >>> tag_of(Result("a", "adamw", {}, 4, 4, 10, 1e-3, [], [0], [1.0], 0, 0, 0, 1, 0.1, [], []))
        'AdamW-DDP'
    """
    return OURS if METHODS[result.method].ours else BASELINES.get(result.method, "")


def sentences(results: Sequence[Result]) -> list[str]:
    """Returns which row has the lowest loss, then how demopt's best row compares with AdamW-DDP and with Muon-DDP.

    Rows are level if their mean losses differ by no more than the larger of both spreads. Times are those of `LINK`.

    Examples:
        >>> one = Result("a", "adamw", {}, 4, 4, 10, 1e-3, [], [0, 1], [1.0, 2.0], 0, 0, 0, 1, 0.1, [], [])
        >>> sentences([one])[0].partition(";")[0]
        'AdamW-DDP (a) has a loss of 1.500 ± 0.707 nats a byte'
    """
    ranked = sorted((result for result in results if math.isfinite(result.mean)), key=lambda result: result.mean)
    if not ranked:
        return ["No entry ended with a finite loss."]
    best = ranked[0]
    ours = [result for result in ranked if tag_of(result) == OURS]
    told = [_lowest(ranked)]
    if not ours and any(tag_of(result) == OURS for result in results):
        told.append("All of demopt's rows diverged.")
    told += _against_baselines(results, ours[0] if ours else best)
    if len(best.seeds) == 1:
        told.append("This is a single seed, so how much of it is chance is not known.")
    return told


def is_level(one: Result, other: Result) -> bool:
    """Returns whether two mean losses differ by no more than the larger of both spreads, or than can be seen."""
    known = [result.spread for result in (one, other) if math.isfinite(result.spread)]
    return abs(one.mean - other.mean) <= max([LEAST, *known])


def _lowest(ranked: Sequence[Result]) -> str:
    best, level = ranked[0], [other for other in ranked[1:] if is_level(ranked[0], other)]
    has = "has the lowest loss," if len(ranked) > 1 else "has a loss of"
    uploads = f"uploads {bytes_text(best.sent_bytes)} a step" if best.sent_bytes else "uploads nothing"
    time = f"a step takes {seconds_text(best.seconds(LINKS[LINK]))} at {LINK}"
    text = f"{_title(best)} {has} {loss_text(best)} nats a byte; it {uploads}, and {time}."
    if level:
        names = [_title(other) for other in level[:MOST_NAMES]]
        names += [f"{len(level) - MOST_NAMES} more"] if len(level) > MOST_NAMES else []
        text += f" Within the spread, {_joined(names)} {'is' if len(level) == 1 else 'are'} level with it."
    return text


def _against_baselines(results: Sequence[Result], row: Result) -> list[str]:
    """Compares a row with the best row of each baseline, which may be the row itself or not in the study."""
    told: list[str] = []
    for method, title in BASELINES.items():
        rows = [result for result in results if result.method == method and row.method != method]
        if not rows:
            continue
        baseline = min(rows, key=lambda result: result.mean)
        if math.isfinite(baseline.mean):
            told.append(f"Against {title}, {'it' if told else _title(row)} {_compared(row, baseline)}.")
        else:
            told.append(f"{title} diverged.")
    if not told and row.method not in BASELINES:
        told.append(f"There is no row of {' or '.join(BASELINES.values())} to compare with.")
    return told


def _compared(row: Result, baseline: Result) -> str:
    apart = abs(row.mean - baseline.mean)
    if is_level(row, baseline):
        loss = f"has the same loss within the spread ({apart:.3f} apart)"
    else:
        loss = f"has a {'lower' if row.mean < baseline.mean else 'higher'} loss (by {apart:.3f})"
    own, others = (seconds_text(each.seconds(LINKS[LINK])) for each in (row, baseline))
    time = f"takes {own} a step instead of {others}" if own != others else f"takes {own} a step as well"
    return f"{loss}, uploads {_fewer_bytes(row.sent_bytes, baseline.sent_bytes)} and {time} at {LINK}"


def _fewer_bytes(own: float, others: float) -> str:
    if own == others:
        return "as many bytes"
    if not own or not others:
        return f"{bytes_text(own)} instead of {bytes_text(others)}"
    ratio = others / own
    return f"{_times(ratio)} times fewer bytes" if ratio > 1 else f"{_times(1 / ratio)} times as many bytes"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"


def _title(result: Result) -> str:
    tag = tag_of(result)
    return f"{OURS}'s {result.name}" if tag == OURS else f"{tag} ({result.name})" if tag else result.name


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
