"""Validation loss by step of each method of a race, once: the loss does not depend on the link.

W workers are simulated on one device, with the bits of real ranks (tests/simulate). A run in the file is not repeated.

    python benchmarks/lab/curves.py --out benchmarks/results/race-curves.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from race import Entry, Race, quick, read

from demopt.compare.catalogue import METHODS
from demopt.simulate.loop import Course, evaluate, take_step
from demopt.simulate.method import Fleet
from demopt.train.data import Corpus, load_corpus, validation_windows
from demopt.train.model import build

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append", metavar="METHOD", help="repeatable; default: all")
    parser.add_argument("--quick", action="store_true", help="try it, at a size that says nothing")
    parser.add_argument("--at-most", type=int, default=10**6, metavar="N", help="end after N runs")
    arguments = parser.parse_args()
    race = quick(read()) if arguments.quick else read()
    if arguments.only:
        race = replace(race, methods=tuple(entry for entry in race.methods if entry.name in arguments.only))
    torch.set_num_threads(1)
    for _ in range(arguments.at_most):
        missing = wanted(race, known(arguments.out))
        if not missing:
            return
        entry, workers, lr = missing[0]
        row = run(race, entry, workers, lr, load_corpus(race.config(lr)))
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{entry.name}, {workers} workers, lr {lr:g}: {row['curve'][-1]['val_loss']}", flush=True)


def known(path: Path) -> list[Row]:
    """Return the runs in the file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def wanted(race: Race, rows: list[Row]) -> list[tuple[Entry, int, float]]:
    """Return the runs that are missing: all rates with the most workers, then the best rate with fewer."""
    most = max(race.workers)
    done = {(row["name"], row["workers"], row["lr"]) for row in rows}
    missing = [(entry, most, lr) for entry in race.methods for lr in entry.rates if (entry.name, most, lr) not in done]
    for entry in race.methods:
        if entry.curve:
            continue
        lr = best(rows, entry, most)
        fewer = (workers for workers in race.workers if workers != most)
        missing = [(entry, workers, lr) for workers in fewer if lr and (entry.name, workers, lr) not in done] + missing
    return missing


def best(rows: list[Row], entry: Entry, most: int) -> float | None:
    """Return the rate with the lowest last loss with the most workers; None before all rates were tried."""
    if len(entry.rates) == 1:
        return entry.rates[0]
    found = {r["lr"]: r["curve"][-1]["val_loss"] for r in rows if (r["name"], r["workers"]) == (entry.name, most)}
    return min(found, key=found.__getitem__) if set(entry.rates) <= set(found) else None


def run(race: Race, entry: Entry, workers: int, lr: float, corpus: Corpus) -> Row:
    """Train once; return the curve, with the bytes that one worker has received up to each of its points."""
    config = race.config(lr)
    model = build(config)
    torch.manual_seed(config.seed)
    method = METHODS[entry.method].make(Fleet(model, workers, config.clip), **entry.settings)
    course = Course(config, corpus, model, method, torch.device("cpu"))
    windows = validation_windows(corpus.val, config, 0, 1)
    curve, received = [{"step": 0, "val_loss": evaluate(course, windows), "received_bytes": 0}], 0
    try:
        for step in range(1, config.steps + 1):
            taken = take_step(course, step)
            received += taken.cost.received_bytes
            if step % config.eval_every == 0 or step == config.steps:
                loss = evaluate(course, windows) if math.isfinite(taken.loss) else math.inf
                curve.append({"step": step, "val_loss": round(loss, 4), "received_bytes": received})
    finally:
        method.close()
    elements = sum(parameter.numel() for parameter in model.parameters())
    facts = {"name": entry.name, "workers": workers, "lr": lr, "settings": entry.settings, "seed": race.seed}
    return {**facts, "model": race.model, "parameters": elements, "data": corpus.fingerprint, "curve": curve}


if __name__ == "__main__":
    main()
