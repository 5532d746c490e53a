"""The methods of the race on real ranks: torch's data parallelism, DiLoCo and MuLoCo, DeMo, LocalDeMo.

With a stand-in for a faster machine, sleep takes the place of forward, backward and optimizer, so that only codec and
exchange are real: a rank with a GPU sees the same of the link, if its compute takes as long.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import demopt
from laboratory.compare.methods.averaged import Maker, adamw_maker, muon_maker
from laboratory.compare.run import Scale
from laboratory.compare.studies import STUDIES, Entry
from laboratory.simulation.workers import Optimizer, Rates, copy_weights

#: A byte-level decoder of 0.93M parameters.
SCALE = Scale(steps=250, width=192, eval_sequences=128)
#: The methods by name. The loss by step of those in SAME_CURVE is taken to be another method's.
ENTRIES = {entry.name: entry for entry in STUDIES["race"].entries}
ENTRIES["Muon-DDP, bf16 gradients"] = Entry(
    "Muon-DDP, bf16 gradients", "muon", {"momentum": 0.8, "gradients": "bfloat16"}, ENTRIES["Muon-DDP"].lr
)
SAME_CURVE = {"Muon-DDP, bf16 gradients": "Muon-DDP"}
Work = Callable[[nn.Module], object]  # forward and backward


@dataclass(frozen=True)
class StandIn:
    """Seconds of a faster machine: of forward and backward, and of an optimizer's step."""

    passes: float = 0.010
    adamw: float = 0.001
    muon: float = 0.005


@dataclass
class Spent:
    """The seconds of a step. With DistributedDataParallel `compute` contains the exchange."""

    total: float
    compute: float
    optimizer: float


class RankMethod(ABC):
    """A method on this rank: `step` takes one training step."""

    every = 1  # steps per round

    def __init__(self, entry: Entry, model: nn.Module, clip: float, group: Any, stand_in: StandIn | None) -> None:
        self.model, self.clip, self.group, self.stand_in = model, clip, group, stand_in
        self.settings = dict(entry.settings)
        self.parameters = list(model.parameters())
        self.forward = model
        noise = torch.Generator().manual_seed(dist.get_rank())  # gradients that a stand-in does not compute
        self.noise = [torch.randn(p.shape, generator=noise) for p in self.parameters] if stand_in else []
        self.kind = "adamw" if entry.method in ("adamw", "diloco") else "muon"
        self.rates = Rates(self.build())

    @abstractmethod
    def build(self) -> list[Optimizer]:
        """Builds the optimizers of this rank, at rates that are factors."""

    @abstractmethod
    def update(self) -> float:
        """Takes the optimizer's step and the exchange; returns the seconds of the first."""

    def settled(self) -> AbstractContextManager[None]:
        """Returns the context to evaluate in."""
        return nullcontext()

    def maker(self) -> Maker:
        """Returns the maker of torch's optimizers; with a stand-in, of one that waits."""
        if self.stand_in is not None:
            seconds = getattr(self.stand_in, self.kind)
            return lambda model: [Waiting(model, seconds)]
        return adamw_maker(0.1) if self.kind == "adamw" else muon_maker(self.settings.get("momentum", 0.95))

    def step(self, lr: float, work: Work) -> Spent:
        """Takes one step."""
        began = time.perf_counter()
        self.rates.set(lr)
        self.model.zero_grad()
        if self.stand_in is None:
            work(self.forward)
        else:
            time.sleep(self.stand_in.passes)
            for parameter, noise in zip(self.parameters, self.noise, strict=True):
                parameter.grad = noise
        computed = time.perf_counter()
        optimizer = self.update()
        return Spent(time.perf_counter() - began, computed - began, optimizer)

    def clip_gradients(self) -> None:
        """Limits the norm of this rank's gradient."""
        if self.clip and self.stand_in is None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip)


class Averaged(RankMethod):
    """DistributedDataParallel, with gradients in float32 or bfloat16."""

    def build(self) -> list[Optimizer]:
        self.dtype = getattr(torch, self.settings.get("gradients", "float32"))
        self.optimizers = self.maker()(self.model)
        self.forward = DistributedDataParallel(self.model, process_group=self.group)
        if self.dtype == torch.bfloat16:
            self.forward.register_comm_hook(self.group, in_bfloat16)
        return self.optimizers

    def update(self) -> float:
        if self.stand_in is not None:  # the exchange of DistributedDataParallel
            elements = sum(parameter.numel() for parameter in self.parameters)
            dist.all_reduce(torch.zeros(elements, dtype=self.dtype), group=self.group)
        self.clip_gradients()
        began = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
        return time.perf_counter() - began


