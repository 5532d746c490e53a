"""One run from start to end: a method at one learning rate and seed. Its record is a line of runs.jsonl."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import platform
import shlex
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import demopt
from demopt.compare.catalogue import METHODS
from demopt.compare.scale import Scale
from demopt.compare.studies import Entry
from demopt.simulate.loop import Course, evaluate, take_step
from demopt.simulate.method import Fleet
from demopt.train.data import Corpus, validation_windows
from demopt.train.model import build
from demopt.train.team import pick_device

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """The training text: its fingerprint, and the names that a command passes to --data."""

    fingerprint: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """An entry of a study at one learning rate, seed and scale.

    Examples:
        >>> Run("methods", Entry("adamw", "adamw", {}, 4e-3), 2e-3, 0, Scale(), Source("")).command()
        'demopt compare --study methods --only adamw --seeds 0 --lr 0.002'
    """

    study: str
    entry: Entry
    lr: float
    seed: int
    scale: Scale
    source: Source

    @property
    def workers(self) -> int:
        """W."""
        return self.entry.workers or self.scale.workers

    @property
    def batch(self) -> int:
        """Sequences of one worker in a step."""
        return self.entry.batch or self.scale.batch

    def facts(self) -> Row:
        """Returns everything that determines the outcome."""
        scale = replace(self.scale, workers=self.workers, batch=self.batch)
        method = {"method": self.entry.method, "settings": self.entry.settings, "lr": self.lr, "seed": self.seed}
        return {**method, "scale": asdict(scale), "data": self.source.fingerprint, "demopt": demopt.__version__}

    @property
    def key(self) -> str:
        """A hash of the facts: equal for equal runs, whichever study asks for them."""
        return hashlib.blake2b(json.dumps(self.facts(), sort_keys=True).encode(), digest_size=8).hexdigest()

    def command(self) -> str:
        """Returns the command that repeats the run."""
        words = ["demopt", "compare", "--study", self.study, "--only", self.entry.name, "--seeds", str(self.seed)]
        words += ["--lr", f"{self.lr:g}", *self.scale.flags()]
        for name in self.source.names:
            words += ["--data", name]
        return shlex.join(words)


def carry_out(run: Run, corpus: Corpus, device: str = "auto") -> Row:
    """Trains and evaluates; returns the run's record. A run ends early, with loss None, when its loss is not finite."""
    began = time.perf_counter()
    where = pick_device(device, 0, 1)
    config = replace(run.scale.config(run.seed, run.batch), lr=run.lr, device=device)
    model = build(config).to(where)
    torch.manual_seed(run.seed)
    method = METHODS[run.entry.method].make(Fleet(model, run.workers, config.clip), **run.entry.settings)
    try:
        figures = _train(Course(config, corpus, model, method, where))
    finally:
        method.close()
    told = {"key": run.key, "name": run.entry.name, **run.facts(), "parameters": method.fleet.elements, **figures}
    return {**told, "seconds": round(time.perf_counter() - began, 1), "command": run.command(), **_provenance(where)}


def _train(course: Course) -> Row:
    """Trains; returns the curve (validation loss and total bytes by step), bytes and step time."""
    config = course.config
    windows = validation_windows(course.corpus.val, config, 0, 1)
    sent = received = payload = 0
    seconds: list[float] = []
    curve: list[Row] = [{"step": 0, "val_loss": evaluate(course, windows), "sent_bytes": 0, "received_bytes": 0}]
    for step in range(1, config.steps + 1):
        taken = take_step(course, step)
        sent, received = sent + taken.cost.sent_bytes, received + taken.cost.received_bytes
        payload += taken.cost.payload_bytes
        seconds.append(taken.worker_seconds)
        finite = math.isfinite(taken.loss)
        if step % config.eval_every == 0 or step == config.steps or not finite:
            loss = evaluate(course, windows) if finite else math.nan
            point = {"step": step, "val_loss": loss, "sent_bytes": sent, "received_bytes": received}
            curve.append(point if math.isfinite(loss) else {**point, "val_loss": None})
        if not finite:
            break
    figures = {"payload_bytes": payload, "sent_bytes": sent, "received_bytes": received}
    return {"val_loss": curve[-1]["val_loss"], "curve": curve, **figures, "step_seconds": fast(seconds)}


def fast(seconds: list[float]) -> float:
    """Returns the 10th percentile of step times: other work on the machine makes steps slower, never faster.

    Examples:
        >>> fast([2.0, 1.0, 9.0])
        1.0
    """
    return sorted(seconds)[len(seconds) // 10]


def _provenance(device: torch.device) -> Row:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    threads = torch.get_num_threads()
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{name}, {threads} thread{'s' if threads > 1 else ''}",
        "torch": torch.__version__,
        "demopt": demopt.__version__,
    }
