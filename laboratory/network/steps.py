"""One rank of the race: seconds of a step by method, on one link after the other.

    python -m laboratory.network.steps SCALE    # a line of JSON per link on standard input, and an answer to each

SCALE is JSON. On each link all methods take turns, on connections made for it. A turn begins with a barrier and is a
few rounds long. In the first turn, and in each turn of a delayed method, one uncounted round comes first.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import demopt
from demopt.exchange import Collective
from laboratory.compare.methods.averaged import maker_of
from laboratory.compare.methods.muloco import MuLoCoRank
from laboratory.compare.run import Scale
from laboratory.compare.studies import STUDIES, Entry
from laboratory.simulation.workers import Rates
from laboratory.training import Corpus, backward, batch, build, load_corpus

#: A byte-level decoder of 0.93M parameters.
SCALE = Scale(steps=1000, width=192, eval_sequences=128)
ENTRIES = {entry.name: entry for entry in STUDIES["race"].entries}
RECEIVED = Path("/sys/class/net/eth0/statistics/rx_bytes")
CPU, LIMIT, SEED, RATE = torch.device("cpu"), timedelta(seconds=120), 0, 1e-3
Seconds = tuple[float, float, float]  # of a step: total, compute, optimizer


@dataclass
class RankMethod:
    """A method on this rank. `every`: steps per round; `delayed`: a round travels during the next steps."""

    forward: nn.Module
    optimizers: list[Any]
    every: int = 1
    delayed: bool = False

    def step(self, work: Callable[[nn.Module], object], clip: float) -> Seconds:
        """Takes a step; with DistributedDataParallel, compute contains the exchange."""
        began = time.perf_counter()
        self.forward.zero_grad()
        work(self.forward)
        computed = time.perf_counter()
        nn.utils.clip_grad_norm_(self.forward.parameters(), clip)
        clipped, exchanged = time.perf_counter(), 0.0
        for optimizer in self.optimizers:
            optimizer.step()
            if hasattr(optimizer, "stats") and not self.delayed:
                exchanged += optimizer.stats.seconds.get("exchange", 0.0)
        ended = time.perf_counter()
        return round(ended - began, 6), round(computed - began, 6), round(ended - clipped - exchanged, 6)


def make(entry: Entry, model: nn.Module, group: Any) -> RankMethod:
    """Sets a method up on this rank."""
    settings = dict(entry.settings)
    if entry.method == "demo":
        settings.pop("route")  # in studies from when DeMo had several
        optimizer = demopt.DeMo(demopt.muon_groups(model, lr=RATE), process_group=group, **settings)
        return RankMethod(model, [optimizer])
    if entry.method == "muloco":
        rank = MuLoCoRank(model, Collective(group), **settings)
        Rates(rank.inner).set(RATE)
        return RankMethod(model, [rank], rank.every)
    name = settings.pop("inner", entry.method)
    inner = maker_of(name, settings)(model)
    Rates(inner).set(RATE)
    if entry.method == "local":
        around = demopt.LocalDeMo(inner, process_group=group, **settings)
        return RankMethod(model, [around], settings["sync_every"], bool(settings.get("delay")))
    return RankMethod(DistributedDataParallel(model, process_group=group), inner)


def measure(scale: Scale, corpus: Corpus, stage: dict[str, Any]) -> dict[str, Any]:
    """Returns, for each method of the stage, its counted rounds on this link, each a list of steps (`Seconds`)."""
    config = scale.config(RATE, SEED)
    group = dist.new_group(timeout=LIMIT)  # new connections for each link
    methods = {name: make(ENTRIES[name], build(config), group) for name in stage["methods"]}
    found: dict[str, list[list[Seconds]]] = {name: [] for name in methods}
    moved = dict.fromkeys(methods, 0)
    number = 0

    def work(forward: nn.Module) -> float:
        return backward(forward, batch(corpus.train, config, number, dist.get_rank()), CPU)

    def take_round(method: RankMethod) -> list[Seconds]:
        return [method.step(work, scale.clip) for _ in range(method.every)]

    for turn in range(stage["turns"]):
        for name, method in methods.items():
            dist.barrier(group)
            if turn == 0 or method.delayed:
                take_round(method)
            before = _received()
            found[name] += [take_round(method) for _ in range(stage["rounds"])]
            number += 1
            moved[name] += _received() - before
    for method in methods.values():
        for optimizer in method.optimizers:
            if isinstance(optimizer, demopt.LocalDeMo):
                optimizer.flush()  # a round in flight ends here, before its group is gone
    return {"rounds": found, "received_bytes": moved}


def _received() -> int:
    """Returns the bytes that this machine has received, as its interface counts them."""
    return int(RECEIVED.read_text())


def main() -> None:
    torch.set_num_threads(1)
    scale = Scale(**json.loads(sys.argv[1]))
    corpus = load_corpus(scale.config(RATE, SEED))
    dist.init_process_group("gloo", timeout=LIMIT)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries is no answer
    for line in sys.stdin:
        answers.write(json.dumps(measure(scale, corpus, json.loads(line))) + "\n")
        answers.flush()
    os._exit(0)  # destructors of process groups wait for peers


if __name__ == "__main__":
    main()
