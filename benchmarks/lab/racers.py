"""The methods of a race on real ranks: torch's own data parallelism, DiLoCo and MuLoCo, DeMo, LocalDeMo."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from race import Entry
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import demopt
from demopt.compare.methods.ddp import Maker, Shares, adamw_maker, muon_maker
from demopt.compare.studies import BASE
from demopt.simulate.method import Fleet
from demopt.train.method import demo_groups

WEIGHT_DECAY = 0.1
Work = Callable[[nn.Module], None]  # forward and backward


@dataclass(frozen=True)
class Stand:
    """Seconds that stand for a faster machine: of forward and backward, and of an optimizer's step."""

    passes: float
    adamw: float
    muon: float


@dataclass
class Spent:
    """Where a step's time went. With DistributedDataParallel `compute` has the exchange in it."""

    total: float
    compute: float
    optimizer: float


class Racer(ABC):
    """A method on this rank: `step` takes one training step."""

    every = 1  # steps from one round to the next

    def __init__(self, entry: Entry, model: nn.Module, clip: float, group: Any, stand: Stand | None) -> None:
        self.model, self.clip, self.group, self.stand = model, clip, group, stand
        self.settings = {name: value for name, value in entry.settings.items() if name != "gradients"}
        self.parameters = list(model.parameters())
        noise = torch.Generator().manual_seed(dist.get_rank())  # gradients that a stand-in does not compute
        self.noise = [torch.randn(p.shape, generator=noise) for p in self.parameters] if stand else []
        self.fleet = Fleet(model, dist.get_world_size(), clip)
        self.kind = "adamw" if entry.method in ("adamw", "diloco") else "muon"

    def maker(self) -> Maker:
        """Return what makes the optimizers of a worker; with a stand-in, one that waits."""
        if self.stand is not None:
            seconds = getattr(self.stand, self.kind)
            return lambda weights: [Waiting(weights, seconds)]
        if self.kind == "adamw":
            return adamw_maker(WEIGHT_DECAY)
        return muon_maker(self.fleet, self.settings.get("momentum", 0.95), WEIGHT_DECAY)

    def step(self, lr: float, work: Work) -> Spent:
        """Take one step."""
        began = time.perf_counter()
        self.set_rate(lr)
        for parameter in self.parameters:
            parameter.grad = None
        if self.stand is None:
            work(self.forward)
        else:
            time.sleep(self.stand.passes)
            for parameter, noise in zip(self.parameters, self.noise, strict=True):
                parameter.grad = noise
        computed = time.perf_counter()
        optimizer = self.update()
        ended = time.perf_counter()
        return Spent(ended - began, computed - began, optimizer)

    @property
    def forward(self) -> nn.Module:
        """What the forward pass calls."""
        return self.model

    @abstractmethod
    def set_rate(self, lr: float) -> None:
        """Set the learning rate."""

    @abstractmethod
    def update(self) -> float:
        """Take the optimizer's step and the exchange; return the seconds of the first."""

    def settle(self) -> AbstractContextManager[None]:
        """Return the context to evaluate in."""
        return nullcontext()

    def _clip(self) -> None:
        if self.clip and self.stand is None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip)


class Averaged(Racer):
    """DistributedDataParallel, with gradients in float32 or bfloat16."""

    def __init__(self, entry: Entry, model: nn.Module, clip: float, group: Any, stand: Stand | None) -> None:
        super().__init__(entry, model, clip, group, stand)
        self.dtype = getattr(torch, entry.settings.get("gradients", "float32"))
        self.optimizers = self.maker()(self.parameters)
        self.shares = Shares(self.optimizers)
        self.ddp = DistributedDataParallel(model, process_group=group)
        if self.dtype == torch.bfloat16:
            self.ddp.register_comm_hook(group, in_bfloat16)

    @property
    def forward(self) -> nn.Module:
        return self.ddp

    def set_rate(self, lr: float) -> None:
        self.shares.set(lr)

    def update(self) -> float:
        if self.stand is not None:  # what DistributedDataParallel would send
            dist.all_reduce(torch.zeros(self.fleet.elements, dtype=self.dtype), group=self.group)
        self._clip()
        began = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
        return time.perf_counter() - began


def in_bfloat16(group, bucket):  # type: ignore[no-untyped-def]  # as a text, DistributedDataParallel refuses a type
    """torch's hook under another name: under its own it is refused without nccl, though gloo adds bfloat16 too."""
    return bf16_compress_hook(group, bucket)


