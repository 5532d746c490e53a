"""Plots, as PNG: loss against steps, bytes and time; and the Pareto fronts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

from demopt.compare.links import LINKS, network_seconds
from demopt.compare.results import Point, Result, on_front

Along = Callable[[Result, Point], float]
MARKERS = "osD^vP*X<>"
#: Related methods get shades of one colour; a study of one kind alone spreads over a whole colour map instead.
SHADES = {
    "demo": "Blues", "demo-delayed": "Blues", "published": "Purples", "powersgd": "Greens",
    "local-sgd": "Oranges", "diloco": "Oranges", "dgc": "Reds", "random-k": "Reds", "galore": "YlOrBr",
}  # fmt: skip
DENSE = "Greys"
BYTES_LABELS = {"sent_bytes": "bytes uploaded", "received_bytes": "bytes received"}


def draw(results: Sequence[Result]) -> dict[str, bytes]:
    """Draws all plots of a study: PNG bytes by name, in the order of the page."""
    shown = [result for result in results if result.curve]
    plots = {"loss-by-steps": _curves(shown, lambda _, point: point.step, "step", log=False)}
    for name, label in BYTES_LABELS.items():
        what = f"{label} by one worker"
        plots[f"loss-by-{label.replace(' ', '-')}"] = _curves(shown, _bytes(name), what, log=True)
    plots["loss-by-time"] = _times(shown)
    plots["pareto"] = _fronts(shown)
    return plots


def _bytes(name: str) -> Along:
    return lambda _, point: float(getattr(point, name))


def _curves(results: Sequence[Result], along: Along, label: str, log: bool) -> bytes:
    figure, axes = _figure(1, (9.5, 5))
    _draw_curves(axes[0], results, along)
    axes[0].set(xlabel=label, ylabel="validation loss, nats a byte", xscale="log" if log else "linear")
    if log:
        _ticks(axes[0], "B")
    axes[0].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    return _png(figure)


def _times(results: Sequence[Result]) -> bytes:
    """Plots loss against time, one panel per link."""
    figure, axes = _figure(len(LINKS) + 1, (12, 7.2), columns=3)
    for place, (name, speed) in zip(axes, LINKS.items(), strict=False):

        def along(result: Result, point: Point, speed: float = speed) -> float:
            network = network_seconds(point.sent_bytes, point.received_bytes, speed)
            return point.step * result.step_seconds + network

        _draw_curves(place, results, along)
        place.set(title=name, xscale="log", xlabel="time", ylabel="validation loss")
        _ticks(place, "s", between=(1, 3))
    handles, labels = axes[0].get_legend_handles_labels()
    axes[-1].axis("off")
    axes[-1].legend(handles, labels, loc="center", fontsize=7.5, ncols=2 if len(labels) > 12 else 1, frameon=False)
    return _png(figure)


def _fronts(results: Sequence[Result]) -> bytes:
    """Plots final loss against bytes a step; a line joins the Pareto front."""
    figure, axes = _figure(2, (12, 5.4), columns=2)
    styles = _styles(results)
    for place, (name, label) in zip(axes, BYTES_LABELS.items(), strict=True):
        marks = on_front(results, name)
        line = sorted((getattr(r, name), r.mean) for r, mark in zip(results, marks, strict=True) if mark)
        place.plot(*zip(*line, strict=True), color="0.6", lw=1.2, zorder=1) if line else None
        for number, (result, mark) in enumerate(zip(results, marks, strict=True)):
            color, marker = styles[number]
            spot = {"color": color, "marker": marker, "ms": 8, "mfc": color if mark else "white", "ls": "", "zorder": 2}
            low, high = (sign * (end - result.curve[-1].mean) for sign, end in _ends(result))
            place.errorbar(getattr(result, name), result.mean, yerr=[[low], [high]], label=result.name, **spot)
        place.set(xlabel=f"{label} a step by one worker", ylabel="final validation loss", xscale="log")
        _ticks(place, "B")
    axes[1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    return _png(figure)


def _ticks(place: Any, unit: str, between: tuple[int, ...] = (1,)) -> None:
    """Labels a logarithmic x axis with units, such as 10 kB or 3 s."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    place.xaxis.set_major_locator(LogLocator(subs=between))
    place.xaxis.set_major_formatter(EngFormatter(unit=unit))
    place.xaxis.set_minor_formatter(NullFormatter())


def _ends(result: Result) -> tuple[tuple[int, float], tuple[int, float]]:
    return (-1, result.curve[-1].least), (1, result.curve[-1].most)


def _draw_curves(place: Any, results: Sequence[Result], along: Along) -> None:
    """Draws the mean over seeds as a line, and the range from least to largest as a band."""
    lowest, highest, styles = [], [], _styles(results)
    for number, result in enumerate(results):
        color, marker = styles[number]
        points = [(along(result, p), p) for p in result.curve if along(result, p) > 0]
        if not points:
            continue
        x = [at for at, _ in points]
        place.plot(x, [p.mean for _, p in points], color=color, marker=marker, ms=3.5, lw=1.2, label=result.name)
        place.fill_between(x, [p.least for _, p in points], [p.most for _, p in points], color=color, alpha=0.15, lw=0)
        lowest.append(min(p.mean for _, p in points))
        highest.append(max(p.mean for _, p in points[len(points) // 4 :]))
    if lowest:
        room = 0.05 * (max(highest) - min(lowest)) + 1e-3
        place.set_ylim(min(lowest) - room, max(highest) + room)


def _styles(results: Sequence[Result]) -> list[tuple[Any, str]]:
    """Returns the colour and marker of each result."""
    from matplotlib import colormaps

    kinds = [SHADES.get(result.method, DENSE) for result in results]
    found = []
    for number, kind in enumerate(kinds):
        place, count = kinds[:number].count(kind), kinds.count(kind)
        part = place / max(1, count - 1)
        alone = len(set(kinds)) == 1
        color = colormaps["viridis"](0.92 * part) if alone else colormaps[kind](0.45 + 0.5 * part)
        found.append((color, MARKERS[number % len(MARKERS)]))
    return found


def _figure(count: int, size: tuple[float, float], columns: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")  # not pyplot: it keeps figures open and looks for a display
    rows = -(-count // columns)
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(count)]
    for place in axes:
        place.grid(alpha=0.25)
        place.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Any) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
