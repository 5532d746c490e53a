"""The training loop: the same for connected ranks and for the workers of a folder, whose steps are plugged in."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from demopt.errors import DemoptError
from demopt.optim.local_demo import LocalDeMo
from demopt.train.config import TrainConfig
from demopt.train.data import Batch, Corpus, sequences, validation_windows
from demopt.train.model import backward, loss_sum, targets, uses_all_parameters
from demopt.train.out import OutFolder, Row
from demopt.train.report import Report
from demopt.train.team import Team
from demopt.unequal import fit_batches

PATIENCE = 10  # a run fails after this many steps in a row with a NaN or infinite loss
_MEMORY = 0.7  # share of the measured speed that a step keeps: one slow step changes little

Windows = list[Batch]  # of a step, by forward pass


@dataclass(eq=False)
class Training(ABC):
    """A worker and its steps: `Connected` in worker.py; in a folder, `Worker` in train/runs/worker.py."""

    config: TrainConfig
    out: OutFolder
    team: Team
    corpus: Corpus
    model: nn.Module
    optimizer: torch.optim.Optimizer
    report: Report = field(init=False)  # from the first step on
    number: int = field(init=False, default=0)  # the step that was drawn last
    tokens: int = field(init=False, default=0)  # trained on so far, by all workers
    speed: float = field(init=False, default=0.0)  # sequences per second while computing; 0: not measured yet
    _batches: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.factors = [group["lr"] for group in self.optimizer.param_groups]  # on the learning rate
        self.forward: Any = torch.compile(self.model) if self.config.compile else self.model
        if self.config.optimizer == "adamw":
            devices = [self.team.device.index] if self.team.device.type == "cuda" else None
            with self.team.waiting():
                unused = not uses_all_parameters(self.model)
                self.forward = DistributedDataParallel(self.forward, device_ids=devices, find_unused_parameters=unused)

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the step that was drawn last is the run's last."""

    @property
    @abstractmethod
    def part(self) -> float | None:
        """With --epochs, the part of the run's sequences that has been read."""

    @property
    @abstractmethod
    def stream(self) -> int:
        """The number of this worker's stream of random numbers."""

    @abstractmethod
    def draw(self) -> Windows:
        """Returns the windows of this worker's next step; none if the run is over."""

    @abstractmethod
    def take_step(self, rows: list[Row], seconds: float, pause: bool) -> bool:
        """Takes the optimizer's step; returns whether the rows, not reported yet, are complete and may be reported.

        `seconds`: the gradient's time. `pause`: the model is evaluated next, so connected ranks end all rounds.
        """

    @abstractmethod
    def after_report(self, row: Row) -> None:
        """Acts on the report of `row`, the last one: saves, for example."""

    def shared(self) -> AbstractContextManager[None]:
        """A context for evaluating and saving: in it, the model's weights are the same on all ranks."""
        return self.optimizer.shared() if isinstance(self.optimizer, LocalDeMo) else nullcontext()

    def set_lr(self, lr: float) -> None:
        for group, factor in zip(self.optimizer.param_groups, self.factors, strict=True):
            group["lr"], group["initial_lr"] = lr * factor, factor  # as torch's schedulers mark their groups

    def share_out(self, speeds: Mapping[str, float]) -> None:
        """With --global-batch, shares the batch out among all workers that train, by their speeds."""
        if self.config.global_batch is not None:
            self._batches = fit_batches(speeds, self.config.global_batch, self._batches)

    def batch_of(self, worker: str) -> int:
        """Returns the sequences of a worker's next step: --batch times --accumulate, or its part of --global-batch."""
        return self._batches.get(worker, self.config.batch * self.config.accumulate)

    def measured(self, sequences: int, seconds: float) -> None:
        """Notes how long this worker has computed on its sequences."""
        speed = sequences / max(seconds, 1e-9)
        self.speed = _MEMORY * self.speed + (1 - _MEMORY) * speed if self.speed else speed


