"""Time to the same loss, by method and link: steps to it in simulation x seconds per step on each link.

    sudo python -m laboratory.network.race --out laboratory/results/network

The loss by step does not depend on the link, so it is simulated once (`laboratory.compare`, study "race"). The seconds
are real: `steps` on network namespaces, once as they are on this computer's cores, once with a stand-in for a GPU's
compute. Complete runs check the product. Results that --out holds are not measured again. --quick tries everything
in minutes, at a size that says nothing. --method, --machines, --link and --compute, all repeatable, choose a part of
the race, without complete runs.
"""

import argparse
import itertools
import json
import math
import statistics
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
from laboratory.network.ranks import ENTRIES, SAME_CURVE, SCALE
from laboratory.network.scenario import Scenario, run
from laboratory.network.steps import SHORT, timing_of

Row = dict[str, Any]
Curve = list[tuple[int, float]]  # loss by step
WORKERS = (2, 4)
LINKS = (Link(), Link("1gbit"), Link("100mbit"), Link("100mbit", 50), Link("10mbit"))
PICTURE = Link("100mbit").name
COMPUTE = {"cores": "as measured on the cores of one computer", "stand-in": "with a stand-in for a GPU's compute"}
AVERAGED = ("adamw", "muon")  # whose exchange is inside forward and backward
QUICK = Scale(steps=30, batch=1, width=32, sequence=16, warmup=5, eval_sequences=8)
FINISHED = (  # method, machines, link of the complete runs
    ("LocalDeMo, delay = 1", 4, Link("10mbit")),
    ("LocalDeMo, delay = 1", 4, Link("100mbit", 50)),
    ("LocalDeMo", 4, Link()),
    ("AdamW-DDP", 2, Link("100mbit")),
    ("Muon-DDP, bf16 gradients", 2, Link("1gbit")),
)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--method", action="append", choices=ENTRIES)
    parser.add_argument("--machines", action="append", type=int, choices=WORKERS)
    parser.add_argument("--link", action="append", choices=[link.name for link in LINKS])
    parser.add_argument("--compute", action="append", choices=COMPUTE)
    arguments = parser.parse_args()
    out, scale = arguments.out, QUICK if arguments.quick else SCALE
    methods, computes = arguments.method or list(ENTRIES), arguments.compute or list(COMPUTE)
    links = [
        link for link in (LINKS[2:4] if arguments.quick else LINKS) if link.name in (arguments.link or [link.name])
    ]
    whole = not (arguments.method or arguments.machines or arguments.link or arguments.compute)
    try:
        check()
    except MissingError as error:
        print(f"no machines here: they need {error}. Nothing was run.")
        return
    out.mkdir(parents=True, exist_ok=True)
    counts = arguments.machines or WORKERS
    curves = {workers: simulated(scale, workers, methods, out / "runs.jsonl") for workers in counts}
    rows = [
        row
        for compute, workers in itertools.product(computes, counts)
        for row in composed(curves[workers], timed(scale, compute, workers, methods, links, out), compute, workers)
    ]
    finished = complete_runs(scale, curves, out / "finished.json") if whole else []
    (out / "race.json").write_text(json.dumps({"scale": asdict(scale), "rows": rows}) + "\n", encoding="utf-8")
    text = "\n\n".join([*tables(rows), checked(rows, finished, curves)])
    (out / "tables.md").write_text(text + "\n", encoding="utf-8")
    draw_by_link(rows, out / "network.png")
    draw_by_time(rows, curves[max(counts)], out / "race.png")
    print(text)


def simulated(scale: Scale, workers: int, methods: Sequence[str], store: Path) -> dict[str, Curve]:
    """Returns the loss by step of methods, from the runs in the store and those that are missing."""
    corpus = read_text((), scale)
    study = chosen("race", {SAME_CURVE.get(name, name) for name in methods})
    plan = Plan(study, replace(scale, workers=workers), Source(corpus.fingerprint), rates=1)
    curves = {each.name: each.curve for each in collect(plan, carry_out_all(plan, corpus, store, Machine(jobs=2)))}
    return {name: curves[SAME_CURVE.get(name, name)] for name in methods}


