"""The train study: forward, backward and step of a real model on real tokens, every method in every round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from demopt.bench import against, clock
from demopt.bench.config import BenchConfig, keywords
from demopt.bench.methods import against_name, demo_settings
from demopt.bench.samples import Samples, traffic_figures
from demopt.bench.traffic import counted
from demopt.core.update import rule_of
from demopt.optim.demo import DeMo
from demopt.optim.groups import muon_groups
from demopt.train.config import TrainConfig
from demopt.train.data import Corpus, batch
from demopt.train.evaluate import loss_sum, precision
from demopt.train.model import DEFAULTS, build, count_parameters
from demopt.train.team import Team

LR = 1e-3  # for every update rule: only time is measured
DDP, POWERSGD = "AdamW-DDP", "PowerSGD-DDP"
# DDP rebuilds its buckets in its second step; PowerSGD compresses from the third on; the fourth is counted.
POWERSGD_START, SETTLED = 2, 4


@dataclass(frozen=True)
class Trainee:
    """A model and its optimizer."""

    forward: nn.Module
    optimizer: Optimizer


def measure_training(config: BenchConfig, train: TrainConfig, corpus: Corpus, team: Team) -> dict[str, Any]:
    """Run the study on this rank. Seconds are each round's slowest rank's; other figures are this rank's own."""
    makers = _makers(config, team)
    trainees = {name: make(build(train).to(team.device)) for name, make in makers.items()}
    rounds = {name: Samples(name) for name in trainees}
    names = list(trainees)
    for turn in range(-SETTLED, config.warmup + config.rounds):
        for place in clock.turn_order(len(names), max(turn, 0)):
            trainee, samples = trainees[names[place]], rounds[names[place]]
            windows = batch(corpus.train, train, turn + SETTLED, team.rank)
            work = partial(_one_step, trainee, windows, train, team)
            if turn == -1:
                with counted(team.world_size) as traffic:
                    work()
                samples.figures |= traffic_figures(traffic, trainee.optimizer)
                continue
            team.barrier()
            seconds = clock.seconds(work, team.device)
            if turn >= config.warmup:
                samples.add(seconds, trainee.optimizer)
    return {
        "parameters": count_parameters(trainees[DDP].forward),
        "tokens_per_step": train.batch * (train.sequence or 0) * team.world_size,
        "methods": [samples.together(team) for samples in rounds.values()],
    }


def _makers(config: BenchConfig, team: Team) -> dict[str, Callable[[nn.Module], Trainee]]:
    """Return, by method, a function that builds its optimizer (and wrapper) around a model."""
    makers: dict[str, Callable[[nn.Module], Trainee]]
    makers = {
        name: partial(_with_demo, {"lr": LR, **own}) for name, own in demo_settings(config, team.world_size).items()
    }
    makers[DDP] = lambda model: _with_ddp(model, team)
    makers[POWERSGD] = lambda model: _with_powersgd(_with_ddp(model, team), config.powersgd_rank)
    if config.against:
        arguments = keywords(config.against_args, "--against-args")
        makers[against_name(config)] = lambda model: Trainee(
            model, against.make(config.against, model.parameters(), LR, arguments)
        )
    return makers


def _with_demo(settings: dict[str, Any], model: nn.Module) -> Trainee:
    muon = rule_of(settings.get("update", "signum")).whole
    return Trainee(model, DeMo(muon_groups(model, settings["lr"]) if muon else model.parameters(), **settings))


def _with_ddp(model: nn.Module, team: Team) -> Trainee:
    devices = [team.device.index] if team.device.type == "cuda" else None
    optimizer = AdamW(model.parameters(), lr=DEFAULTS["adamw"]["lr"], fused=True)
    return Trainee(DistributedDataParallel(model, device_ids=devices), optimizer)


def _with_powersgd(trainee: Trainee, rank: int) -> Trainee:
    state = powersgd.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_START)
    trainee.forward.register_comm_hook(state, powersgd.powerSGD_hook)  # type: ignore[operator]  # DDP has it
    return trainee


def _one_step(trainee: Trainee, windows: Any, train: TrainConfig, team: Team) -> None:
    trainee.optimizer.zero_grad()
    with precision(train, team.device):
        loss = loss_sum(trainee.forward, windows, team.device) / windows[:, 1:].size
    loss.backward()
    trainee.optimizer.step()
