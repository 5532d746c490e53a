"""Each method's step against its paper, for one matrix and three workers; simulated workers against real ranks."""

import functools
import json
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import demopt
import forked
import problems
import ranks
from laboratory.compare.methods import METHODS
from laboratory.compare.methods.averaged import MAKERS, muon_maker
from laboratory.compare.methods.muloco import MuLoCo, quantise
from laboratory.compare.studies import STUDIES, Entry
from laboratory.network import steps
from laboratory.simulation.demo import DeMoWorkers, LocalDeMoWorkers
from laboratory.simulation.experiment import Experiment
from laboratory.simulation.workers import Rates, SimulatedWorkers, all_gather_bytes, all_reduce_bytes
from laboratory.training import TrainConfig, build, load_corpus

P, W, RATE = 96, 3, 0.1
close = torch.testing.assert_close


def layer():
    """A 12 x 8 matrix of ones as the only parameter of a model."""
    found = torch.nn.Linear(8, 12, bias=False)
    torch.nn.init.ones_(found.weight)
    return found


GRADIENTS = [[problems.draw((12, 8), step, worker) for worker in range(W)] for step in range(2)]


def start(make, clip=0.0, **settings):
    model = layer()
    return model, make(SimulatedWorkers(model, W, clip), **settings)


def walk(method, given, lr=RATE):
    method.begin(lr)
    for rank, gradient in enumerate(given):
        method.model_of(rank).weight.grad = gradient.clone()
        method.take(rank)
    cost = method.finish()
    method.prepare_evaluation()
    return cost


def quantised(tensor):
    places, means = quantise(tensor)
    return means[places].view_as(tensor)


@pytest.mark.parametrize("name", MAKERS)
def test_averaged_methods_equal_torch_on_the_mean_gradient(name):
    matrix, method = start(METHODS[name])
    twin, other = start(METHODS[name])
    rates = Rates(other.optimizers)
    for given in GRADIENTS:
        cost = walk(method, given)
        rates.set(RATE)
        twin.weight.grad = torch.stack(given).mean(0)
        for optimizer in other.optimizers:
            optimizer.step()
    close(matrix.weight, twin.weight)
    assert (cost.payload_bytes, cost.sent_bytes) == (4 * P, all_reduce_bytes(4 * P, W))


STEP = {"outer_lr": 0.7, "outer_momentum": 0.6}


