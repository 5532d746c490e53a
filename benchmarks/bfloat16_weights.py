"""What bfloat16 weights cost in loss, by how they are rounded: to the nearest, stochastically, or with a remainder.

    python benchmarks/bfloat16_weights.py --steps 600 --seeds 0 1 2 --results benchmarks/results/bfloat16-weights.json

Four simulated workers train the tiny preset on Python's own source text, with weight decay. The model computes in
float32 in all cases, and its gradients have the dtype of the weights, so that what differs is the weights alone:

    float32      float32 weights
    nearest      bfloat16 weights, each update rounded to the nearest
    stochastic   bfloat16 weights, as demopt rounds them (decision 26)
    remainder    bfloat16 weights, and beside each the 16 bits that they lack: float32 weights of which the model sees
                 16 bits, which is what a kept remainder comes to

Prints the validation loss of each, and its difference from float32's on the same seed.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from demopt.core import chunk
from demopt.simulate.command import make_method
from demopt.simulate.loop import Course, evaluate, take_step
from demopt.simulate.method import Fleet
from demopt.train.config import TrainConfig
from demopt.train.data import Corpus, load_corpus, validation_windows, with_vocabulary
from demopt.train.model import build, resolve

WAYS = ("float32", "nearest", "stochastic", "remainder")
STOCHASTIC = chunk.to_bfloat16
CASES: dict[str, dict[str, Any]] = {
    "DeMo, signum": {"optimizer": "demo", "update": "signum", "weight_decay": 0.1},
    "DeMo, muon": {"optimizer": "demo", "update": "muon", "weight_decay": 0.1},
    "LocalDeMo around Muon": {"optimizer": "local", "weight_decay": 0.1},
}


class InFloat32(nn.Module):
    """The model, which computes in float32 from what bfloat16 holds of its weights."""

    def __init__(self, model: nn.Module, way: str) -> None:
        super().__init__()
        self.model, self.way = model, way

    def forward(self, **inputs: Any) -> Any:
        weights = {name: self._seen(weight) for name, weight in self.model.named_parameters()}
        return torch.func.functional_call(self.model, weights, kwargs=inputs)

    def _seen(self, weight: Tensor) -> Tensor:
        if self.way == "remainder":
            return weight + (weight.bfloat16().float() - weight).detach()
        return weight.float()


def nearest(values: Tensor, seed: tuple[int, int], first: int = 0) -> None:
    """Rounds to the nearest."""
    del seed, first
    values.copy_(values.bfloat16())


def trained(config: TrainConfig, corpus: Corpus, way: str) -> float:
    """Returns the validation loss at the end, in nats a byte."""
    chunk.to_bfloat16 = nearest if way == "nearest" else STOCHASTIC
    model = build(config)
    for weight in model.parameters():
        if way in ("nearest", "stochastic"):
            weight.data = weight.data.bfloat16()
        elif way == "remainder":
            weight.register_hook(lambda gradient: gradient.bfloat16().float())
    fleet = Fleet(model, config.workers, config.clip)
    method = make_method(config, fleet)
    course = Course(config, corpus, InFloat32(model, way), method, torch.device("cpu"))
    try:
        for step in range(1, config.steps + 1):
            take_step(course, step)
        return evaluate(course, validation_windows(corpus.val, config, 0, 1))
    finally:
        method.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--results", type=Path, help="a JSON file for the losses")
    given = parser.parse_args()
    rows = []
    for case in given.cases:
        for seed in given.seeds:
            config = TrainConfig(preset="tiny", workers=4, steps=given.steps, seed=seed, **CASES[case])
            config = resolve(config)
            corpus = load_corpus(config)
            config = replace(with_vocabulary(config, corpus), eval_sequences=256)
            for way in given.ways:
                began = time.perf_counter()
                loss = trained(config, corpus, way)
                seconds = round(time.perf_counter() - began, 1)
                rows.append({"case": case, "weights": way, "seed": seed, "loss": loss, "seconds": seconds})
                print(f"{case}, {way}, seed {seed}: {loss:.4f} ({seconds:.0f} s)", flush=True)
        show(case, rows)
    if given.results is not None:
        record = {"steps": given.steps, "torch": torch.__version__, "rows": rows}
        given.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def show(case: str, rows: list[dict[str, Any]]) -> None:
    """Prints a case's means, and the mean of the differences from float32."""
    losses = {(row["weights"], row["seed"]): row["loss"] for row in rows if row["case"] == case}
    for way in WAYS:
        mine = {seed: loss for (name, seed), loss in losses.items() if name == way}
        if mine:
            more = [loss - losses["float32", seed] for seed, loss in mine.items() if ("float32", seed) in losses]
            apart = f", {statistics.mean(more):+.4f} ({min(more):+.4f} to {max(more):+.4f})" if more else ""
            print(f"    {case}, {way}: {statistics.mean(mine.values()):.4f}{apart}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
