"""The optimizer step: DeMo on the plain model, or AdamW with DistributedDataParallel."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import demopt
from demopt.core.update import rule_of
from demopt.exchange.wrappers import all_reduce_bytes
from demopt.train.config import InputError, TrainConfig
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
    private: bool  # each rank has its own optimizer state
    parameters: int
    world_size: int
    shares: tuple[float, ...] = (1.0,)  # factor on the learning rate, per parameter group
    delayed: bool = False  # updates are applied one step late

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step."""
        for group, share in zip(self.optimizer.param_groups, self.shares, strict=True):
            group["lr"] = lr * share

    def quiet(self) -> AbstractContextManager[None]:
        """Return the context for all but the last backward pass of a step: gradients are not synchronised."""
        if isinstance(self.forward, DistributedDataParallel):
            return self.forward.no_sync()
        return self.optimizer.no_sync() if self.private else nullcontext()  # type: ignore[attr-defined]

    @property
    def route(self) -> str | None:
        """The route of the messages, and why it was chosen; None for DDP. Known after the first step."""
        return self.optimizer.stats.route if self.private else None  # type: ignore[attr-defined]

    def step(self, looked_at: bool) -> Cost:
        """Run the optimizer step and return its cost; with delay, the cost of the updates that it applied.

        `looked_at`: parameters are evaluated or saved as a model next, so no update may stay in flight.
        """
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
        return Cost(optimizer.stats.payload_bytes, sent, received, compute, seconds["exchange"])


def make_method(config: TrainConfig, model: nn.Module, team: Team) -> Method:
    """Build the configured optimizer for a model that is already on its device."""
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    forward: Any = torch.compile(model) if config.compile else model
    if config.optimizer == "demo":
        assert config.update is not None
        groups = demo_groups(model, config.update, config.rule("adamw"))
        shares = tuple(group.pop("share") for group in groups)
        demo = demopt.DeMo(groups, **config.demo_settings())
        return Method(forward, demo, True, count, team.world_size, shares, config.delay == 1)
    devices = [team.device.index] if team.device.type == "cuda" else None
    optimizer = _adamw(model.parameters(), config)
    return Method(DistributedDataParallel(forward, device_ids=devices), optimizer, False, count, team.world_size)


def _adamw(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
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

    Example:
        >>> [group["share"] for group in demo_groups(nn.Linear(3, 3), "muon")]
        [1.0, 0.2]
    """
    if not rule_of(update).whole:
        return [{"params": list(model.parameters()), "share": 1.0}]
    groups = demopt.muon_groups(model, lr=1.0, others_update=others_update)
    return [{"share": group.pop("lr"), **group} for group in groups]


def check_settings(config: TrainConfig) -> None:
    """Let the optimizer itself refuse bad hyper-parameters, before any worker starts."""
    from demopt.exchange import SingleRank

    single = [nn.Parameter(torch.zeros(2, 2))]
    try:
        if config.optimizer == "demo":
            demopt.DeMo(single, process_group=SingleRank(), **config.demo_settings())
            config.rule("adamw")  # of the parameters that are not for muon
        else:
            _adamw(single, config)
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from None
    if config.optimizer == "demo" and config.overlap and config.clip:
        raise InputError(
            f"--overlap {config.overlap} sends gradients before --clip {config.clip} can limit them; add --clip 0, or "
            "use --delay 1, which allows clipping"
        )