def test_muloco_steps_on_the_mean_pseudo_gradient_in_2_bits():
    matrix, method = start(MuLoCo, every=2, **STEP)
    whole = []  # each worker's pseudo-gradient of two local steps
    for two in zip(*GRADIENTS, strict=True):
        model = layer()
        (muon,) = optimizers = muon_maker(0.95)(model)
        Rates(optimizers).set(RATE)
        for gradient in two:
            model.weight.grad = gradient.clone()
            muon.step()
        whole.append(1 - model.weight.detach())
    sent = [quantised(each) for each in whole]
    mean = torch.stack(sent).mean(0)
    assert walk(method, GRADIENTS[0]).sent_bytes == 0
    close(matrix.weight.data, torch.ones(12, 8))  # between rounds the global weights are those of the last one
    cost = walk(method, GRADIENTS[1])
    close(matrix.weight.data, 1 - 0.7 * (mean + 0.6 * mean))
    for rank, moved, quantised_move in zip(method.optimizers, whole, sent, strict=True):
        assert torch.equal(rank.local[0], matrix.weight)
        close(rank.errors[0], moved - quantised_move)
        assert len(quantised_move.unique()) <= 4
    method.close()
    assert (cost.payload_bytes, cost.received_bytes) == (P // 4 + 20, all_gather_bytes(P // 4 + 20, W))


@ranks.each(W)
def test_muloco_of_the_race_on_links_gives_the_weights_of_the_simulated_one(rank):
    settings, model = {"every": 2, **STEP}, layer()
    raced = steps.make(Entry("", "muloco", {"momentum": 0.95, **settings}, 0.0), model, None)
    Rates(raced.optimizers[0].inner).set(RATE)
    matrix, method = start(MuLoCo, **settings)
    for given in 2 * GRADIENTS:
        walk(method, given)
        model.weight.grad = given[rank].clone()
        raced.optimizers[0].step()
    method.close()
    close(model.weight, matrix.weight)


@pytest.mark.parametrize("name", steps.ENTRIES)
@ranks.each(1)
def test_every_entry_of_the_race_on_links_trains_on_a_rank(name):
    model = network()
    method, before = steps.make(steps.ENTRIES[name], model, None), bits_of(model)
    method.step(lambda forward: forward(torch.ones(2, 24)).square().mean().backward(), clip=1.0)
    assert bits_of(model) != before


def test_the_quantiser_takes_means_of_four_intervals_one_and_a_half_deviations_wide():
    values = torch.tensor([-3.0, -1.0, -0.2, 0.0, 0.1, 1.1, 3.0])
    place = ((values - values.mean()) / (1.5 * values.std()) + 2).round().clamp(0, 3)
    expected = torch.stack([values[place == one].mean() for one in place])
    close(quantised(values), expected)
    close(quantised(torch.full((5,), 2.0)), torch.full((5,), 2.0))


@pytest.mark.parametrize("name", METHODS)
def test_clip_limits_every_method(name):
    """Where workers do not clip, the method does: a gradient a million times as large makes no large step."""
    matrix, method = start(METHODS[name], clip=1.0, **({"every": 1} if name == "muloco" else {}))
    huge = [1e6 * gradient for gradient in GRADIENTS[0]]
    if method.clips_workers:
        huge = [gradient / gradient.norm() for gradient in huge]
    walk(method, huge)
    method.close()
    assert matrix.weight.data.isfinite().all()
    assert (matrix.weight.data - 1).abs().max() < 3 * RATE


@pytest.mark.parametrize("study", STUDIES)
def test_study_entries_have_names_of_their_own_and_can_all_be_made(study):
    entries = STUDIES[study].entries
    assert len({entry.name for entry in entries}) == len(entries)
    for entry in entries:
        METHODS[entry.method](SimulatedWorkers(torch.nn.Linear(16, 16), 1), **entry.settings).close()


LR, STEPS = 1e-2, 8  # with H = 3: two rounds, and a last one after two steps
DEMO = {"chunk": 16, "top_k": 12, "momentum_decay": 0.9, "fingerprint_every": 3}
LOCAL = {"sync_every": 3, "chunk": 16, "top_k": 12, "fingerprint_every": 2}
INNER = functools.partial(demopt.muon_adamw, lr=1.0)  # the method sets its rates
CASES = {
    "DeMo": DEMO,
    "DeMo, adamw": {**DEMO, "update": "adamw"},
    "DeMo, floats": {**DEMO, "values": "float32", "update": "nesterov", "reduction": "mean"},
    "LocalDeMo, gather": {**LOCAL, "route": "gather"},
    "LocalDeMo, momentum": {**LOCAL, "outer_momentum": 0.5, "values": "float32"},
    "LocalDeMo, delay": {**LOCAL, "delay": 1},
    "LocalDeMo, delay, momentum": {**LOCAL, "delay": 1, "outer_momentum": 0.5, "values": "2-bit"},
    "LocalDeMo, every step": {**LOCAL, "sync_every": 1, "error_decay": 0.0},
}


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))


def compute_gradients(model, step, rank):
    """From the rank's own data."""
    model.zero_grad()
    inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + rank))
    model(inputs).square().mean().backward()


def bits_of(model):
    return problems.bits(model.parameters())


def on_a_rank(rank, world_size, case):
    model, local = network(), case.startswith("LocalDeMo")
    if local:
        optimizer = demopt.LocalDeMo(demopt.muon_adamw(model, LR), **CASES[case])
    else:
        optimizer = demopt.DeMo(model.parameters(), lr=LR, **CASES[case])
    found = {"traffic": []}
    for step in range(STEPS):
        compute_gradients(model, step, rank)
        optimizer.step()
        costs = [optimizer.stats]
        if local and step == STEPS - 1:  # the last round: of the steps since the one before
            if optimizer.replicator.in_flight:
                optimizer.flush()
                costs.append(optimizer.stats)
            if optimizer.local_steps:
                optimizer.apply(optimizer.exchange(optimizer.extract()))
                costs.append(optimizer.stats)
        sent, received = (sum(getattr(cost, name) for cost in costs) for name in ("sent_bytes", "received_bytes"))
        found["traffic"].append((sent, received))
        if step == 4:
            found["between"] = bits_of(model)
    found |= {"local": bits_of(model), "memories": problems.bits(problems.momenta(optimizer))}
    with optimizer.shared() if local else nullcontext():
        return found | {"global": bits_of(model)}