def timed(
    scale: Scale, compute: str, workers: int, methods: Sequence[str], links: Sequence[Link], out: Path
) -> list[Row]:
    """Returns the seconds of steps on each link, measured now or before."""
    file = out / f"steps-{compute}-{workers}.json"
    if not file.exists():
        command = ("{python}", "-m", "laboratory.network.steps", json.dumps(asdict(scale)))
        settings = {"turns": 2, "rounds": 2, "stand_in": compute == "stand-in", "methods": list(methods)}
        scenario = Scenario(workers, command, tuple(links), True, 590.0, settings, ENVIRONMENT)
        file.write_text(json.dumps(run(scenario)) + "\n", encoding="utf-8")
    found: list[Row] = json.loads(file.read_text(encoding="utf-8"))
    return found


def complete_runs(scale: Scale, curves: dict[int, dict[str, Curve]], file: Path) -> list[Row]:
    """Returns complete runs to the loss that is raced for, made now or before."""
    if not file.exists():
        rows = []
        for name, workers, link in FINISHED:
            words = (name, str(target_loss(curves[workers])))
            command = ("{python}", "-m", "laboratory.network.steps", json.dumps(asdict(scale)), *words)
            (result,) = run(Scenario(workers, command, (link,), limit_seconds=590.0, environment=ENVIRONMENT))
            output = result["answers"][0]["output"]
            if any(answer["exit"] for answer in result["answers"]):
                raise SystemExit("\n".join([f"{name} has failed", *output[-20:]]))
            rows.append({**json.loads(output[-1]), "link": link.name, "load": result["load"]})
        file.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    found: list[Row] = json.loads(file.read_text(encoding="utf-8"))
    return found


def target_loss(curves: dict[str, Curve]) -> float:
    """Returns the loss that is raced for: AdamW-DDP's best, rounded up."""
    return math.ceil(100 * min(loss for _, loss in curves["AdamW-DDP"])) / 100


def steps_to(curve: Curve, loss: float) -> float | None:
    """Returns the step at which a curve reaches a loss, between its points by straight lines; None if it never does.

    Examples:
        >>> steps_to([(0, 4.0), (10, 2.0)], 3.0)
        5.0
    """
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= loss:
            return round(before + (high - loss) / (high - low) * (after - before), 1)
    return None


def composed(curves: dict[str, Curve], results: list[Row], compute: str, workers: int) -> list[Row]:
    """Returns a row for each method and link."""
    loss, rows = target_loss(curves), []
    for result, name in itertools.product(results, curves):
        step, steps = step_seconds(name, result), steps_to(curves[name], loss)
        seconds = None if steps is None else steps * step["step"]
        facts = {"workers": workers, "compute": compute, "link": result["link"], "method": name}
        rows.append({**facts, "loss": loss, "steps": steps, "per_step": step, "seconds": seconds})
    return rows


def step_seconds(name: str, result: Row) -> Row:
    """Returns the mean step of a method on a link: seconds on the slowest rank, split, and bytes received."""
    entry = ENTRIES[name]
    ranks = [answer["rounds"][timing_of(entry)] for answer in result["answers"]]
    rounds = list(zip(*ranks, strict=True))  # [round][rank][step]: total, compute, optimizer
    every = entry.settings.get("every") or entry.settings.get("sync_every") or 1
    shortened = "every" in entry.settings
    step = statistics.median(_mean_step([[s[0] for s in rank] for rank in each], every, shortened) for each in rounds)
    averaged = {timing_of(other) for other in ENTRIES.values() if other.method in AVERAGED}
    pure = [steps for answer in result["answers"] for name, steps in answer["rounds"].items() if name not in averaged]
    source = pure if entry.method in AVERAGED else ranks  # forward and backward of DDP contain its exchange
    compute = statistics.median(s[1] for rank in source for one in rank for s in one)
    optimizer = statistics.median(statistics.mean(s[2] for s in rank) for each in rounds for rank in each)
    counted = sum(len(each[0]) for each in rounds) * (every / SHORT if shortened else 1)
    received = max(answer["received_bytes"][timing_of(entry)] for answer in result["answers"]) / counted
    exchange = max(0.0, step - compute - optimizer)
    return {"step": step, "compute": compute, "optimizer": optimizer, "exchange": exchange, "received_bytes": received}


