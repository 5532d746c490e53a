"""One rank of the race: seconds of a step by method, on one link after the other; or a whole run to a loss.

    python -m laboratory.network.steps SCALE                  # stages: a line of JSON per link on standard input
    python -m laboratory.network.steps SCALE METHOD LOSS      # the last line of rank 0 is JSON

SCALE is JSON. On each link all methods take turns, on connections made for it. A turn begins with a barrier and is a
few rounds long. In the first turn, and in each turn of a delayed method, there is one round more before, which does not
count.
"""

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
from torch import nn

from laboratory.compare.run import Scale
from laboratory.compare.studies import Entry
from laboratory.network.ranks import ENTRIES, LocalDeMo, Outer, RankMethod, StandIn, Work, make
from laboratory.training import (
    Corpus,
    backward,
    batch,
    build,
    learning_rate,
    load_corpus,
    validation_loss,
    validation_windows,
)

RECEIVED = Path("/sys/class/net/eth0/statistics/rx_bytes")
SHORT = 4  # steps of a counted round of DiLoCo and MuLoCo, whose steps without a round are all alike
CPU, LIMIT, SEED = torch.device("cpu"), timedelta(seconds=120), 0


def main() -> None:
    torch.set_num_threads(1)
    scale = Scale(**json.loads(sys.argv[1]))
    corpus = load_corpus(scale.config(1e-3, SEED, scale.batch))
    dist.init_process_group("gloo", timeout=LIMIT)
    if len(sys.argv) > 2:
        finish(scale, corpus, ENTRIES[sys.argv[2]], float(sys.argv[3]))
        os._exit(0)  # destructors of process groups wait for peers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries is no answer
    for line in sys.stdin:
        stage = json.loads(line)
        stand_in = StandIn() if stage["stand_in"] else None
        answers.write(json.dumps(measure(scale, corpus, stage, stand_in)) + "\n")
        answers.flush()
    sys.stdout.flush()
    os._exit(0)


def measure(scale: Scale, corpus: Corpus, stage: dict[str, Any], stand_in: StandIn | None) -> dict[str, Any]:
    """Returns, for each method of the stage, its counted rounds on this link, each a list of steps (`Spent`)."""
    config = scale.config(1e-3, SEED, scale.batch)
    group = dist.new_group(timeout=LIMIT)  # new connections for each link
    methods = {
        name: make(entry, build(config), scale.clip, group, stand_in)
        for name, entry in _timed(stage["methods"]).items()
    }
    found: dict[str, list[Any]] = {name: [] for name in methods}
    moved = dict.fromkeys(methods, 0)
    number = 0

    def work(forward: nn.Module) -> float:
        return backward(forward, batch(corpus.train, config, number, dist.get_rank()), CPU)

    for turn in range(stage["turns"]):
        for name, method in methods.items():
            dist.barrier(group)
            if turn == 0 or (isinstance(method, LocalDeMo) and method.delayed):
                _round(method, work)
            before = _received()
            found[name] += [_round(method, work) for _ in range(1 if isinstance(method, Outer) else stage["rounds"])]
            number += 1
            moved[name] += _received() - before
    for method in methods.values():
        with method.settled():  # a round in flight ends here, before its group is gone
            pass
    return {"rounds": found, "received_bytes": moved}


def finish(scale: Scale, corpus: Corpus, entry: Entry, loss: float) -> None:
    """Trains until the validation loss is reached; evaluations do not count."""
    config = scale.config(entry.lr, SEED, scale.batch)
    method = make(entry, build(config), scale.clip, dist.new_group(timeout=LIMIT))
    windows = validation_windows(corpus.val, config, 0, 1)
    curve: list[dict[str, float]] = []
    seconds, step = 0.0, 0

    def work(forward: nn.Module) -> float:
        return backward(forward, batch(corpus.train, config, step, dist.get_rank()), CPU)

    before = _received()
    dist.barrier()
    began = time.perf_counter()
    for step in range(1, config.steps + 1):
        method.step(learning_rate(config, step), work)
        if step % scale.eval_every == 0:
            with method.settled():  # with delay, this waits for the round in flight
                seconds += time.perf_counter() - began
                found = validation_loss(method.model, windows, CPU)
            curve.append({"step": step, "val_loss": round(found, 4), "seconds": round(seconds, 3)})
            dist.barrier()
            began = time.perf_counter()
            if found <= loss:
                break
    if dist.get_rank() == 0:
        facts = {"method": entry.name, "workers": dist.get_world_size(), "received_bytes": _received() - before}
        print(json.dumps({**facts, "curve": curve}), flush=True)
    dist.barrier()


def timing_of(entry: Entry) -> str:
    """Returns the name under which an entry is timed: DiLoCo and MuLoCo without their H.

    Examples:
        >>> timing_of(Entry("DiLoCo, H = 30", "diloco", {"every": 30}, 0.1))
        'DiLoCo'
    """
    return entry.name.partition(",")[0] if "every" in entry.settings else entry.name


def _timed(methods: list[str]) -> dict[str, Entry]:
    """Returns the methods to time: of some, one of those that differ in H alone, with a short round."""
    found: dict[str, Entry] = {}
    for entry in (ENTRIES[name] for name in methods):
        short = {"every": SHORT} if "every" in entry.settings else {}
        found.setdefault(timing_of(entry), dataclasses.replace(entry, settings={**entry.settings, **short}))
    return found


def _round(method: RankMethod, work: Work) -> list[list[float]]:
    spent = [method.step(1e-3, work) for _ in range(method.every)]
    return [[round(value, 6) for value in dataclasses.astuple(each)] for each in spent]


def _received() -> int:
    """Returns the bytes that this machine has received, as its interface counts them."""
    return int(RECEIVED.read_text())


if __name__ == "__main__":
    main()
