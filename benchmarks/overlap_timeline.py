"""Shows when the exchange is in flight and what the rank computes meanwhile: plain DeMo, with overlap, with delay, and
AdamW with DistributedDataParallel. Runs two processes on a link limited to --megabits each way, made of network
namespaces, which need Linux and root. Without them DeMo runs alone, and its exchange waits as long as the link would.

    python benchmarks/overlap_timeline.py --out benchmarks/results/overlap.json --picture docs/overlap.png

Steps are timed without the profiler; then some more are traced (--traces keeps the traces: chrome://tracing or
ui.perfetto.dev show them). The picture shows the lanes of rank 0; exchange and waiting times are means over both ranks.
"""

import argparse
import datetime
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import overlap_lanes
import overlap_picture
from limited_link import End, limited_link
from overlap_rank import DEMO, SHAPE

from demopt.bench.machine import describe, versions

PORT = "29517"  # free in a new namespace


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the namespaces are removed
    if not arguments.redraw:
        load = os.getloadavg()[0]  # other processes' alone
        with tempfile.TemporaryDirectory() as scratch, limited_link(arguments.megabits) as ends:
            folder = arguments.traces or Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            run(folder, ends, arguments.megabits)
            results = {**describe_run(arguments, ends is not None, load), **collect(folder)}
        arguments.out.write_text(json.dumps(results) + "\n", encoding="utf-8")
    results = json.loads(arguments.out.read_text(encoding="utf-8"))
    print(table(results))
    overlap_picture.draw(results, arguments.picture)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path, required=True)
    parser.add_argument("--traces", type=Path, help="folder that keeps the traces, a .json.gz a method and rank")
    parser.add_argument("--megabits", type=float, default=100.0)
    parser.add_argument("--redraw", action="store_true", help="from --out, without measuring")
    return parser.parse_args()


def run(folder: Path, ends: list[End] | None, megabits: float) -> None:
    """Starts both ranks and waits for their end."""
    if ends is None:
        print("no network namespaces here (they take Linux, root, ip and tc): waiting takes the place of the link")
    here = End([], {"MASTER_ADDR": "127.0.0.1"})
    script = str(Path(__file__).with_name("overlap_rank.py"))
    ranks = []
    for rank, end in enumerate(ends or [here, here]):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": PORT, "KINETO_LOG_LEVEL": "99"}
        command = [*end.prefix, sys.executable, script, str(folder), "-" if ends else str(megabits)]
        ranks.append(subprocess.Popen(command, env={**os.environ, **place, **end.environment}))
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(codes):
        raise SystemExit("a rank has failed")


def describe_run(arguments: argparse.Namespace, real: bool, load: float) -> dict[str, Any]:
    """Describes the machine, the link and the command, without --traces: its folder is this machine's."""
    megabits = arguments.megabits
    flags = ["--out", str(arguments.out), "--picture", str(arguments.picture), "--megabits", f"{megabits:g}"]
    limits = "two network namespaces, tbf each way" if real else "none: demopt.exchange.Delay waits in its place"
    return {
        "date": datetime.date.today().isoformat(),
        "device": describe(),
        "versions": versions(),
        "command": shlex.join(["python", "benchmarks/overlap_timeline.py", *flags]),
        "link": {"megabits": megabits, "how": limits},
        "load_average": load,
        "model": {"preset": SHAPE.preset, "sequence": SHAPE.sequence, "batch": SHAPE.batch},
        "demo": DEMO,
    }


def collect(folder: Path) -> dict[str, Any]:
    """Combines what both ranks measured; the lanes are rank 0's."""
    ranks = [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    methods = {}
    for name, first in ranks[0]["methods"].items():
        both = [overlap_lanes.read(folder / rank["methods"][name]["trace"]) for rank in ranks]
        figures = [overlap_lanes.figures(lanes) for lanes in both]
        mean = {key: round(statistics.mean(each[key] for each in figures), 4) for key in figures[0]}
        lanes = {lane: [(round(a, 3), round(b, 3)) for a, b in found] for lane, found in both[0].items()}
        timed = [round(seconds, 3) for seconds in first["step_seconds"]]
        methods[name] = {"step_seconds": statistics.median(timed), "steps": timed, **mean, "lanes": lanes}
        methods[name] |= {key: first[key] for key in ("received_bytes", "parameters")}
    return {"measured_megabits": round(ranks[0]["link_megabits"], 1), "methods": methods}


def table(results: dict[str, Any]) -> str:
    """Formats the results as a Markdown table."""
    lines = [
        "| | step (spread), s | received a step | exchange, s | main thread waits, s | hidden |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in results["methods"].items():
        step = f"{found['step_seconds']:.2f} ({min(found['steps']):.2f} to {max(found['steps']):.2f})"
        exchange = f"{found['exchange_seconds']:.2f} | {found['wait_seconds']:.2f} | {found['hidden']:.0%}"
        lines.append(f"| {name} | {step} | {found['received_bytes'] / 1e6:.1f} MB | {exchange} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