def _mean_step(ranks: list[list[float]], every: int, shortened: bool) -> float:
    """Returns the mean step of a round on the slowest rank; a short round stands for one of `every` steps."""
    if not shortened:
        return max(sum(steps) for steps in ranks) / every
    plain = max(statistics.median(steps[:-1]) for steps in ranks)
    return ((every - 1) * plain + max(steps[-1] for steps in ranks)) / every


def tables(rows: list[Row]) -> list[str]:
    """Returns a Markdown table of seconds to the loss, for each kind of compute and number of workers."""
    found = []
    for compute, workers in dict.fromkeys((row["compute"], row["workers"]) for row in rows):
        mine = [row for row in rows if (row["compute"], row["workers"]) == (compute, workers)]
        links = list(dict.fromkeys(row["link"] for row in mine))
        lines = [f"{workers} workers, {COMPUTE[compute]}, to a loss of {mine[0]['loss']:.2f}: seconds (ms per step: "]
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


def checked(rows: list[Row], finished: list[Row], curves: dict[int, dict[str, Curve]]) -> str:
    """Returns a Markdown table of complete runs beside simulated losses and composed seconds."""
    lines = ["| complete run | steps | loss (simulated) | seconds | composed |", "|---|---|---|---|---|"]
    for each in finished:
        name, workers, link, last = each["method"], each["workers"], each["link"], each["curve"][-1]
        loss = dict(curves[workers][name]).get(last["step"], math.nan)
        wanted = (name, workers, link, "cores")
        steps = [r["per_step"] for r in rows if (r["method"], r["workers"], r["link"], r["compute"]) == wanted]
        seconds = f"{last['step'] * steps[0]['step']:.1f}" if steps else "-"
        losses = f"{last['val_loss']:.3f} ({loss:.3f})"
        title = f"{name}, {workers} machines, {link}"
        lines.append(f"| {title} | {last['step']} | {losses} | {last['seconds']:.1f} | {seconds} |")
    return "\n".join(lines)


def draw_by_link(rows: list[Row], path: Path) -> None:
    """Draws the seconds to the loss by link, with the most workers; a panel for each kind of compute."""
    from matplotlib.figure import Figure

    figure, workers = Figure(figsize=(10.4, 4.2), layout="constrained"), max(row["workers"] for row in rows)
    computes = list(dict.fromkeys(row["compute"] for row in rows))
    for panel, compute in zip(figure.subplots(1, len(computes), squeeze=False)[0], computes, strict=True):
        mine = [row for row in rows if (row["compute"], row["workers"]) == (compute, workers)]
        links = list(dict.fromkeys(row["link"] for row in mine))
        for name in dict.fromkeys(row["method"] for row in mine):
            seconds = [math.nan if r["seconds"] is None else r["seconds"] for r in mine if r["method"] == name]
            panel.plot(range(len(links)), seconds, marker="o", label=name, linewidth=1 + name.startswith("LocalDeMo"))
        panel.set_xticks(range(len(links)), [link.replace(", ", "\n") for link in links], fontsize=8)
        panel.set_title(f"{workers} machines, {COMPUTE[compute]}", fontsize=9)
        panel.set_yscale("log")
        panel.set_ylabel(f"seconds to a validation loss of {mine[0]['loss']:.2f}")
    figure.legend(*panel.get_legend_handles_labels(), fontsize=7, loc="outside right upper")
    figure.savefig(path, dpi=130, metadata={"Software": None})


def draw_by_time(rows: list[Row], curves: dict[str, Curve], path: Path) -> None:
    """Draws the loss over the time that three methods take on the link PICTURE, with the most workers, as measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    panel = figure.subplots()
    workers = max(row["workers"] for row in rows)
    wanted = (workers, PICTURE, "cores")
    for row in [row for row in rows if (row["workers"], row["link"], row["compute"]) == wanted]:
        if row["method"] in ("AdamW-DDP", "Muon-DDP", "LocalDeMo"):
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
