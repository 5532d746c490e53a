"""The report of a study: a Markdown table, and a picture of loss by step and by bytes."""

import math
from collections.abc import Sequence
from pathlib import Path

from laboratory.compare.figures import LINK, SIGMAS, Difference, Figures, difference, front
from laboratory.compare.run import Row
from laboratory.compare.tuning import Plan

MARK = "*"  # on a Pareto front


def table(figures: Sequence[Figures]) -> str:
    """Returns a Markdown table, one row per entry.

    Examples:
        >>> print(table([Figures("a", 1e-3, [1.0, 2.0], 10, 1000, 2000, 0.5, [])]))
        | | loss | above | lr | uploaded per step | received per step | step at 100 Mbit/s |
        |---|---|---|---|---|---|---|
        | a | 1.500 ± 0.707 | | 0.001 | 1.0 kB* | 2.0 kB* | 0.5 s |
    """
    lines = [f"| | loss | above | lr | uploaded per step | received per step | step at {LINK} |", "|---" * 7 + "|"]
    by_name = {each.name: each for each in figures}
    up = front([(each.sent_bytes, each.mean) for each in figures])
    down = front([(each.received_bytes, each.mean) for each in figures])
    for each, sent, received in zip(figures, up, down, strict=True):
        spread = f" ± {each.spread:.3f}" if math.isfinite(each.spread) else ""
        loss = f"{each.mean:.3f}{spread}" if math.isfinite(each.mean) else "diverged"
        cells = (bytes_text(each.sent_bytes) + MARK * sent, bytes_text(each.received_bytes) + MARK * received)
        beside = by_name.get(each.beside)
        above = f"{_difference_text(difference(each, beside))} " if beside else ""
        lines.append(
            f"| {each.name} | {loss} | {above}| {each.lr:g} | {' | '.join(cells)} | {each.seconds_on_link:.3g} s |"
        )
    return "\n".join(lines)


def _difference_text(found: Difference) -> str:
    errors = f" ({found.errors:.1f} s.e.)" if math.isfinite(found.errors) else ""
    return f"{found.nats:+.3f}{errors}"


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
        f"{MARK}: no other entry has both a lower mean loss and fewer bytes",
        f"Scale: {scale}",
        *(f"Bytes of {', '.join(entries)}: {rule}" for rule, entries in by_rule.items() if entries),
        *sorted({f"Machine: {row['machine']}, torch {row['torch']}, {row['date']}" for row in rows}),
    ]
    title = f"# {plan.study.name}: {plan.study.question}"
    return "\n\n".join([title, table(figures), "\n".join(f"- {note}" for note in notes)])


def draw(plan: Plan, figures: Sequence[Figures], path: Path) -> None:
    """Draws loss by step, and the last loss by the bytes that a worker uploads per step."""
    from matplotlib.figure import Figure

    page = Figure(figsize=(12, 5), layout="constrained")
    by_step, by_bytes = page.subplots(1, 2)
    for each in figures:
        (line,) = by_step.plot(*zip(*each.curve, strict=True), label=each.name) if each.curve else [None]
        if line is not None and math.isfinite(each.mean):
            error = each.spread if math.isfinite(each.spread) else 0.0
            by_bytes.errorbar(each.sent_bytes, each.mean, error, fmt="o", color=line.get_color())
            by_bytes.annotate(each.name, (each.sent_bytes, each.mean), (4, 4), textcoords="offset points", fontsize=7)
    by_step.set(xlabel="step", ylabel="validation loss, nats per byte", title=plan.study.question)
    by_bytes.set(xlabel="bytes uploaded per worker and step", xscale="symlog")
    by_step.legend(fontsize=7)
    page.savefig(path, dpi=130)


def bytes_text(count: float) -> str:
    """Formats a byte count with a decimal unit.

    Examples:
        >>> bytes_text(1500.2)
        '1.5 kB'
    """
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
