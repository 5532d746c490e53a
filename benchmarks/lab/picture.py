"""The pictures of a race: time to the same loss by link, and loss by time on one link; a line a method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {
    "AdamW-DDP": "#777777",
    "Muon-DDP": "#b58900",
    "Muon-DDP, bf16 gradients": "#e0c060",
    "DiLoCo, H = 10": "#9467bd",
    "MuLoCo, H = 10": "#2ca02c",
    "DeMo": "#1f77b4",
    "LocalDeMo": "#ff9896",
    "LocalDeMo, delay = 1": "#d62728",
}
TITLES = {"cores": "as measured on two cores", "stand-in": "with a stand-in for a GPU's compute"}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the rows of the largest number of workers, a panel for each kind of compute."""
    workers = max(row["workers"] for row in rows)
    kinds = [kind for kind in TITLES if any(r["compute_by"] == kind and r["workers"] == workers for r in rows)]
    figure, panels = plt.subplots(1, len(kinds), figsize=(5.2 * len(kinds), 4.2), squeeze=False)
    for panel, kind in zip(panels[0], kinds, strict=True):
        mine = [row for row in rows if row["compute_by"] == kind and row["workers"] == workers]
        links = list(dict.fromkeys(row["link"] for row in mine))
        for name in dict.fromkeys(row["method"] for row in mine if row["seconds"] is not None):
            seconds = [row["seconds"] for row in mine if row["method"] == name]
            colour, wide = COLOURS.get(name, "#bbbbbb"), 2.4 if name.startswith("LocalDeMo") else 1.4
            panel.plot(range(len(links)), seconds, marker="o", color=colour, linewidth=wide, label=name)
        panel.set_yscale("log")
        panel.set_xticks(range(len(links)), [link.replace(", ", "\n") for link in links], fontsize=8)
        panel.set_ylabel(f"seconds to a validation loss of {mine[0]['loss']:.2f}")
        panel.set_title(f"{workers} machines, {TITLES[kind]}", fontsize=10)
        panel.grid(axis="y", which="both", alpha=0.25)
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130, metadata={"Software": None})


FIRST = ("AdamW-DDP", "Muon-DDP", "LocalDeMo")  # methods of the README's picture
NAMES = {"AdamW-DDP": "AdamW, DDP", "Muon-DDP": "Muon, DDP", "LocalDeMo": "demopt: LocalDeMo around Muon"}


def draw_race(rows: list[dict[str, Any]], curves: dict[str, list[dict[str, Any]]], link: str, path: Path) -> None:
    """Draw the loss of the FIRST methods over the time that they take on a link, with the most workers, as measured."""
    workers = max(row["workers"] for row in rows)
    mine = {r["method"]: r for r in rows if (r["workers"], r["link"], r["compute_by"]) == (workers, link, "cores")}
    figure, panel = plt.subplots(figsize=(7.2, 3.4))
    for name in FIRST:
        points, second = curves[name], mine[name]["a_step"]["step"]
        times, losses = [p["step"] * second for p in points], [p["val_loss"] for p in points]
        colour = COLOURS["LocalDeMo, delay = 1" if name == "LocalDeMo" else name]
        wide = 2.6 if name == "LocalDeMo" else 1.6
        panel.plot(times, losses, marker="o", markersize=3, color=colour, linewidth=wide, label=NAMES[name])
        panel.plot(mine[name]["seconds"], mine[name]["loss"], "o", color=colour, markersize=8)
        panel.annotate(
            f"{mine[name]['seconds']:.0f} s", (mine[name]["seconds"], mine[name]["loss"]), (4, 7),
            textcoords="offset points", color=colour, fontsize=10, weight="bold",
        )  # fmt: skip
    target = next(iter(mine.values()))["loss"]
    panel.axhline(target, color="0.6", linewidth=0.8, linestyle="--", zorder=0)
    panel.set(xlabel=f"seconds, {workers} machines at {link}", ylabel="validation loss, nats a byte", xlim=(0, None))
    panel.set_ylim(top=3.2)
    panel.legend(fontsize=9, frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130, metadata={"Software": None})