def simulated(world_size, case):
    workers, local = SimulatedWorkers(network(), world_size), case.startswith("LocalDeMo")
    method = LocalDeMoWorkers(workers, INNER, **CASES[case]) if local else DeMoWorkers(workers, **CASES[case])
    traffic = []
    found = [{"traffic": traffic} for _ in range(world_size)]
    for step in range(STEPS):
        method.last = step == STEPS - 1
        method.begin(LR)
        for rank in range(world_size):
            compute_gradients(method.model_of(rank), step, rank)
            method.take(rank)
        cost = method.finish()
        traffic.append((cost.sent_bytes, cost.received_bytes))
        if step == 4:
            for rank, of_rank in enumerate(found):
                of_rank["between"] = bits_of(method.model_of(rank))
    method.prepare_evaluation()
    assert all(bool(parameter.isfinite().all()) for parameter in workers.model.parameters())
    for rank, of_rank in enumerate(found):
        memories = problems.bits(problems.momenta(method.optimizers[rank]))
        of_rank |= {"local": bits_of(method.model_of(rank)), "memories": memories, "global": bits_of(workers.model)}
    method.close()
    return found


@pytest.mark.parametrize(
    ("case", "world_size"),
    [(case, size) for case in CASES for size in ((1, 3) if case.startswith("LocalDeMo") else (2, 4))],
)
def test_simulated_workers_have_the_bits_and_bytes_of_real_ranks(case, world_size):
    assert simulated(world_size, case) == ranks.run(on_a_rank, world_size, case)


TRAIN = {"preset": "tiny", "layers": 1, "sequence": 32, "batch": 2, "warmup": 3, "eval_sequences": 6, "steps": 6}
OPTIMIZERS = {
    "adamw": ("adamw", {"weight_decay": 0.1}, {"lr": 1e-3}),
    "local": ("local", {"sync_every": 4, "top_k": 40, "momentum": 0.8, "beta2": 0.99}, {"lr": 1e-2}),
}
FLAGS = {"adamw": ["--weight-decay", "0.1"], "local": ["--sync-every", "4", "--top-k", "40", "--momentum", "0.8"]}


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_experiment_has_the_losses_of_demopt_train(optimizer, tmp_path):
    text = Path(sysconfig.get_path("stdlib"), "calendar.py")
    method, settings, rate = OPTIMIZERS[optimizer]
    flags = [word for name, value in (TRAIN | rate).items() for word in (f"--{name.replace('_', '-')}", value)]
    words = ["--optimizer", optimizer, "--data", text, "--out", tmp_path / "run", *flags, *FLAGS[optimizer]]
    words += ["--workers", "2", "--threads", "1", "--device", "cpu", "--clip", "1.0", "--eval-every", "6"]
    forked.demopt("train", *words)
    theirs = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    config = TrainConfig(
        **TRAIN, **rate, data=[str(text)], width=64, heads=2, mlp=192, vocab_size=256, optimizer=optimizer
    )
    workers = SimulatedWorkers(build(config), 2, clip=1.0)
    corpus = load_corpus(config)
    experiment = Experiment(config, corpus, METHODS[method](workers, **settings), torch.device("cpu"))
    results = [experiment.step(number) for number in range(1, TRAIN["steps"] + 1)]
    val_loss, _ = experiment.evaluate()
    experiment.method.close()
    assert [loss for loss, _ in results] == pytest.approx([row["loss"] for row in theirs], rel=1e-5)
    assert val_loss == pytest.approx(theirs[-1]["val_loss"], rel=1e-5)
    assert [cost.payload_bytes for _, cost in results] == [row["payload_bytes"] for row in theirs]
