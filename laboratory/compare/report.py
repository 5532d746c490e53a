"""The report of a study: a Markdown table."""

import math
from collections.abc import Sequence

from rich.filesize import decimal

from laboratory.compare.figures import SIGMAS, Figures, difference
from laboratory.compare.run import Row
from laboratory.compare.tuning import Plan


def table(figures: Sequence[Figures]) -> str:
    """Returns a Markdown table, one row per entry.

    Examples:
        >>> print(table([Figures("a", 1e-3, [1.0, 2.0], 10, 1000, 2000, [])]))
        | | loss | above | lr | uploaded per step | received per step |
        |---|---|---|---|---|---|
        | a | 1.500 ± 0.707 | | 0.001 | 1.0 kB | 2.0 kB |
    """
    lines = ["| | loss | above | lr | uploaded per step | received per step |", "|---" * 6 + "|"]
    by_name = {each.name: each for each in figures}
    for each in figures:
        spread = f" ± {each.spread:.3f}" if math.isfinite(each.spread) else ""
        loss = f"{each.mean:.3f}{spread}" if math.isfinite(each.mean) else "diverged"
        above = ""
        if each.beside in by_name:
            nats, errors = difference(each, by_name[each.beside])
            above = f"{nats:+.3f} " + (f"({errors:.1f} s.e.) " if math.isfinite(errors) else "")
        cells = f"{decimal(round(each.sent_bytes))} | {decimal(round(each.received_bytes))}"
        lines.append(f"| {each.name} | {loss} | {above}| {each.lr:g} | {cells} |")
    return "\n".join(lines)


def text(plan: Plan, figures: Sequence[Figures], rows: Sequence[Row]) -> str:
    """Returns the whole report as Markdown."""
    names = ", ".join(plan.source.names) or "the text of the Python standard library"
    seeds = ", ".join(map(str, plan.seeds))
    scale = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in vars(plan.scale).items())
    rules = {row["name"]: row["bytes_rule"] for row in rows}
    by_rule = {rule: [each.name for each in figures if rules[each.name] == rule] for rule in rules.values()}
    notes = [
        f"Loss: nats per byte on {names}; mean and standard deviation of the seeds {seeds}",
        f"above: the distance from the mean of the same optimizer in DDP; it counts from {SIGMAS} standard errors",
        f"Scale: {scale}",
        *(f"Bytes of {', '.join(entries)}: {rule}" for rule, entries in by_rule.items() if entries),
        *sorted({f"Machine: {row['machine']}, torch {row['torch']}, {row['date']}" for row in rows}),
    ]
    title = f"# {plan.study.name}: {plan.study.question}"
    return "\n\n".join([title, table(figures), "\n".join(f"- {note}" for note in notes)])
