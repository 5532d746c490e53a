"""One run from start to end: a method at one learning rate, seed and scale. Its record is a line of the store."""

import dataclasses
import datetime
import hashlib
import json
import math
import os
import platform
import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import demopt
from laboratory.compare.methods import METHODS
from laboratory.compare.studies import Entry
from laboratory.simulation.experiment import Experiment
from laboratory.simulation.workers import Cost, SimulatedWorkers
from laboratory.training import Corpus, TrainConfig, build

Row = dict[str, Any]
HEAD = 32  # width of an attention head
EVALUATIONS = 10  # points of a curve


@dataclass(frozen=True)
class Scale:
    """The settings that all methods of a comparison share.

    Examples:
        >>> Scale(width=64).config(lr=0.1, seed=1).mlp
        176
    """

    steps: int = 300
    workers: int = 4
    batch: int = 4
    layers: int = 2
    width: int = 128
    sequence: int = 128
    warmup: int = 40
    clip: float = 1.0
    eval_sequences: int = 256
    val_fraction: float = 0.05

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name in ("warmup", "clip", "val_fraction") else 1
            if value < least:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; give at least {least}")
        if self.width % HEAD:
            raise ValueError(f"--width is {self.width}; give a multiple of {HEAD}")

    @property
    def eval_every(self) -> int:
        """Steps between evaluations."""
        return max(1, self.steps // EVALUATIONS)

    def config(self, lr: float, seed: int) -> TrainConfig:
        """Returns model, data and schedule of a run as settings of `demopt train`; tokens are bytes."""
        return TrainConfig(
            preset="tiny", layers=self.layers, width=self.width, heads=self.width // HEAD,
            mlp=-(-8 * self.width // 3 // 8) * 8, vocab_size=256, sequence=self.sequence, batch=self.batch,
            steps=self.steps, warmup=self.warmup, lr=lr, seed=seed, eval_sequences=self.eval_sequences,
            val_fraction=self.val_fraction,
        )  # fmt: skip

    def flags(self) -> list[str]:
        """Returns the command-line flags of the values that differ from the defaults.

        Examples:
            >>> Scale(steps=20).flags()
            ['--steps', '20']
        """
        words: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                words += [f"--{field.name.replace('_', '-')}", str(value)]
        return words


QUICK = Scale(steps=200, width=64, sequence=64, warmup=25, eval_sequences=128)


@dataclass(frozen=True)
class Source:
    """The training text: its fingerprint, and the paths given as --data."""

    fingerprint: str
    paths: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The paths without folders, which are private; the fingerprint identifies the text."""
        return tuple(Path(path).name for path in self.paths)


@dataclass(frozen=True)
class Run:
    """An entry of a study at one learning rate, seed and scale.

    Examples:
        >>> Run("one-bit", Entry("adamw", "adamw", {}, 4e-3), 2e-3, 0, Scale(), Source("")).command()
        'python -m laboratory.compare --study one-bit --only adamw --seeds 0 --lr 0.002'
    """

    study: str
    entry: Entry
    lr: float
    seed: int
    scale: Scale
    source: Source

    def facts(self) -> Row:
        """Returns everything that determines the outcome."""
        scale = {**asdict(self.scale), "apart": False}  # as in rows from when this setting existed
        method = {"method": self.entry.method, "settings": self.entry.settings, "lr": self.lr, "seed": self.seed}
        return {**method, "scale": scale, "data": self.source.fingerprint, "demopt": demopt.__version__}

    @property
    def key(self) -> str:
        """A hash of the facts: equal for equal runs, whichever study asks for them."""
        return hashlib.blake2b(json.dumps(self.facts(), sort_keys=True).encode(), digest_size=8).hexdigest()

    def command(self) -> str:
        """Returns the command that repeats the run."""
        words = ["python", "-m", "laboratory.compare", "--study", self.study, "--only", self.entry.name]
        words += ["--seeds", str(self.seed), "--lr", f"{self.lr:g}", *self.scale.flags()]
        for name in self.source.names:
            words += ["--data", name]
        return shlex.join(words)


def carry_out(run: Run, corpus: Corpus, device: torch.device, states: Path | None = None) -> Row:
    """Trains and evaluates; returns the run's record. A run ends early, with loss None, when its loss is not finite.

    After each point of its curve the run's state is written to a file in the folder `states`. An interrupted run goes
    on from there, to the same record except for its seconds.
    """
    began = time.perf_counter()
    config = run.scale.config(run.lr, run.seed)
    model = build(config).to(device)
    torch.manual_seed(run.seed)
    workers = SimulatedWorkers(model, run.scale.workers, run.scale.clip)
    method = METHODS[run.entry.method](workers, **run.entry.settings)
    try:
        experiment = Experiment(config, corpus, method, device)
        found = _train(experiment, run.scale.eval_every, states / f"{run.key}.pt" if states else None)
    finally:
        method.close()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "key": run.key,
        "name": run.entry.name,
        **run.facts(),
        **found,
        "parameters": workers.elements,
        "bytes_rule": method.bytes_rule,
        "seconds": round(time.perf_counter() - began, 1),
        "command": run.command(),
        "date": datetime.date.today().isoformat(),
        "machine": f"{name}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
    }


def _train(experiment: Experiment, eval_every: int, state: Path | None) -> Row:
    """Trains; returns the curve (validation loss and total bytes by step), and all bytes."""
    if state and state.exists():
        saved = torch.load(state, weights_only=True)
        experiment.method.load(saved["method"])
        begun, curve, total = saved["step"], saved["curve"], Cost(**saved["total"])
    else:
        loss, total = experiment.evaluate()
        begun, curve = 0, [{"step": 0, "val_loss": loss, "sent_bytes": 0, "received_bytes": 0}]
    is_due, steps = False, experiment.config.steps or 0
    for step in range(begun + 1, steps + 1):
        mean, cost = experiment.step(step)
        total += cost
        finite = math.isfinite(mean)
        if step % eval_every == 0 or step == steps or not finite:
            if finite:
                loss, more = experiment.evaluate()
                total += more
            val_loss = loss if finite and math.isfinite(loss) else None
            point = {"step": step, "val_loss": val_loss}
            curve.append({**point, "sent_bytes": total.sent_bytes, "received_bytes": total.received_bytes})
            is_due = state is not None
        if not finite:
            break
        if state and is_due and (method := experiment.method.state()):
            _write(state, {"step": step, "curve": curve, "total": vars(total), "method": method})
            is_due = False
    if state:
        state.unlink(missing_ok=True)
    return {"val_loss": curve[-1]["val_loss"], "curve": curve, **vars(total)}


def _write(path: Path, state: dict[str, Any]) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    torch.save(state, written)
    written.replace(path)
