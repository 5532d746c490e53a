"""A run's result as data, for the JSON file and the tables."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

from demopt.bench import machine
from demopt.bench.config import BenchConfig
from demopt.bench.methods import FUSED, against_name
from demopt.bench.shapes import model_of
from demopt.bench.summary import summarise, with_floors
from demopt.bench.training import DDP
from demopt.train.config import InputError
from demopt.train.versions import versions

BASES = {"step": FUSED, "train": DDP}  # what the first ratio of each study compares with


def as_data(config: BenchConfig, found: list[dict[str, Any]], command: str, bits: float | None) -> dict[str, Any]:
    """Return all results of a run, samples included, and what is needed to repeat it."""
    settings = dataclasses.asdict(config) | {"against": against_name(config)}
    settings["data"] = [Path(text).name for text in settings["data"]]
    data: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "device": machine.describe() | {"type": found[0]["device"]},
        "versions": versions(),
        "settings": settings | {"shapes": Path(config.shapes).name},
    }
    if "step" in config.studies:
        model = model_of(config.shapes)
        data["model"] = {"name": model.name, "parameters": model.parameters, "tensors": len(model.shapes)}
    return data | {"runs": [_run(config, one, bits) for one in found]}


def _run(config: BenchConfig, found: dict[str, Any], bits: float | None) -> dict[str, Any]:
    """Return the results at one number of workers, with medians, ratios and floors."""
    run = dict(found)
    for study in config.studies:
        measured = found[study]
        bases = [BASES[study], *([against_name(config)] if config.against else [])]
        memory = measured.get("memory_bytes_per_second")
        rows = [with_floors(row, memory, bits) for row in summarise(measured["methods"], bases)]
        for row in rows if study == "train" else []:
            row["tokens_per_second"] = measured["tokens_per_step"] / row["median"]
        run[study] = {**measured, "methods": rows}
    return run


def save(data: dict[str, Any], path: Path) -> None:
    """Write the result as JSON; create its folder if there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror}") from None


def default_path() -> Path:
    """Return the path of a new file under runs/bench."""
    return Path("runs/bench") / f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}.json"
