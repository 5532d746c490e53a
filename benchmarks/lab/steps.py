"""Seconds of a training step by method, on one link after the other: one rank of a scenario with stages.

All methods take turns on each link, on connections of their own. Each of a method's turns begins with a barrier and is
a few rounds long; in the first turn, and in each turn of a delayed method, a round goes before that is not counted.
With the setting `stand`, sleeping takes the place of forward, backward and optimizer, so that only codec and exchange
are real: what a rank with a GPU would see of this link, if its compute took as long.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from race import Entry, Race, read
from racers import LocalDeMo, Outer, Racer, Stand, Work, make
from torch import nn

from demopt.train.config import TrainConfig
from demopt.train.data import Corpus, batch, load_corpus
from demopt.train.loop import backward
from demopt.train.model import build

INTERFACE = Path("/sys/class/net/eth0/statistics")
SHORT = 4  # steps of a counted round of DiLoCo and MuLoCo: its plain steps are all alike


def main() -> None:
    torch.set_num_threads(1)
    race = read()
    config = race.config(1e-3)
    corpus = load_corpus(config)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        answers.write(json.dumps(measure(race, config, corpus, json.loads(line))) + "\n")
        answers.flush()
    sys.stdout.flush()
    os._exit(0)  # destructors of process groups wait for peers


def measure(race: Race, config: TrainConfig, corpus: Corpus, stage: dict[str, Any]) -> dict[str, Any]:
    """Return, for each method, its counted rounds on this link, each a list of steps."""
    stand = Stand(**stage["stand"]) if "stand" in stage else None
    # New connections for each link; the first collective makes them.
    group = dist.new_group(timeout=timedelta(seconds=120))
    racers = {entry.name: make(_short(entry), build(config), config.clip, group, stand) for entry in _timed(race)}
    found: dict[str, list[Any]] = {name: [] for name in racers}
    moved = dict.fromkeys(racers, 0)
    number = 0

    def work(forward: nn.Module) -> None:
        backward(forward, batch(corpus.train, config, number, dist.get_rank(), 0), config, torch.device("cpu"))

    for turn in range(stage["turns"]):
        for name, racer in racers.items():
            dist.barrier(group)
            delayed = isinstance(racer, LocalDeMo) and racer.delayed
            rounds = stage["rounds"] if not isinstance(racer, Outer) else 1
            if turn == 0 or delayed:
                _round(racer, work)
            before, began = received(), time.perf_counter()
            taken = [_round(racer, work) for _ in range(rounds)]
            number += 1
            moved[name] += received() - before
            found[name].append({"seconds": time.perf_counter() - began, "rounds": taken})
    for racer in racers.values():
        with racer.settle():  # a round in flight ends here, and not when its group is gone
            pass
    return {"methods": found, "received_bytes": moved}


def _timed(race: Race) -> list[Entry]:
    """Return the methods to time: one of those that differ in H alone, or in the loss."""
    found: dict[str, Entry] = {}
    for entry in race.methods:
        found.setdefault(timing_of(entry), dataclasses.replace(entry, name=timing_of(entry)))
    return list(found.values())


def timing_of(entry: Entry) -> str:
    """Return the name under which an entry is timed: DiLoCo and MuLoCo without their H.

    Example:
        >>> timing_of(Entry("DiLoCo, H = 30", "diloco", (0.1,), {"every": 30}))
        'DiLoCo'
    """
    return entry.name.partition(",")[0] if "every" in entry.settings else entry.name


def _short(entry: Entry) -> Entry:
    if "every" not in entry.settings:
        return entry
    return dataclasses.replace(entry, settings={**entry.settings, "every": SHORT})


def _round(racer: Racer, work: Work) -> list[list[float]]:
    taken = [racer.step(1e-3, work) for _ in range(racer.every)]
    return [[round(value, 6) for value in dataclasses.astuple(spent)] for spent in taken]


def received() -> int:
    """Return the bytes that this machine has received, as its interface counts them."""
    return int((INTERFACE / "rx_bytes").read_text())


if __name__ == "__main__":
    main()
