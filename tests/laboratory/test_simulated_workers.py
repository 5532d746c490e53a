"""Simulated workers end with the weights, momenta and bytes of real ranks, bit for bit; and of `demopt train`."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

import demopt
import ranks
from demopt.exchange import Meter, SingleRank
from laboratory.compare.methods import METHODS
from laboratory.simulation import experiment as simulation
from laboratory.simulation.demo import DeMoWorkers
from laboratory.simulation.experiment import Experiment
from laboratory.simulation.local_demo import LocalDeMoWorkers
from laboratory.simulation.workers import SimulatedWorkers, all_gather_bytes
from laboratory.training import TrainConfig, build, load_corpus

LR = 1e-2
Tensors = list[torch.Tensor]


def network() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))


def compute_gradients(model: Any, step: int, rank: int, bad: bool) -> None:
    """Worker `rank`'s, of its own data; with `bad` one of rank 1 is not finite in step 2."""
    model.zero_grad()
    inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + rank))
    model(inputs).square().mean().backward()
    if bad and (step, rank) == (2, 1):
        model[0].bias.grad[0] = float("nan")


def compute_local_gradients(model: Any, step: int, rank: int, bad: bool) -> None:
    """As `compute_gradients`; with `bad` also a weight of rank 1 is not finite, in step 4."""
    compute_gradients(model, step, rank, bad)
    if bad and (step, rank) == (4, 1):
        model[0].bias.data[0] = float("inf")


def weights_of(model: torch.nn.Module) -> Tensors:
    return [parameter.detach().clone() for parameter in model.parameters()]


# DeMo

DEMO = {"chunk": 16, "top_k": 12, "momentum_decay": 0.9, "fingerprint_every": 3}
DEMO_CASES = {
    "gather": {"route": "gather"},
    "owner": {"route": "owner"},
    "adamw": {"route": "gather", "update": "adamw"},
    "floats": {"route": "gather", "values": "float32", "update": "nesterov", "reduction": "mean"},
}


def real_demo(rank: int, world_size: int, settings: dict[str, Any], bad: bool) -> tuple[Tensors, Tensors, list[Any]]:
    model = network()
    optimizer = demopt.DeMo(model.parameters(), lr=LR, **settings)
    traffic = []
    for step in range(7):
        compute_gradients(model, step, rank, bad)
        optimizer.step()
        traffic.append((optimizer.stats.sent_bytes, optimizer.stats.received_bytes, optimizer.stats.skipped))
    return weights_of(model), [optimizer.state[p]["momentum"].clone() for p in model.parameters()], traffic


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", DEMO_CASES)
@pytest.mark.parametrize("bad", [False, True], ids=["", "one skipped"])
def test_demo_has_the_bits_and_bytes_of_real_ranks(case: str, world_size: int, bad: bool) -> None:
    settings = DEMO | DEMO_CASES[case]
    model = network()
    workers = DeMoWorkers(SimulatedWorkers(model, world_size), **settings)
    traffic = []
    for step in range(7):
        workers.begin(LR)
        for rank in range(world_size):
            compute_gradients(workers.model_of(rank), step, rank, bad)
            workers.take(rank)
        cost = workers.finish()
        traffic.append((cost.sent_bytes, cost.received_bytes, workers.optimizers[-1].stats.skipped))
    workers.close()
    for rank, (weights, momenta, theirs) in enumerate(ranks.run(real_demo, world_size, settings, bad)):
        mine = [workers.optimizers[rank].state[p]["momentum"] for p in model.parameters()]
        assert all(map(torch.equal, weights_of(model), weights))
        assert all(map(torch.equal, mine, momenta))
        assert traffic == theirs
    assert any(skipped for _, _, skipped in traffic) == bad


# LocalDeMo

LOCAL = {"sync_every": 3, "chunk": 16, "top_k": 12, "fingerprint_every": 2}
LOCAL_CASES = {
    "gather": {"route": "gather"},
    "momentum": {"outer_momentum": 0.5, "values": "float32"},
    "delay": {"delay": 1},
    "delay, momentum": {"delay": 1, "outer_momentum": 0.5, "values": "2-bit"},
    "every step": {"sync_every": 1, "error_decay": 0.0},
}
LOCAL_STEPS = 8  # with H = 3: two rounds, and a last one after two steps


