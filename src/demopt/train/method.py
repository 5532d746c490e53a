"""The optimizer step: DeMo or LocalDeMo on the plain model, or Muon or AdamW with DistributedDataParallel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import demopt
from demopt.core.update import rule_of
from demopt.exchange import Exchange, Hierarchical, SingleRank
from demopt.exchange.wrappers import all_reduce_bytes
from demopt.optim.groups import split_matrices
from demopt.optim.handshake import check_weights
from demopt.optim.stats import Stats
from demopt.train.config import InputError, TrainConfig
from demopt.train.model import count_parameters
from demopt.train.team import Team

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Cost:
    """What one step cost this rank. `exchange_seconds` is None with DDP, which exchanges during backward."""

    payload_bytes: int
    sent_bytes: int
    received_bytes: int
    optimizer_seconds: float
    exchange_seconds: float | None


@dataclass(frozen=True)
class Method:
    """A model ready for the forward pass, and its optimizer."""

    forward: nn.Module
    optimizer: torch.optim.Optimizer
    private: bool  # each rank has its own optimizer state: DeMo or LocalDeMo
    parameters: int
    world_size: int
    shares: tuple[float, ...] = (1.0,)  # factor on the learning rate, per parameter group
    delayed: bool = False  # updates are applied one step, or round, late
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # around a backward pass that synchronises

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step."""
        for group, share in zip(self.optimizer.param_groups, self.shares, strict=True):
            group["lr"] = lr * share

    def quiet(self) -> AbstractContextManager[None]:
        """Return the context for all but the last backward pass of a step: gradients are not synchronised."""
        if isinstance(self.forward, DistributedDataParallel):
            return self.forward.no_sync()
        return self.optimizer.no_sync() if isinstance(self.optimizer, demopt.DeMo) else nullcontext()

    def shared(self) -> AbstractContextManager[None]:
        """Return the context to evaluate, save and sample in: the model's weights are the same on all ranks."""
        return self.optimizer.shared() if isinstance(self.optimizer, demopt.LocalDeMo) else nullcontext()

    @property
    def met(self) -> bool:
        """Whether the ranks exchanged anything in the last step; local steps between two rounds do not."""
        return not (isinstance(self.optimizer, demopt.LocalDeMo) and self.optimizer.local_steps)

    @property
    def route(self) -> str | None:
        """The route of the messages, and why it was chosen; None for DDP. Known after the first round."""
        if isinstance(self.optimizer, demopt.LocalDeMo):  # why not "owner" needs no word: it never carries movements
            return self.optimizer.stats.route.partition(";")[0].replace("a step", "a round")
        return self.optimizer.stats.route if isinstance(self.optimizer, demopt.DeMo) else None

    def step(self, looked_at: bool, last: bool = False) -> Cost:
        """Run the optimizer step and return its cost; with delay, the cost of the updates that it applied.

        `looked_at`: parameters are evaluated or saved as a model next, so no update may stay in flight.
        `last`: the run ends here, so local steps since the last round go into one more.
        """
        if isinstance(self.optimizer, demopt.LocalDeMo):
            return self._step_of_local(self.optimizer, looked_at, last)
        if self.private:
            return self._step_of_demo(looked_at)
        began = time.perf_counter()
        self.optimizer.step()
        traffic = all_reduce_bytes(FLOAT32_BYTES * self.parameters, self.world_size)
        return Cost(FLOAT32_BYTES * self.parameters, traffic, traffic, time.perf_counter() - began, None)

    def _step_of_demo(self, looked_at: bool) -> Cost:
        optimizer: Any = self.optimizer
        optimizer.step()
        sent, received = optimizer.stats.sent_bytes, optimizer.stats.received_bytes
        if self.delayed and looked_at:
            optimizer.flush()
            sent, received = sent + optimizer.stats.sent_bytes, received + optimizer.stats.received_bytes
        seconds = optimizer.stats.seconds
        compute = seconds["extract"] + seconds.get("apply", 0.0)  # with delay, the first step applies nothing
        return Cost(optimizer.stats.payload_bytes, sent, received, compute, seconds.get("exchange", 0.0))

    def _step_of_local(self, optimizer: demopt.LocalDeMo, looked_at: bool, last: bool) -> Cost:
        began = time.perf_counter()
        optimizer.step()
        parts = [optimizer.stats]
        if self.delayed and looked_at:
            optimizer.flush()
            if optimizer.stats is not parts[0]:
                parts.append(replace(optimizer.stats, payload_bytes=0))  # counted when it was sent
        if last and optimizer.local_steps:
            optimizer.apply(optimizer.exchange(optimizer.extract()))
            parts.append(optimizer.stats)
        return _cost_of_rounds(parts, time.perf_counter() - began)


