"""Validation loss of a small byte-level decoder under different DeMo settings: ranks, text and seeds are real, the
network is not (all ranks live in this process and hand each other their messages).

    python benchmarks/loss_by_setting.py values --seeds 0 1 2 --out benchmarks/results/values.jsonl

One JSON object a finished run is appended to --out; runs that are there already are not repeated.
"""

import argparse
import copy
import datetime
import json
import math
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import demopt
from demopt.exchange import thread_exchanges
from demopt.train import data, model
from demopt.train.config import TrainConfig

BASE: dict[str, Any] = {"lr": 3e-3, "momentum": 0.99, "top_k": 32}
STUDIES: dict[str, list[dict[str, Any]]] = {
    "values": [
        {"values": "float32"},
        {"values": "sign"},
        {"values": "2-bit"},
        {"values": "sign", "exact": False},
        {"values": "int8"},
    ],
    "budget": [
        {"values": "float32", "top_k": 8},
        {"values": "sign", "top_k": 32},
        {"values": "sign", "top_k": 64},
    ],
    "routes": [
        {"values": "sign", "route": "gather"},
        {"values": "sign", "route": "relay", "relay_top_k": 64},
        {"values": "sign", "route": "relay", "relay_top_k": 128},
        {"values": "float32", "route": "shared"},
    ],
    "delay": [{"delay": 0}, {"delay": 1}, {"delay": 1, "lr": 1.5e-3}, {"delay": 0, "lr": 1.5e-3}],
}


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    shape = TrainConfig(preset="tiny", layers=2, width=128, heads=4, mlp=344, sequence=128, batch=4, vocab_size=256)
    config = model.resolve(shape)
    corpus = data.load_corpus(config)
    done = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    for seed in arguments.seeds:
        for settings in STUDIES[arguments.study]:
            what = {"study": arguments.study, "settings": {**BASE, **settings}, "seed": seed, "steps": arguments.steps}
            what["world"] = arguments.world
            if any(what.items() <= {**row}.items() for row in done):
                continue
            began = time.perf_counter()
            figures = run(replace(config, seed=seed), corpus, what)
            row = {**what, **figures, "seconds": round(time.perf_counter() - began, 1), **provenance()}
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps({**settings, "seed": seed, **figures}), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def run(config: TrainConfig, corpus: data.Corpus, what: dict[str, Any]) -> dict[str, Any]:
    """Trains `world` replicas in turn and returns what was reached."""
    torch.manual_seed(config.seed)
    world, steps = what["world"], what["steps"]
    first = model.build(config)
    replicas = [first, *(copy.deepcopy(first) for _ in range(world - 1))]
    exchanges = thread_exchanges(world)
    optimizers = [
        demopt.DeMo(replica.parameters(), process_group=exchange, **what["settings"])
        for replica, exchange in zip(replicas, exchanges, strict=True)
    ]
    for step in range(steps):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = what["settings"]["lr"] * schedule(step, steps)
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            tokens = torch.from_numpy(data.batch(corpus.train, config, step, rank))
            replica(input_ids=tokens, labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        on_all(optimizers, lambda optimizer: optimizer.step())
    on_all(optimizers, lambda optimizer: optimizer.flush())
    marks = {optimizer.fingerprint() for optimizer in optimizers}
    if len(marks) != 1:
        raise SystemExit("replicas have drifted")
    return {"val_loss": round(evaluate(first, corpus, config), 4), "payload_bytes": optimizers[0].stats.payload_bytes}


def on_all(optimizers: list[demopt.DeMo], call: Callable[[demopt.DeMo], None]) -> None:
    """One call on all ranks, in threads: a route's rounds need all ranks at the same time."""
    with ThreadPoolExecutor(len(optimizers)) as pool:
        list(pool.map(call, optimizers))


def schedule(step: int, steps: int, warmup: int = 40) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


@torch.no_grad()
def evaluate(replica: torch.nn.Module, corpus: data.Corpus, config: TrainConfig) -> float:
    """Mean loss over 256 validation sequences, nats a byte."""
    replica.eval()
    windows = torch.from_numpy(data.validation_windows(corpus.val, replace(config, eval_sequences=256), 0, 1))
    return sum(float(replica(input_ids=w, labels=w).loss) * len(w) for w in windows.split(32)) / len(windows)


def provenance() -> dict[str, str]:
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "demopt": demopt.__version__,
    }


if __name__ == "__main__":
    main()