def inner(model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    found = demopt.muon_adamw(model, 1.0)
    for optimizer in found:
        for group in optimizer.param_groups:
            group["lr"] *= lr
    return found


def real_local(rank: int, world_size: int, settings: dict[str, Any], bad: bool) -> dict[str, Any]:
    model = network()
    optimizer = demopt.LocalDeMo(inner(model, LR), **settings)
    traffic, between = [], []
    for step in range(LOCAL_STEPS):
        compute_local_gradients(model, step, rank, bad)
        optimizer.step()
        costs = [optimizer.stats]
        if step == LOCAL_STEPS - 1:  # the last round: of the steps since the one before
            if optimizer.replicator.in_flight:
                optimizer.flush()
                costs.append(optimizer.stats)
            if optimizer.local_steps:
                optimizer.apply(optimizer.exchange(optimizer.extract()))
                costs.append(optimizer.stats)
        traffic.append((sum(cost.sent_bytes for cost in costs), sum(cost.received_bytes for cost in costs)))
        if step == 4:
            between = weights_of(model)
    with optimizer.shared():
        shared = weights_of(model)
    state = optimizer.state_dict()["state"]
    errors = [state[number]["error"].clone() for number in sorted(state)]
    return {"between": between, "local": weights_of(model), "global": shared, "errors": errors, "traffic": traffic}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("case", LOCAL_CASES)
@pytest.mark.parametrize("bad", [False, True], ids=["", "not finite"])
def test_local_demo_has_the_bits_and_bytes_of_real_ranks(case: str, world_size: int, bad: bool) -> None:
    settings = LOCAL | LOCAL_CASES[case]
    model = network()
    workers = LocalDeMoWorkers(SimulatedWorkers(model, world_size), lambda copy: inner(copy, 1.0), **settings)
    traffic, between = [], []
    for step in range(LOCAL_STEPS):
        workers.last = step == LOCAL_STEPS - 1
        workers.begin(LR)
        for rank in range(world_size):
            compute_local_gradients(workers.model_of(rank), step, rank, bad)
            workers.take(rank)
        cost = workers.finish()
        traffic.append((cost.sent_bytes, cost.received_bytes))
        if step == 4:
            between = [weights_of(workers.model_of(rank)) for rank in range(world_size)]
    workers.settle()
    states = [optimizer.state_dict()["state"] for optimizer in workers.optimizers]
    local = [weights_of(workers.model_of(rank)) for rank in range(world_size)]
    workers.close()
    for rank, theirs in enumerate(ranks.run(real_local, world_size, settings, bad)):
        errors = [states[rank][number]["error"] for number in sorted(states[rank])]
        mine = {"between": between[rank], "local": local[rank], "global": weights_of(model), "errors": errors}
        for name, tensors in mine.items():
            assert all(map(torch.equal, tensors, theirs[name])), name
        assert traffic == theirs["traffic"]
    assert all(bool(tensor.isfinite().all()) for tensor in weights_of(model))


# Beside `demopt train`

TRAIN = {"preset": "tiny", "layers": 1, "sequence": 32, "batch": 2, "warmup": 3, "eval_sequences": 6, "steps": 6}
OPTIMIZERS = {
    "adamw": ("adamw", {"weight_decay": 0.1}, {"lr": 1e-3}),
    "local": ("local", {"sync_every": 4, "top_k": 40, "momentum": 0.8, "others_share": 0.2}, {"lr": 1e-2}),
}
FLAGS = {"adamw": ["--weight-decay", "0.1"], "local": ["--sync-every", "4", "--top-k", "40", "--momentum", "0.8"]}


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_experiment_has_the_losses_of_demopt_train(optimizer: str, tmp_path: Path) -> None:
    text = Path(sysconfig.get_path("stdlib"), "calendar.py")
    method, settings, rate = OPTIMIZERS[optimizer]
    flags = [word for name, value in (TRAIN | rate).items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = ["--optimizer", optimizer, "--data", str(text), "--out", str(tmp_path / "run"), *flags, *FLAGS[optimizer]]
    words += ["--workers", "2", "--threads", "1", "--device", "cpu", "--clip", "1.0", "--eval-every", "6"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([sys.executable, "-m", "demopt.cli", "train", *words], check=True, env=environment, timeout=600)
    theirs = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    config = TrainConfig(
        **TRAIN, **rate, data=[str(text)], width=64, heads=2, mlp=192, vocab_size=256, optimizer=optimizer
    )
    workers = SimulatedWorkers(build(config), 2, clip=1.0)
    corpus = load_corpus(config)
    experiment = Experiment(config, corpus, METHODS[method](workers, **settings), torch.device("cpu"))
    results = [experiment.step(number) for number in range(1, TRAIN["steps"] + 1)]
    loss, _ = experiment.evaluate()
    experiment.method.close()
    assert [result.loss for result in results] == pytest.approx([row["loss"] for row in theirs], rel=1e-5)
    assert loss == pytest.approx(theirs[-1]["val_loss"], rel=1e-5)
    assert [result.cost.payload_bytes for result in results] == [row["payload_bytes"] for row in theirs]


@pytest.mark.parametrize(("apart", "letters"), [(True, [{97}, {98}]), (False, [{97, 98}] * 2)])
def test_workers_apart_read_parts_of_the_text_alone(
    apart: bool, letters: list[set[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("a" * 9_000 + "b" * 10_000)  # the last tenth is for validation
    config = TrainConfig(data=[str(tmp_path / "text.txt")], sequence=8, batch=64, lr=0.0)
    seen: list[Any] = []
    monkeypatch.setattr(simulation, "backward", lambda *given: seen.append(given[1]) or 1.0)
    method = METHODS["adamw"](SimulatedWorkers(torch.nn.Linear(2, 2), 2))
    experiment = simulation.Experiment(config, load_corpus(config), method, torch.device("cpu"), apart)
    method.workers.model(torch.ones(2)).sum().backward()
    experiment.step(1)
    assert [{*map(int, windows.flat)} for windows in seen] == letters


class _Ranks(SingleRank):
    """Some ranks, for counting alone."""

    world_size = 5


def test_byte_counts_are_those_of_a_meter() -> None:
    meter = Meter(_Ranks())
    meter.all_gather(torch.zeros(1003, dtype=torch.uint8))
    assert meter.sent_bytes == meter.received_bytes == all_gather_bytes(1003, 5)
