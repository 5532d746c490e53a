"""One rank of overlap_timeline.py: times, then traces, every method in turn. `python overlap_rank.py OUT RATE|-`"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from demopt import DeMo
from demopt.exchange import Collective, Delay
from demopt.train import model
from demopt.train.config import TrainConfig

SHAPE = TrainConfig(preset="medium", vocab_size=256, sequence=128, batch=8)
DEMO: dict[str, Any] = {"lr": 1e-3, "momentum": 0.99, "values": "float32", "top_k": 512, "route": "gather"}
METHODS: dict[str, dict[str, Any] | None] = {  # None is DDP, left out without a real link: nothing else slows it
    "DeMo": {},
    "DeMo, overlap=8": {"overlap": 8},
    "DeMo, delay=1": {"delay": 1},
    "AdamW, DDP": None,
}
ROUNDS, TIMED, TRACED = 3, 2, 5  # plus one round to warm up


class Training:
    """A model, its optimizer, and steps on random tokens."""

    def __init__(self, settings: dict[str, Any] | None, rate: float | None) -> None:
        self.network: torch.nn.Module = model.build(model.resolve(SHAPE))
        self.random = torch.Generator().manual_seed(dist.get_rank())
        self.parameters = sum(p.numel() for p in self.network.parameters())
        if settings is None:
            self.optimizer: Any = torch.optim.AdamW(self.network.parameters(), lr=1e-3, fused=True)
            self.network = DistributedDataParallel(self.network)
        else:
            group = None if rate is None else Delay(Collective(), bytes_per_second=rate * 1e6 / 8)
            self.optimizer = DeMo(self.network.parameters(), process_group=group, **DEMO, **settings)

    def step(self) -> None:
        """Forward, backward and step, each marked in the trace."""
        size = SHAPE.batch, (SHAPE.sequence or 0) + 1
        tokens = torch.randint(SHAPE.vocab_size or 1, size, generator=self.random)
        self.optimizer.zero_grad()
        with record_function("forward"):
            logits = self.network(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        with record_function("backward"):
            loss.backward()
        with record_function("step"):
            self.optimizer.step()

    def end(self) -> None:
        """Applies what is in flight."""
        if isinstance(self.optimizer, DeMo):
            self.optimizer.flush()


def measure(training: Training) -> list[float]:
    """Returns the seconds of some steps after one that is not counted; leaves nothing in flight."""
    timed(training.step, 1)
    seconds = timed(training.step, TIMED)
    training.end()
    return seconds


def traced(training: Training, trace: Path) -> dict[str, Any]:
    """Traces some steps; returns the bytes received a step, the parameters and the name of the trace."""
    timed(training.step, 1)
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the exchange has its own thread
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everything, acc_events=True) as profiler:
        timed(training.step, TRACED)
        stats = getattr(training.optimizer, "stats", None)
        training.end()
    profiler.export_chrome_trace(str(trace))
    received = stats.received_bytes if stats else 4 * training.parameters  # a ring: 2 (W - 1) / W of them, W = 2
    return {"received_bytes": received, "parameters": training.parameters, "trace": trace.name}


def timed(call: Callable[[], None], count: int) -> list[float]:
    """Returns the seconds of each call; ranks begin together."""
    dist.barrier()
    marks = [time.perf_counter()]
    for _ in range(count):
        call()
        marks.append(time.perf_counter())
    return [later - earlier for earlier, later in itertools.pairwise(marks)]


def link_rate(size: int = 5_000_000) -> float:
    """Returns the megabits a second that an all-gather gets out of the link, one way."""
    message = torch.zeros(size, dtype=torch.uint8)
    (seconds,) = timed(lambda: dist.all_gather([torch.empty_like(message) for _ in range(2)], message), 1)
    return size * 8 / 1e6 / seconds


def main() -> None:
    out, rate = Path(sys.argv[1]), None if sys.argv[2] == "-" else float(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"link_megabits": link_rate(), "methods": {}}
    chosen = {name: settings for name, settings in METHODS.items() if settings is not None or rate is None}
    trainings = {name: Training(settings, rate) for name, settings in chosen.items()}
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(1 + ROUNDS):
        for name, training in trainings.items():  # in turn, because other work on the machine comes and goes
            seconds[name] += measure(training)
    for number, (name, training) in enumerate(trainings.items()):
        trace = out / f"{number}-rank{dist.get_rank()}.json.gz"
        found["methods"][name] = {"step_seconds": seconds[name][TIMED:], **traced(training, trace)}
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # at exit, process groups wait for threads that may wait for the interpreter


if __name__ == "__main__":
    main()
