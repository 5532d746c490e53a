"""Time to the same loss: steps (curves.py) x seconds of a step on each link (steps.py); table and picture.

    python benchmarks/lab/compose.py --curves curves.jsonl --steps steps-4.json steps-2.json \\
        --stand steps-gpu-4.json --out benchmarks/results/race.json --picture docs/network.png
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

from curves import best, known
from race import Entry, Race, read
from steps import SHORT, timing_of

AVERAGED = ("adamw", "muon")  # whose exchange is inside forward and backward
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", type=Path, required=True)
    parser.add_argument(
        "--steps", type=Path, nargs="+", required=True, help="of steps.toml, a file a number of workers"
    )
    parser.add_argument("--stand", type=Path, nargs="*", default=[], help="of steps-gpu.toml")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    race, curves = read(), known(arguments.curves)
    rows = []
    for compute, files in (("cores", arguments.steps), ("stand-in", arguments.stand)):
        for file in files:
            rows += composed(race, curves, compute, json.loads(file.read_text(encoding="utf-8")))
    told = {"model": race.model, "curves": curves, "rows": rows}
    arguments.out.write_text(json.dumps(told) + "\n", encoding="utf-8")
    print("\n\n".join(tables(rows)))
    if arguments.picture:
        from picture import draw

        draw(rows, arguments.picture)


def composed(race: Race, curves: list[Row], compute: str, timed: Row) -> list[Row]:
    """Return a row for each method and link of a file of steps."""
    workers = timed["scenario"]["machines"]
    found = {entry.name: steps_to(race, curves, entry, workers) for entry in race.methods}
    curve_of = {name: steps for name, steps in found.items() if steps}
    target = target_loss(race, curves, workers)
    rows = []
    for result in timed["results"]:
        for entry in race.methods:
            if entry.name not in curve_of:
                continue
            step = seconds_of(race, entry, result)
            steps = curve_of[entry.name](target)
            facts = {"workers": workers, "compute_by": compute, "link": result["link"], "method": entry.name}
            per_step = {"seconds": step["step"], "received_bytes": step["received_bytes"]}
            whole = {name: None if steps is None else steps * value for name, value in per_step.items()}
            rows.append({**facts, "loss": target, "steps": steps, "a_step": step, **whole})
    return rows


def target_loss(race: Race, curves: list[Row], workers: int) -> float:
    """Return the loss that is raced for: where AdamW-DDP ends, rounded up. DiLoCo never gets there."""
    return math.ceil(100 * min(point["val_loss"] for point in curve(race, curves, "AdamW-DDP", workers))) / 100


def steps_to(race: Race, curves: list[Row], entry: Entry, workers: int) -> Any:
    """Return the function from a loss to the steps to it, None if it is never reached; None without a curve."""
    points = curve(race, curves, entry.name, workers)
    if not points:
        return None

    def steps(loss: float) -> float | None:
        for before, after in itertools.pairwise(points):
            if after["val_loss"] <= loss:
                part = (before["val_loss"] - loss) / (before["val_loss"] - after["val_loss"])
                return float(round(before["step"] + part * (after["step"] - before["step"]), 1))
        return None

    return steps


def curve(race: Race, curves: list[Row], method: str, workers: int) -> list[Row]:
    """Return the losses of a method by step, with its best rate; none if it has not run."""
    (name,) = (entry.curve or entry.name for entry in race.methods if entry.name == method)
    (source,) = (other for other in race.methods if other.name == name)
    lr = best(curves, source, max(race.workers))
    for row in curves:
        if (row["name"], row["workers"], row["lr"]) == (name, workers, lr):
            found: list[Row] = row["curve"]
            return found
    return []


def seconds_of(race: Race, entry: Entry, result: Row) -> Row:
    """Return a step of a method on a link, in the mean: seconds on the slowest rank, split, and bytes received."""
    name = timing_of(entry)
    answers = [answer["methods"][name] for answer in result["answers"]]
    # rounds[i] is the i-th counted round: per rank, per step (total, compute, optimizer)
    rounds = list(zip(*[[one for turn in turns for one in turn["rounds"]] for turns in answers], strict=True))
    every = entry.settings.get("every") or entry.settings.get("sync_every") or 1
    totals = sorted(_mean_step(entry, [[step[0] for step in rank] for rank in each], every) for each in rounds)
    compute = statistics.median(step[1] for other in _plain(race, result) for step in other)
    if entry.method not in AVERAGED:
        compute = statistics.median(step[1] for each in rounds for rank in each for step in rank)
    optimizer = statistics.median(statistics.mean(s[2] for s in rank) for each in rounds for rank in each)
    step = statistics.median(totals)
    counted = sum(len(each[0]) for each in rounds)
    if "every" in entry.settings:
        counted = counted // SHORT * every
    received = max(answer["received_bytes"][name] for answer in result["answers"]) / counted
    return {
        "step": step, "least": totals[0], "most": totals[-1], "compute": compute, "optimizer": optimizer,
        "exchange": max(0.0, step - compute - optimizer), "received_bytes": received,
    }  # fmt: skip


def _mean_step(entry: Entry, ranks: list[list[float]], every: int) -> float:
    """Return the mean step of a round on the slowest rank; DiLoCo's short round stands for one of H steps."""
    if "every" not in entry.settings:
        return max(sum(steps) for steps in ranks) / every
    plain = max(statistics.median(steps[:-1]) for steps in ranks)
    last = max(steps[-1] for steps in ranks)
    return ((every - 1) * plain + last) / every


def _plain(race: Race, result: Row) -> list[list[list[float]]]:
    """Return the steps of the methods whose forward and backward hold no exchange."""
    names = {timing_of(entry) for entry in race.methods if entry.method not in AVERAGED}
    return [
        steps
        for answer in result["answers"]
        for name in names
        for turn in answer["methods"][name]
        for steps in turn["rounds"]
    ]


def tables(rows: list[Row]) -> list[str]:
    """Return a Markdown table for each kind of compute and number of workers: seconds to the loss."""
    found = []
    for compute, workers in sorted({(row["compute_by"], row["workers"]) for row in rows}, reverse=True):
        mine = [row for row in rows if (row["compute_by"], row["workers"]) == (compute, workers)]
        links = list(dict.fromkeys(row["link"] for row in mine))
        title = f"{compute}, {workers} workers, to a loss of {mine[0]['loss']:.2f}"
        lines = [f"{title}, seconds (a step: compute, optimizer, exchange)", ""]
        lines += ["| | steps | " + " | ".join(links) + " |", "|---" * (2 + len(links)) + "|"]
        for name in dict.fromkeys(row["method"] for row in mine):
            cells = [_cell(row) for row in mine if row["method"] == name]
            steps = next(row["steps"] for row in mine if row["method"] == name)
            lines.append(f"| {name} | {'-' if steps is None else f'{steps:.0f}'} | " + " | ".join(cells) + " |")
        found.append("\n".join(lines))
    return found


def _cell(row: Row) -> str:
    step = row["a_step"]
    parts = ", ".join(f"{1e3 * step[part]:.0f}" for part in ("compute", "optimizer", "exchange"))
    return f"{'-' if row['seconds'] is None else format(row['seconds'], ',.0f')} ({parts} ms)"


if __name__ == "__main__":
    main()