def in_bfloat16(group, bucket):  # type: ignore[no-untyped-def]  # as a text, DistributedDataParallel refuses a type
    """torch's hook under another name: by its name it is refused without nccl, though gloo adds bfloat16 too."""
    return bf16_compress_hook(group, bucket)


class Outer(RankMethod):
    """DiLoCo and MuLoCo: every H local steps, SGD with Nesterov momentum on the mean pseudo-gradient, in float32."""

    def build(self) -> list[Optimizer]:
        self.every, self.taken = self.settings["every"], 0
        self.optimizers = self.maker()(self.model)
        self.global_weights = [parameter.detach().clone() for parameter in self.parameters]
        lr, momentum = self.settings.get("outer_lr", 0.7), self.settings.get("outer_momentum", 0.9)
        self.outer = torch.optim.SGD(self.global_weights, lr=lr, momentum=momentum, nesterov=True)
        return self.optimizers

    @torch.no_grad()
    def update(self) -> float:
        self.clip_gradients()
        began, exchanged = time.perf_counter(), 0.0
        for optimizer in self.optimizers:
            optimizer.step()
        self.taken += 1
        if self.taken % self.every == 0:
            pairs = zip(self.global_weights, self.parameters, strict=True)
            pseudo_gradient = torch.cat([(start - local).flatten() for start, local in pairs])
            starts = time.perf_counter()
            dist.all_reduce(pseudo_gradient, group=self.group)
            exchanged = time.perf_counter() - starts
            parts = (pseudo_gradient / dist.get_world_size()).split([p.numel() for p in self.parameters])
            for weight, part in zip(self.global_weights, parts, strict=True):
                weight.grad = part.view_as(weight)
            self.outer.step()
            copy_weights(self.global_weights, self.parameters)
        return time.perf_counter() - began - exchanged

    @contextmanager
    def settled(self) -> Iterator[None]:
        local = [parameter.detach().clone() for parameter in self.parameters]
        copy_weights(self.global_weights, self.parameters)
        yield
        copy_weights(local, self.parameters)


class DeMo(RankMethod):
    """demopt.DeMo; with a stand-in under signum, whose messages are as long as those under muon."""

    def build(self) -> list[Optimizer]:
        if self.stand_in is None:
            groups = demopt.muon_groups(self.model, lr=1.0)
        else:
            self.settings["update"] = "signum"
            groups = [{"params": self.parameters, "lr": 1.0}]
        self.optimizer = demopt.DeMo(groups, process_group=self.group, **self.settings)
        return [self.optimizer]

    def update(self) -> float:
        self.clip_gradients()
        began = time.perf_counter()
        if self.stand_in is not None:
            time.sleep(self.stand_in.muon)
        self.optimizer.step()
        return time.perf_counter() - began - self.optimizer.stats.seconds["exchange"]


class LocalDeMo(RankMethod):
    """demopt.LocalDeMo around the optimizers of Muon-DDP."""

    def build(self) -> list[Optimizer]:
        inner = self.maker()(self.model)
        settings = {name: value for name, value in self.settings.items() if name not in ("momentum", "inner")}
        self.optimizer = demopt.LocalDeMo(inner, process_group=self.group, **settings)
        self.every, self.delayed = settings["sync_every"], bool(settings.get("delay"))
        return inner

    def update(self) -> float:
        self.clip_gradients()
        began = time.perf_counter()
        self.optimizer.step()
        exchanged = 0.0 if self.delayed else self.optimizer.stats.seconds.get("exchange", 0.0)
        return time.perf_counter() - began - exchanged

    def settled(self) -> AbstractContextManager[None]:
        self.optimizer.flush()
        return self.optimizer.shared()


class Waiting(torch.optim.Optimizer):
    """An optimizer that takes its time and goes down the gradient."""

    def __init__(self, model: nn.Module, seconds: float) -> None:
        super().__init__(model.parameters(), {"lr": 1.0})
        self.seconds = seconds

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        time.sleep(self.seconds)
        for weight in self.param_groups[0]["params"]:
            weight.add_(weight.grad, alpha=-1e-4)


KINDS: dict[str, Callable[..., RankMethod]] = {
    "adamw": Averaged,
    "muon": Averaged,
    "diloco": Outer,
    "muloco": Outer,
    "demo": DeMo,
    "local": LocalDeMo,
}


def make(entry: Entry, model: nn.Module, clip: float, group: Any, stand_in: StandIn | None = None) -> RankMethod:
    """Builds a method on this rank."""
    return KINDS[entry.method](entry, model, clip, group, stand_in)