def _cost_of_rounds(parts: list[Stats], seconds: float) -> Cost:
    """Return the cost of a step of so many seconds, from the statistics of its rounds."""
    exchange = sum(part.seconds.get("exchange", 0.0) for part in parts)
    payload, sent, received = (
        sum(getattr(part, name) for part in parts) for name in ("payload_bytes", "sent_bytes", "received_bytes")
    )
    return Cost(payload, sent, received, seconds - exchange, exchange)


class Together(torch.optim.Optimizer):
    """Several optimizers as one, with one state and one list of parameter groups.

    Examples:
        >>> one, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        >>> both = Together([torch.optim.SGD([one], lr=0.5, momentum=0.9), torch.optim.AdamW([other], lr=0.1)])
        >>> one.grad = other.grad = torch.ones(1)
        >>> both.step()
        >>> [group["lr"] for group in both.param_groups], len(both.state_dict()["state"])
        ([0.5, 0.1], 2)
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self._join()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Let every optimizer take its step."""
        del closure
        for each in self.optimizers:
            each.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch."""
        super().load_state_dict(state_dict)
        self._join()

    def _join(self) -> None:
        at = 0
        for each in self.optimizers:
            count = len(each.param_groups)
            each.state, each.param_groups = self.state, self.param_groups[at : at + count]
            at += count


def make_method(config: TrainConfig, model: nn.Module, team: Team) -> Method:
    """Build the configured optimizer for a model that is already on its device."""
    count = count_parameters(model)
    forward: Any = torch.compile(model) if config.compile else model
    if config.optimizer == "demo":
        assert config.update is not None
        groups = demo_groups(model, config.update, config.rule("adamw"))
        shares = tuple(group.pop("share") for group in groups)
        demo = demopt.DeMo(groups, process_group=team.sealed, **config.demo_settings())
        return Method(forward, demo, True, count, team.world_size, shares, config.delay == 1)
    if config.optimizer == "local":
        inner = inner_optimizers(model, config)
        shares = shares_of(inner)
        local = demopt.LocalDeMo(inner, process_group=team.sealed, **config.local_settings())
        return Method(forward, local, True, count, team.world_size, shares, config.delay == 1)
    wrapped, waiting = synchronised(forward, team)
    if config.optimizer == "muon":
        inner = inner_optimizers(model, config)
        shares = shares_of(inner)
        return Method(wrapped, Together(inner), False, count, team.world_size, shares, waiting=waiting)
    return Method(wrapped, adamw(model.parameters(), config), False, count, team.world_size, waiting=waiting)


def synchronised(model: nn.Module, team: Team) -> tuple[nn.Module, Callable[[], AbstractContextManager[None]]]:
    """Return the model to call, and the context of the backward passes after which ranks have the mean gradient.

    In a run with a key, gradients are averaged after the backward pass, in messages with tags, in place of DDP, whose
    messages have none.
    """
    if team.sealed is not None:
        check_weights(team.sealed, list(model.parameters()), team.device)
        return model, lambda: _averaging(model, team.sealed)
    devices = [team.device.index] if team.device.type == "cuda" else None
    with team.waiting():
        return DistributedDataParallel(model, device_ids=devices), team.waiting


@contextmanager
def _averaging(model: nn.Module, exchange: Exchange | None) -> Iterator[None]:
    yield
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    Hierarchical(SingleRank(), exchange or SingleRank()).average(gradients)


def inner_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Build Muon for a model's matrices and AdamW for all other parameters, at --lr 1 times their shares.

    Examples:
        >>> from demopt.train.model import resolve
        >>> both = inner_optimizers(nn.Linear(3, 3), resolve(TrainConfig(optimizer="muon")))
        >>> [(type(one).__name__, one.param_groups[0]["lr"]) for one in both]
        [('Float32Muon', 1.0), ('AdamW', 0.2)]
    """
    matrices, rest = split_matrices(model)
    return _muon_and_adamw(matrices, rest, config)