def passes(config: TrainConfig, sequences: int) -> list[int]:
    """Returns the sequences of each forward pass: at most --batch, which fits the memory."""
    return [min(config.batch, sequences - first) for first in range(0, sequences, config.batch)]


def length(config: TrainConfig, corpus: Corpus) -> str:
    """Returns how long the run is, for the user."""
    if config.epochs:
        return f"{config.epochs} epoch{'s' * (config.epochs > 1)} of {sequences(corpus.train, config):,} sequences"
    return f"{config.steps} steps"


def learning_rate(config: TrainConfig, step: int, part: float | None = None) -> float:
    """Returns the rate of step 1, 2, ...: linear warm-up, then a cosine over the steps, or `part` of the sequences."""
    assert config.lr is not None
    if step <= config.warmup:
        return config.lr * (step / config.warmup)
    if part is None:
        assert config.steps is not None
        part = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * part)))


@torch.no_grad()
def validation_loss(training: Training, windows: Batch) -> float:
    """Returns the mean loss per token over all ranks' validation windows."""
    config, model, team = training.config, training.model, training.team
    model.eval()
    parts = [windows[first : first + config.batch] for first in range(0, len(windows), config.batch)]
    total = sum(loss_sum(model, part, config, team.device).item() for part in parts)
    model.train()
    summed, count = team.total([total, float(targets(windows))])
    return summed / max(1.0, count)


def train_steps(training: Training) -> None:
    """Takes the steps, and reports them, until the run is over or the worker is to stop."""
    config, bad = training.config, 0
    windows = validation_windows(training.corpus.val, config, training.team.rank, training.team.world_size)
    rows: list[Row] = []  # not reported yet: their losses are this worker's until the workers exchange them

    def report() -> None:
        nonlocal bad
        row = rows[-1]
        if row["step"] % config.eval_every == 0 or training.ended:
            with training.shared():
                row["val_loss"] = validation_loss(training, windows)
        for each in rows:
            with training.out.writing():
                training.report.step(each)
            bad = 0 if math.isfinite(each["loss"]) else bad + 1
            if bad == PATIENCE:
                first = each["step"] - bad + 1
                raise DemoptError(f"the loss has been {each['loss']} since step {first}; try a lower --lr")
        rows.clear()
        training.after_report(row)

    def note_progress() -> None:
        rows[-1] |= {"step": training.number, "tokens": training.tokens}
        if training.part is not None and config.epochs:
            rows[-1]["epoch"] = training.part * config.epochs

    began = time.perf_counter()
    while drawn := training.draw():
        step, lr = training.number, learning_rate(config, training.number, training.part)
        # For dropout: a step after --resume draws the same numbers as without a stop, and no two workers draw the same.
        seed = np.random.SeedSequence((config.seed, step, training.stream)).generate_state(1, np.uint64)
        torch.manual_seed(int(seed[0]))
        computing = time.perf_counter()
        loss = _gradient(training, lr, drawn)
        computing = time.perf_counter() - computing
        rows.append({"step": step, "loss": loss, "lr": lr})
        pause = step % config.eval_every == 0 or training.ended
        complete = training.take_step(rows, computing, pause)
        note_progress()
        rows[-1]["step_seconds"] = time.perf_counter() - began
        if complete:
            report()
        began = time.perf_counter()
    if rows:
        note_progress()
        report()


def _gradient(training: Training, lr: float, windows: Windows) -> float:
    """Sets the learning rate and computes a step's clipped gradients from its parts; returns the loss."""
    config, forward, device = training.config, training.forward, training.team.device
    training.set_lr(lr)
    training.optimizer.zero_grad()
    loss, count = 0.0, sum(map(targets, windows))
    for number, part in enumerate(windows, 1):
        early = number < len(windows)  # DDP synchronizes in the last pass
        with forward.no_sync() if early and isinstance(forward, DistributedDataParallel) else nullcontext():
            loss += backward(forward, part, config, device, count)
    if config.clip:
        torch.nn.utils.clip_grad_norm_(forward.parameters(), config.clip)
    return loss
