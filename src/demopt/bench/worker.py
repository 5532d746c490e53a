"""One worker of a benchmark: `python -m demopt.bench.worker FOLDER RESULT LAUNCHER`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

from demopt.bench.config import BenchConfig, read
from demopt.train.assemble import read_file
from demopt.train.config import TrainConfig
from demopt.train.processes import be_worker
from demopt.train.team import Team, join

CONFIG, TRAIN, TOKENS = "bench.json", "train.json", "tokens"  # the files that the launcher leaves in the folder


def work(folder: Path, result: Path) -> None:
    """Measure as one of the workers; the first writes the result."""
    config = read(folder / CONFIG)
    team = join(TrainConfig(device=config.device, threads=config.threads, timeout=config.timeout))
    found: dict[str, Any] = {"workers": team.world_size, "threads": torch.get_num_threads(), "device": team.device.type}
    if "step" in config.studies:
        from demopt.bench.step import measure_step

        found["step"] = measure_step(config, team)
    if "train" in config.studies:
        found["train"] = _train(config, folder, team)
    if team.first:
        result.write_text(json.dumps(found), encoding="utf-8")
    team.barrier()


def _train(config: BenchConfig, folder: Path, team: Team) -> dict[str, Any]:
    from demopt.bench.training import measure_training
    from demopt.train.data import load_corpus

    train = TrainConfig(**read_file(folder / TRAIN))
    return measure_training(config, train, load_corpus(train, folder / TOKENS), team)


def main() -> NoReturn:
    """Run as a worker that `demopt bench` has started."""
    folder, result, launcher = sys.argv[1:]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler logs each start and end of a measurement
    be_worker(int(launcher), lambda: work(Path(folder), Path(result)))


if __name__ == "__main__":
    main()