def shares_of(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[float, ...]:
    """Return the factor on the learning rate of each group of new optimizers, which are made at rate 1."""
    return tuple(group["lr"] for each in optimizers for group in each.param_groups)


def _muon_and_adamw(
    matrices: list[nn.Parameter], rest: list[nn.Parameter], config: TrainConfig
) -> list[torch.optim.Optimizer]:
    found: list[torch.optim.Optimizer] = []
    if not hasattr(torch.optim, "Muon"):
        raise InputError(
            f"--optimizer {config.optimizer} needs torch.optim.Muon, of torch 2.9 or newer, and this is "
            f"{torch.__version__}; take a newer one, or --optimizer demo or adamw"
        )
    if matrices:
        assert config.weight_decay is not None
        assert config.momentum is not None
        found.append(build_muon(matrices, 1.0, config.momentum, config.weight_decay))
    if rest:
        found.append(adamw(rest, replace(config, lr=config.others_share)))
    return found


def build_muon(
    matrices: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.1
) -> torch.optim.Optimizer:
    """Build Muon with Nesterov momentum and the scale "match_rms_adamw": torch's, or `Float32Muon` on a CPU.

    Examples:
        >>> type(build_muon([nn.Parameter(torch.ones(2, 3))], lr=0.02)).__name__
        'Float32Muon'
    """
    from demopt.train.muon import Float32Muon  # older torch lacks its base class

    kind = Float32Muon if matrices[0].is_cpu else torch.optim.Muon
    return kind(matrices, lr, weight_decay, momentum, nesterov=True, adjust_lr_fn="match_rms_adamw")


def adamw(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """Build AdamW with a config's rate, betas, eps and weight decay."""
    assert config.lr is not None
    assert config.weight_decay is not None
    assert config.beta2 is not None
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def demo_groups(model: nn.Module, update: str, others_update: str = "adamw") -> list[dict[str, Any]]:
    """Build the parameter groups of DeMo, each with its factor on the learning rate as "share".

    `others_update` is the rule of the parameters that are not for muon.

    Examples:
        >>> [group["share"] for group in demo_groups(nn.Linear(3, 3), "muon")]
        [1.0, 0.2]
    """
    if not rule_of(update).whole:
        return [{"params": list(model.parameters()), "share": 1.0}]
    groups = demopt.muon_groups(model, lr=1.0, others_update=others_update)
    return [{"share": group.pop("lr"), **group} for group in groups]


def check_settings(config: TrainConfig) -> None:
    """Let the optimizer itself refuse bad hyper-parameters, before any worker starts."""
    single, vector = [nn.Parameter(torch.zeros(2, 2))], [nn.Parameter(torch.zeros(2))]
    try:
        if config.optimizer == "demo":
            demopt.DeMo(single, process_group=SingleRank(), **config.demo_settings())
            config.rule("adamw")  # of the parameters that are not for muon
        elif config.optimizer == "adamw":
            adamw(single, config)
        else:
            if config.momentum is not None and not 0 <= config.momentum < 1:
                raise InputError(f"--momentum is {config.momentum}, wanted at least 0 and less than 1")
            inner = _muon_and_adamw(single, vector, config)
            if config.optimizer == "local":
                _check_local(config)
                demopt.LocalDeMo(inner, process_group=SingleRank(), **config.local_settings())
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from None
    if config.optimizer == "demo" and config.overlap and config.clip:
        raise InputError(
            f"--overlap {config.overlap} sends gradients before --clip {config.clip} can limit them; add --clip 0, or "
            "use --delay 1, which allows clipping"
        )


def _check_local(config: TrainConfig) -> None:
    """Raise InputError for what LocalDeMo would refuse in the words of DeMo, or not at all."""
    if config.route == "owner":
        raise InputError(
            "--route owner carries signs alone, and --optimizer local sends movements; use gather or relay"
        )
