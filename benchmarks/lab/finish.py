"""A complete run of one method on real ranks, until the validation loss is reached: one rank of a scenario.

    python finish.py METHOD RATE LOSS [--quick]

Evaluations are not counted. The last line that rank 0 prints is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from race import quick, read
from racers import make
from steps import received
from torch import nn

from demopt.simulate.loop import EVAL_BATCH, Single
from demopt.train.data import batch, load_corpus, validation_windows
from demopt.train.evaluate import validation_loss
from demopt.train.loop import backward, learning_rate
from demopt.train.model import build


def main() -> None:
    name, rate, wanted, *more = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:]
    torch.set_num_threads(1)
    race = quick(read()) if more == ["--quick"] else read()
    (entry,) = (entry for entry in race.methods if entry.name == name)
    config = race.config(rate)
    corpus = load_corpus(config)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, here = dist.get_rank(), torch.device("cpu")
    racer = make(entry, build(config), config.clip, dist.new_group(timeout=timedelta(seconds=120)))
    windows = validation_windows(corpus.val, config, 0, 1)
    curve, seconds, step = [], 0.0, 0

    def work(forward: nn.Module) -> None:
        backward(forward, batch(corpus.train, config, step, rank, 0), config, here)

    before = received()
    dist.barrier()
    began = time.perf_counter()
    for step in range(1, config.steps + 1):
        racer.step(learning_rate(config, step), work)
        if step % config.eval_every == 0:
            with racer.settle():  # with delay, this waits for the round in flight
                seconds += time.perf_counter() - began
                loss = validation_loss(racer.model, windows, replace(config, batch=EVAL_BATCH), Single(0, 1, here))
            curve.append({"step": step, "val_loss": round(loss, 4), "seconds": round(seconds, 3)})
            print(json.dumps(curve[-1]), flush=True)
            dist.barrier()
            began = time.perf_counter()
            if loss <= wanted:
                break
    if rank == 0:
        facts = {"method": name, "workers": dist.get_world_size(), "received_bytes": received() - before}
        print(json.dumps({**facts, "curve": curve}), flush=True)
    dist.barrier()
    os._exit(0)  # destructors of process groups wait for peers


if __name__ == "__main__":
    main()
