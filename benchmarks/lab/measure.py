"""All figures of docs/network.md from nothing: rates, collectives, curves, steps on each link, complete runs.

    python benchmarks/lab/measure.py --out benchmarks/results/network --docs docs

Takes root, and on two cores half an hour with nothing else running. Results that --out already holds are not measured
again. The tables go into docs/network.md between its marks, the picture beside it. --quick tries all of it in a few
minutes, at a size that says nothing: give it another --out, and no --docs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import foreseen
from compose import composed, curve, tables
from curves import best, known, wanted
from network import Link, MissingError, check
from race import Race, read
from race import quick as smaller
from scenario import Scenario
from scenario import read as read_scenario

from lab import run

HERE = Path(__file__).resolve().parent
FINISHED = (  # method, machines, link: complete runs that check what is composed
    ("LocalDeMo, delay = 1", 4, Link("10mbit")),
    ("LocalDeMo, delay = 1", 4, Link("100mbit", 50)),
    ("LocalDeMo", 4, Link()),
    ("AdamW-DDP", 2, Link("100mbit")),
    ("Muon-DDP, bf16 gradients", 2, Link("1gbit")),
)
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    try:
        check()
    except MissingError as error:
        print(f"no laboratory here: it needs {error}. Nothing was run.")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    race = smaller(read()) if arguments.quick else read()
    measure(race, arguments.out, arguments.quick)
    rows = _rows(race, arguments.out)
    (arguments.out / "race.json").write_text(json.dumps({"model": race.model, "rows": rows}) + "\n", encoding="utf-8")
    text = "\n\n".join(_sections(race, rows, arguments.out))
    (arguments.out / "tables.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    if arguments.docs:
        from picture import FIRST, draw, draw_race

        draw(rows, arguments.docs / "network.png")
        curves, most = known(arguments.out / "curves.jsonl"), max(race.workers)
        by_step = {name: curve(race, curves, name, most) for name in FIRST}
        draw_race(rows, by_step, "100 Mbit/s", arguments.docs / "race.png")
        put(f"![Time to the same loss, by link](network.png)\n\n{text}", arguments.docs / "network.md")


def measure(race: Race, out: Path, quick: bool) -> None:
    """Measure what is missing."""
    _lab("rates", 2, out / "rates.json", {"seconds": 0.3} if quick else {})
    for machines in race.workers:
        few: Row = {"repeats": 2, "pause": 0.1, "sizes": {"all_gather": [35_000], "all_reduce": [100_000]}}
        _lab("exchange", machines, out / f"exchange-{machines}.json", few if quick else {})
    for machines in reversed(race.workers):
        few = {"turns": 1, "rounds": 1} if quick else {}
        _lab("steps", machines, out / f"steps-{machines}.json", few)
        _lab("steps-gpu", machines, out / f"steps-gpu-{machines}.json", few)
    _curves(race, out / "curves.jsonl", quick)
    _finish(race, out / "finished.json", quick)


def _lab(name: str, machines: int, file: Path, settings: Row) -> None:
    """Run a scenario, unless its file is there."""
    if file.exists():
        return
    print(f"{name}, {machines} machines", file=sys.stderr, flush=True)
    scenario = replace(read_scenario(HERE / "scenarios" / f"{name}.toml"), machines=machines)
    if settings:
        scenario = replace(scenario, settings={**scenario.settings, **settings}, links=scenario.links[2:4])
    results = run(scenario)
    file.write_text(json.dumps({"scenario": asdict(scenario), "results": results}) + "\n", encoding="utf-8")


def _curves(race: Race, file: Path, quick: bool) -> None:
    """Run the missing curves, half of the methods in each of two processes."""
    halves = [[entry.name for entry in race.methods[half::2]] for half in range(2)]
    while wanted(race, known(file)):
        print("curves", file=sys.stderr, flush=True)
        words = [sys.executable, str(HERE / "curves.py"), "--out", str(file), *(["--quick"] if quick else [])]
        flags = [[word for name in half for word in ("--only", name)] for half in halves]
        for process in [subprocess.Popen([*words, *flag]) for flag in flags]:
            if process.wait():
                raise SystemExit("measure: curves.py has failed")


def _finish(race: Race, file: Path, quick: bool) -> None:
    """Make complete runs to the loss that is raced for."""
    if file.exists():
        return
    curves, found = known(file.with_name("curves.jsonl")), []
    for name, machines, link in FINISHED:
        print(f"{name} on {machines} machines to the end", file=sys.stderr, flush=True)
        (entry,) = (entry for entry in race.methods if entry.name == name)
        (source,) = (other for other in race.methods if other.name == (entry.curve or name))
        rows = _rows(race, file.parent)
        loss = next(row["loss"] for row in rows if row["workers"] == machines)
        rate = best(curves, source, max(race.workers))
        command = ("{python}", "{here}/finish.py", name, str(rate), str(loss), *(["--quick"] if quick else []))
        scenario = Scenario(
            "finish", machines, command, (link,), limit_seconds=590, environment={"OMP_NUM_THREADS": "1"}
        )
        (result,) = run(scenario)
        output = result["answers"][0]["output"]
        if any(answer["exit"] for answer in result["answers"]):
            raise SystemExit("\n".join([f"measure: {name} has failed", *output[-20:]]))
        told = json.loads(output[-1])
        found.append({**told, "link": link.name, "sent_bytes": result["sent_bytes"], "load": result["load"]})
    file.write_text(json.dumps(found) + "\n", encoding="utf-8")


def _rows(race: Race, out: Path) -> list[Row]:
    curves, rows = known(out / "curves.jsonl"), []
    for compute, name in (("cores", "steps"), ("stand-in", "steps-gpu")):
        for machines in race.workers:
            timed = json.loads((out / f"{name}-{machines}.json").read_text(encoding="utf-8"))
            rows += composed(race, curves, compute, timed)
    return rows


def _sections(race: Race, rows: list[Row], out: Path) -> Iterator[str]:
    """Yield the text of docs/network.md that has figures."""
    yield "### Time to the same loss"
    yield from tables(rows)
    yield "Goals: LocalDeMo (the better of both) against AdamW-DDP, and against itself without a limit\n\n" + _goals(
        rows
    )
    yield "### Complete runs beside what is composed\n\n" + _checked(rows, race, out)
    yield "### What the plan foresees\n\n" + _foreseen(race, out)
    yield "### The links\n\n" + _links(out)


def _goals(rows: list[Row]) -> str:
    lines = ["| compute, workers | link | AdamW-DDP / LocalDeMo | LocalDeMo / without a limit |", "|---|---|---|---|"]
    for compute, workers in sorted({(row["compute_by"], row["workers"]) for row in rows}, reverse=True):
        mine = [row for row in rows if (row["compute_by"], row["workers"]) == (compute, workers)]
        links = list(dict.fromkeys(row["link"] for row in mine))
        ours = {link: min(r["seconds"] for r in mine if r["link"] == link and "Local" in r["method"]) for link in links}
        for link in links:
            (ddp,) = (r["seconds"] for r in mine if r["link"] == link and r["method"] == "AdamW-DDP")
            free = ours["no limit"] if "no limit" in ours else float("nan")
            times = f"{ddp / ours[link]:.1f} | {ours[link] / free:.2f}"
            lines.append(f"| {compute}, {workers} | {link} | {times} |")
    return "\n".join(lines)


def _checked(rows: list[Row], race: Race, out: Path) -> str:
    """Return the seconds and losses of complete runs beside those of curves x steps."""
    lines = ["| run | steps | loss, real ranks (simulated) | seconds | composed | |", "|---|---|---|---|---|---|"]
    curves = known(out / "curves.jsonl")
    for found in json.loads((out / "finished.json").read_text(encoding="utf-8")):
        name, machines, link = found["method"], found["workers"], found["link"]
        last = found["curve"][-1]
        source = next(entry.curve or entry.name for entry in race.methods if entry.name == name)
        same = next(r["curve"] for r in curves if (r["name"], r["workers"]) == (source, machines))
        expected = [point["val_loss"] for point in same if point["step"] == last["step"]]
        timed = [r for r in rows if (r["method"], r["workers"], r["link"]) == (name, machines, link)]
        step = [row["a_step"]["step"] for row in timed if row["compute_by"] == "cores"]
        simulated = f" ({expected[0]:.3f})" if expected else ""
        composed_ = (
            f"{last['step'] * step[0]:.1f} | {last['seconds'] / (last['step'] * step[0]):.2f}" if step else "- | -"
        )
        what = f"{name}, {machines} machines, {link}"
        lines.append(
            f"| {what} | {last['step']} | {last['val_loss']:.3f}{simulated} | {last['seconds']:.1f} | {composed_} |"
        )
    return "\n".join(lines)


def _foreseen(race: Race, out: Path) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        foreseen.show([out / f"exchange-{machines}.json" for machines in race.workers])
    return printed.getvalue().strip()


def _links(out: Path) -> str:
    lines = ["| link | Mbit/s, each way | round trip, ms |", "|---|---|---|"]
    for result in json.loads((out / "rates.json").read_text(encoding="utf-8"))["results"]:
        ways = " ".join(f"{answer['megabits']:.1f}" for answer in result["answers"])
        lines.append(f"| {result['link']} | {ways} | {result['answers'][0]['rtt_ms']:.2f} |")
    return "\n".join(lines)


BEGIN, END = "<!-- figures of benchmarks/lab/measure.py -->", "<!-- end of figures -->"


def put(text: str, page: Path) -> None:
    """Put the figures into a page, between its marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
