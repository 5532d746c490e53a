"""loss.png: the losses over steps, over bytes and over time, beside a baseline's if there is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from demopt.train.curve import Curve

# What the losses are drawn over: its name with the unit, and how much of it a step takes; nothing if 0 or unknown.
AXES: tuple[tuple[str, Callable[[Curve], float | None]], ...] = (
    ("optimizer steps", lambda _: 1.0),
    ("uploaded by one worker, MB", lambda curve: curve.sent_bytes / 1e6),
    ("time in training steps, seconds", lambda curve: curve.step_seconds),
)
INK, GREY = "#1f77b4", "#777777"
Factor = Callable[[Curve], float | None]


def plot(curve: Curve, other: Curve | None, path: Path) -> None:
    """Plot a run's losses, and the baseline's if there is one, to a PNG."""
    draw(curve, other).savefig(path, dpi=120)


def draw(curve: Curve, other: Curve | None) -> Any:
    """Return matplotlib's figure: a panel for each of `AXES` that means something for the run."""
    from matplotlib.figure import Figure  # without pyplot, which keeps figures and looks for a screen

    shown = [(name, factor) for name, factor in AXES if factor(curve)]
    size = (1.0 + 4.2 * len(shown), 4.4)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)
    for place, (name, factor) in zip(axes[0], shown, strict=True):
        _panel(place, factor, curve, other)
        place.set_xlabel(name)
        place.grid(alpha=0.3)
    axes[0][0].set_ylabel(f"loss, {curve.unit}")
    axes[0][0].legend(fontsize="small")
    if (limits := _limits(curve, other)) is not None:
        axes[0][0].set_ylim(*limits)
    settings = curve.settings
    workers = f"{settings['workers']} worker{'s' * (settings['workers'] > 1)}"
    figure.suptitle(f"{curve.label}, preset {settings['preset']}, {workers}", fontsize="medium")
    return figure


def _panel(place: Any, factor: Factor, curve: Curve, other: Curve | None) -> None:
    per_step, theirs = factor(curve), factor(other) if other else None
    if other is not None and theirs:
        _draw(place, other, theirs, GREY)
        if per_step and not 0.1 < theirs / per_step < 10:
            place.set_xscale("log")
    if per_step:
        _draw(place, curve, per_step, INK)


def _draw(place: Any, curve: Curve, per_step: float, colour: str) -> None:
    place.plot([step * per_step for step in curve.step], _numbers(curve.loss), lw=0.7, alpha=0.35, color=colour)
    where = [step * per_step for step in curve.val_step]
    label = f"{curve.label}: {curve.final:.3f} at the end"
    place.plot(where, _numbers(curve.val_loss), "o-", ms=3, color=colour, label=f"{label} (dots: validation)")


def _limits(curve: Curve, other: Curve | None) -> tuple[float, float] | None:
    """Return the ends of the loss axis: without the first steps, which would squeeze all the others."""
    seen: list[float] = []
    for each in filter(None, (curve, other)):
        start = each.step[len(each.step) // 20]
        losses = [*zip(each.step, each.loss, strict=True), *zip(each.val_step, each.val_loss, strict=True)]
        seen += [loss for step, loss in losses if step >= start and loss is not None]
    if not seen or not min(seen) < max(seen):
        return None
    margin = 0.05 * (max(seen) - min(seen))
    return min(seen) - margin, max(seen) + margin


def _numbers(losses: list[float | None]) -> list[float]:
    return [float("nan") if loss is None else loss for loss in losses]
