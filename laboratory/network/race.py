"""Time to Muon-DDP's final loss, by method and link: steps to it in simulation x seconds per step on each link.

    sudo python -m laboratory.network.race --out laboratory/results/network

The loss by step does not depend on the link, so it is simulated once (`laboratory.compare`, study "race"); methods of
few bytes get LONGER times as many steps. The seconds are real: `steps` on network namespaces, on this computer's cores.
Results that --out holds are not measured again. --quick tries everything in minutes, at a size whose results say
nothing. --method, --machines and --link, all repeatable, choose a part of the race.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from laboratory.compare.figures import collect
from laboratory.compare.jobs import Machine, carry_out_all, read_text
from laboratory.compare.run import Scale, Source
from laboratory.compare.studies import chosen
from laboratory.compare.tuning import Plan
from laboratory.network.machines import Link, MissingError, check
from laboratory.network.scenario import Scenario, run
from laboratory.network.steps import ENTRIES, SCALE

Row = dict[str, Any]
Curve = list[tuple[int, float]]  # loss by step
WORKERS = (2, 4)
LINKS = (Link(), Link("1gbit"), Link("100mbit"), Link("100mbit", 50), Link("10mbit"))
PICTURE = Link("100mbit").name
AVERAGED = ("AdamW-DDP", "Muon-DDP")  # their exchange is inside forward and backward
LONGER = 1.2  # times the steps, for methods of few bytes
QUICK = Scale(steps=30, batch=1, width=32, sequence=16, warmup=5, eval_sequences=8)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--method", action="append", choices=ENTRIES)
    parser.add_argument("--machines", action="append", type=int, choices=WORKERS)
    parser.add_argument("--link", action="append", choices=[link.name for link in LINKS])
    arguments = parser.parse_args()
    out, scale = arguments.out, QUICK if arguments.quick else SCALE
    methods = arguments.method or list(ENTRIES)
    links = [
        link for link in (LINKS[2:4] if arguments.quick else LINKS) if link.name in (arguments.link or [link.name])
    ]
    try:
        check()
    except MissingError as error:
        print(f"no machines here: they need {error}. Nothing was run.")
        return
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for workers in arguments.machines or WORKERS:
        curves = simulated(scale, workers, methods, out / "runs.jsonl")
        rows += composed(curves, timed(scale, workers, methods, links, out), workers)
    (out / "race.json").write_text(json.dumps({"scale": asdict(scale), "rows": rows}) + "\n", encoding="utf-8")
    text = "\n\n".join(tables(rows))
    (out / "tables.md").write_text(text + "\n", encoding="utf-8")
    draw_by_time(rows, curves, out / "race.png")
    print(text)


def simulated(scale: Scale, workers: int, methods: Sequence[str], store: Path) -> dict[str, Curve]:
    """Returns the loss by step of methods, from the runs in the store and those that are missing."""
    corpus = read_text((), scale)
    longer = replace(scale, workers=workers, steps=round(LONGER * scale.steps))
    found: dict[str, Curve] = {}
    for whole, averaged in ((replace(scale, workers=workers), True), (longer, False)):
        if names := [name for name in methods if (name in AVERAGED) == averaged]:
            plan = Plan(chosen("race", names), whole, Source(corpus.fingerprint), rates=1)  # the first seed only
            rows = carry_out_all(plan, corpus, store, Machine(jobs=2))
            found |= {each.name: each.curve for each in collect(plan, rows)}
    return {name: found[name] for name in methods}


def timed(scale: Scale, workers: int, methods: Sequence[str], links: Sequence[Link], out: Path) -> list[Row]:
    """Returns the seconds of steps on each link, measured now or before."""
    file = out / f"steps-cores-{workers}.json"
    if not file.exists():
        command = (sys.executable, "-m", "laboratory.network.steps", json.dumps(asdict(scale)))
        settings = {"turns": 2, "rounds": 2, "methods": list(methods)}
        scenario = Scenario(workers, command, tuple(links), 590.0, settings, ENVIRONMENT)
        file.write_text(json.dumps(run(scenario)) + "\n", encoding="utf-8")
    found: list[Row] = json.loads(file.read_text(encoding="utf-8"))
    return found


def steps_to(curve: Curve, loss: float) -> float | None:
    """Returns the step at which a curve reaches a loss, between its points by straight lines; None if it never does.

    Examples:
        >>> [steps_to([(0, 5.0), (10, 3.0), (20, 2.0)], loss) for loss in (3.0, 2.5, 2.0, 1.9)]
        [10.0, 15.0, 20.0, None]
    """
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= loss:
            return round(before + (high - loss) / (high - low) * (after - before), 1)
    return None


def composed(curves: dict[str, Curve], results: list[Row], workers: int) -> list[Row]:
    """Returns a row for each method and link."""
    loss, rows = curves["Muon-DDP"][-1][1], []  # the loss that all race to
    for result, name in itertools.product(results, curves):
        step, steps = step_seconds(name, result), steps_to(curves[name], loss)
        seconds = None if steps is None else steps * step["step"]
        facts = {"workers": workers, "link": result["link"], "method": name}
        rows.append({**facts, "loss": loss, "steps": steps, "per_step": step, "seconds": seconds})
    return rows


def step_seconds(name: str, result: Row) -> Row:
    """Returns the mean step of a method on a link: seconds on the slowest rank, split, and bytes received.

    Examples:
        >>> rounds = [[[1.0, 0.6, 0.2], [2.0, 0.6, 0.2]]]  # one round of two steps: total, compute, optimizer
        >>> answer = {"rounds": {"LocalDeMo": rounds}, "received_bytes": {"LocalDeMo": 8}}
        >>> slower = {"rounds": {"LocalDeMo": [[[1.0, 0.6, 0.2], [4.0, 0.6, 0.2]]]}, "received_bytes": {"LocalDeMo": 8}}
        >>> step = step_seconds("LocalDeMo", {"answers": [answer, slower]})
        >>> step["step"], round(step["exchange"], 3), step["received_bytes"]
        (2.5, 1.7, 4.0)
    """
    ranks = [answer["rounds"][name] for answer in result["answers"]]
    rounds = list(zip(*ranks, strict=True))  # [round][rank][step]: total, compute, optimizer
    step = statistics.median(max(statistics.mean(s[0] for s in rank) for rank in each) for each in rounds)
    source = ranks
    if name in AVERAGED:  # forward and backward contain its exchange: take the others' compute
        source = [
            steps for answer in result["answers"] for other, steps in answer["rounds"].items() if other not in AVERAGED
        ]
    compute = statistics.median(s[1] for rank in source for one in rank for s in one)
    optimizer = statistics.median(statistics.mean(s[2] for s in rank) for each in rounds for rank in each)
    received = max(answer["received_bytes"][name] for answer in result["answers"]) / sum(len(e[0]) for e in rounds)
    exchange = max(0.0, step - compute - optimizer)
    return {"step": step, "compute": compute, "optimizer": optimizer, "exchange": exchange, "received_bytes": received}


def tables(rows: list[Row]) -> list[str]:
    """Returns a Markdown table of seconds to the loss for each number of workers."""
    found = []
    for workers in dict.fromkeys(row["workers"] for row in rows):
        mine = [row for row in rows if row["workers"] == workers]
        links = list(dict.fromkeys(row["link"] for row in mine))
        lines = [f"{workers} workers, to a loss of {mine[0]['loss']:.3f}: seconds (ms per step: "]
        lines[0] += "compute, optimizer, exchange)\n"
        lines += ["| | steps | " + " | ".join(links) + " |", "|---" * (2 + len(links)) + "|"]
        for name in dict.fromkeys(row["method"] for row in mine):
            cells = [row for row in mine if row["method"] == name]
            steps = "-" if cells[0]["steps"] is None else f"{cells[0]['steps']:.0f}"
            lines.append(f"| {name} | {steps} | {' | '.join(map(_cell, cells))} |")
        found.append("\n".join(lines))
    return found


def _cell(row: Row) -> str:
    parts = ", ".join(f"{1e3 * row['per_step'][part]:.0f}" for part in ("compute", "optimizer", "exchange"))
    return f"{'-' if row['seconds'] is None else format(row['seconds'], ',.0f')} ({parts})"


def draw_by_time(rows: list[Row], curves: dict[str, Curve], path: Path) -> None:
    """Draws the loss over the time that three methods take on the link PICTURE, with the most workers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    panel = figure.subplots()
    workers = max(row["workers"] for row in rows)
    for row in [row for row in rows if (row["workers"], row["link"]) == (workers, PICTURE)]:
        if row["method"] in (*AVERAGED, "LocalDeMo"):
            times = [step * row["per_step"]["step"] for step, _ in curves[row["method"]]]
            losses = [loss for _, loss in curves[row["method"]]]
            title = row["method"] + ("" if row["seconds"] is None else f", {row['seconds']:.0f} s")
            panel.plot(times, losses, marker="o", markersize=3, label=title)
            panel.axhline(row["loss"], color="0.6", linewidth=0.8, linestyle="--", zorder=0)
    panel.set(xlabel=f"seconds, {workers} machines at {PICTURE}", ylabel="validation loss, nats per byte")
    panel.legend(fontsize=9, frameon=False)
    figure.savefig(path, dpi=130, metadata={"Software": None})


if __name__ == "__main__":
    main()
