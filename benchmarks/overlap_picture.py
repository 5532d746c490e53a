"""Draws the lanes of overlap_timeline.py: each method's computation above its exchange, on one time axis."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

COLOURS = {
    "step": "#e4e4e4",  # under all others, so that it shows where none of them is
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "extract": "#fdae6b",
    "apply": "#74c476",
    "wait": "#ffffff",
    "exchange": "#d94801",
}
LABELS = {
    "step": "checks of what came",
    "extract": "extract (choose what is sent)",
    "apply": "apply the update",
    "wait": "waits for the network",
}
LABELS |= {"exchange": "message on the network"}
STEPS = 3  # as many steps of the slowest DeMo fill the picture


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws all methods, one below the other."""
    methods = results["methods"]
    window = max(found["lanes"]["step"][STEPS - 1][1] for name, found in methods.items() if name.startswith("DeMo"))
    figure, rows = pyplot.subplots(len(methods), 1, sharex=True, figsize=(10, 1.25 * len(methods) + 1.2))
    for axes, (name, found) in zip(rows, methods.items(), strict=True):
        _lanes(axes, found["lanes"])
        label = f"{name}: {found['step_seconds']:.2f} s a step, network {found['exchange_seconds']:.2f} s"
        axes.set_title(f"{label}, of which {found['hidden']:.0%} hidden", loc="left", fontsize=10)
    rows[-1].set(xlim=(0, window), xlabel="seconds")
    patches = [
        Patch(
            facecolor=colour, edgecolor="#888", hatch="////" if lane == "wait" else None, label=LABELS.get(lane, lane)
        )
        for lane, colour in COLOURS.items()
    ]
    figure.legend(handles=patches, loc="lower center", ncols=4, fontsize=8.5, frameon=False)
    parameters = next(iter(methods.values()))["parameters"]
    link = f"on a link limited to {results['link']['megabits']:g} Mbit/s"
    figure.suptitle(
        f"Two ranks, one core each, {link}; {parameters / 1e6:.1f}M parameters", fontsize=11, x=0.01, ha="left"
    )
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _lanes(axes: Axes, lanes: dict[str, list[tuple[float, float]]]) -> None:
    for lane, colour in COLOURS.items():
        bars = [(start, end - start) for start, end in lanes[lane]]
        place = (0, 0.8) if lane == "exchange" else (1, 0.8)
        if lane == "wait":
            axes.broken_barh(bars, place, facecolors=colour, edgecolors="#999", hatch="////", linewidth=0.3)
        else:
            axes.broken_barh(bars, place, facecolors=colour, edgecolors="white", linewidth=0.3)
    for number, (start, _) in enumerate(lanes["step"], start=1):
        axes.axvline(start, color="black", linewidth=1)
        axes.text(start, 1.82, f" step {number}", fontsize=7, va="bottom", clip_on=True)
    axes.set(ylim=(-0.1, 2.15), yticks=[0.4, 1.4], yticklabels=["network", "compute"])
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