class Outer(Racer):
    """DiLoCo and MuLoCo: own steps, and every H of them SGD with Nesterov momentum on the mean drift, in float32."""

    def __init__(self, entry: Entry, model: nn.Module, clip: float, group: Any, stand: Stand | None) -> None:
        super().__init__(entry, model, clip, group, stand)
        self.every, self.taken = self.settings["every"], 0
        self.optimizers = self.maker()(self.parameters)
        self.shares = Shares(self.optimizers)
        self.shared = [parameter.detach().clone() for parameter in self.parameters]
        lr, momentum = self.settings.get("outer_lr", 0.7), self.settings.get("outer_momentum", 0.9)
        self.outer = torch.optim.SGD(self.shared, lr=lr, momentum=momentum, nesterov=True)

    def set_rate(self, lr: float) -> None:
        self.shares.set(lr)

    @torch.no_grad()
    def update(self) -> float:
        self._clip()
        began, exchanged = time.perf_counter(), 0.0
        for optimizer in self.optimizers:
            optimizer.step()
        self.taken += 1
        if self.taken % self.every == 0:
            pairs = zip(self.shared, self.parameters, strict=True)
            drift = torch.cat([(shared - own).flatten() for shared, own in pairs])
            starts = time.perf_counter()
            dist.all_reduce(drift, group=self.group)
            exchanged = time.perf_counter() - starts
            self._move(drift / dist.get_world_size())
        return time.perf_counter() - began - exchanged

    def _move(self, drift: Tensor) -> None:
        at = 0
        for shared in self.shared:
            shared.grad = drift[at : at + shared.numel()].view_as(shared)
            at += shared.numel()
        self.outer.step()
        for own, shared in zip(self.parameters, self.shared, strict=True):
            own.copy_(shared)

    def settle(self) -> AbstractContextManager[None]:
        return _Swapped(self.parameters, self.shared)


class DeMo(Racer):
    """demopt.DeMo; with a stand-in its signs, whose messages are as long as those for Muon's update."""

    def __init__(self, entry: Entry, model: nn.Module, clip: float, group: Any, stand: Stand | None) -> None:
        super().__init__(entry, model, clip, group, stand)
        settings = {**BASE, **self.settings}
        if stand is not None:
            settings["update"] = "signum"
        groups = demo_groups(model, settings["update"])
        self.shares = [found.pop("share") for found in groups]
        self.optimizer = demopt.DeMo(groups, process_group=group, **settings)

    def set_rate(self, lr: float) -> None:
        for group, share in zip(self.optimizer.param_groups, self.shares, strict=True):
            group["lr"] = lr * share

    def update(self) -> float:
        self._clip()
        began = time.perf_counter()
        if self.stand is not None:
            time.sleep(self.stand.muon)
        self.optimizer.step()
        return time.perf_counter() - began - self.optimizer.stats.seconds["exchange"]


class LocalDeMo(Racer):
    """demopt.LocalDeMo around the optimizers of Muon-DDP."""

    def __init__(self, entry: Entry, model: nn.Module, clip: float, group: Any, stand: Stand | None) -> None:
        super().__init__(entry, model, clip, group, stand)
        inner = self.maker()(self.parameters)
        self.shares = Shares(inner)
        settings = {name: value for name, value in self.settings.items() if name != "momentum"}
        self.optimizer = demopt.LocalDeMo(inner, process_group=group, **settings)
        self.every, self.delayed = self.settings["sync_every"], bool(self.settings.get("delay"))

    def set_rate(self, lr: float) -> None:
        self.shares.set(lr)

    def update(self) -> float:
        self._clip()
        began = time.perf_counter()
        self.optimizer.step()
        exchanged = 0.0 if self.delayed else self.optimizer.stats.seconds.get("exchange", 0.0)
        return time.perf_counter() - began - exchanged

    def settle(self) -> AbstractContextManager[None]:
        self.optimizer.flush()
        return self.optimizer.shared()


class Waiting(torch.optim.Optimizer):
    """An optimizer that takes its time and goes down the gradient."""

    def __init__(self, weights: list[nn.Parameter], seconds: float) -> None:
        super().__init__(weights, {"lr": 1.0})
        self.seconds = seconds

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Wait."""
        del closure
        time.sleep(self.seconds)
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight.add_(weight.grad, alpha=-1e-4)


class _Swapped(AbstractContextManager[None]):
    """Inside, the parameters have other weights."""

    def __init__(self, parameters: list[nn.Parameter], weights: list[Tensor]) -> None:
        self._parameters, self._weights = parameters, weights

    @torch.no_grad()
    def __enter__(self) -> None:
        self._own = [parameter.detach().clone() for parameter in self._parameters]
        self._put(self._weights)

    def __exit__(self, *error: object) -> None:
        self._put(self._own)

    @torch.no_grad()
    def _put(self, weights: list[Tensor]) -> None:
        for parameter, weight in zip(self._parameters, weights, strict=True):
            parameter.copy_(weight)


KINDS = {"adamw": Averaged, "muon": Averaged, "diloco": Outer, "muloco": Outer, "demo": DeMo, "local": LocalDeMo}


def make(entry: Entry, model: nn.Module, clip: float, group: Any, stand: Stand | None = None) -> Racer:
    """Build a method on this rank."""
    return KINDS[entry.method](entry, model, clip, group, stand)
