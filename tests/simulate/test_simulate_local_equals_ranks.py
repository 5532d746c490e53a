"""Simulated local steps end with the weights of real ranks, bit for bit: shared ones, own ones and errors."""

import pytest
import torch

import demopt
import ranks
from demopt.simulate.local import LocalWorkers
from demopt.simulate.method import Fleet

STEPS = 8  # with H = 3: two rounds, and a last one after two steps
CASES = {
    "gather": {"route": "gather"},
    "relay": {"route": "relay", "relay_top_k": 6},
    "momentum": {"outer_momentum": 0.5, "values": "float32"},
    "delay": {"delay": 1},
    "delay, momentum": {"delay": 1, "outer_momentum": 0.5, "values": "2-bit"},
    "every step": {"sync_every": 1, "error_decay": 0.0},
}
BASE = {"sync_every": 3, "chunk": 16, "top_k": 12, "fingerprint_every": 2}
LR = 1e-2


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))


def inner(parameters, lr):
    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(others, lr=0.2 * lr)]


def gradients(model, step, rank, bad):
    """Worker `rank`'s, of its own data; with `bad` one of rank 1 is not finite in step 2, and its movement in 4."""
    model.zero_grad()
    inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + rank))
    model(inputs).square().mean().backward()
    if bad and (step, rank) == (2, 1):
        model[0].bias.grad[0] = float("nan")
    if bad and (step, rank) == (4, 1):
        model[0].bias.data[0] = float("inf")


def bring_in(optimizer):
    """The last round: of the steps since the one before."""
    sent, received = 0, 0
    before = optimizer.stats
    optimizer.flush()
    if optimizer.stats is not before:
        sent, received = optimizer.stats.sent_bytes, optimizer.stats.received_bytes
    if optimizer.local_steps:
        optimizer.apply(optimizer.exchange(optimizer.extract()))
        sent, received = sent + optimizer.stats.sent_bytes, received + optimizer.stats.received_bytes
    return sent, received


def real(rank, world_size, settings, bad):
    model = network()
    optimizer = demopt.LocalDeMo(inner(list(model.parameters()), LR), **settings)
    traffic = []
    for step in range(STEPS):
        gradients(model, step, rank, bad)
        optimizer.step()
        sent, received = optimizer.stats.sent_bytes, optimizer.stats.received_bytes
        if step == STEPS - 1:
            more = bring_in(optimizer)
            sent, received = sent + more[0], received + more[1]
        traffic.append((sent, received))
        own = [p.detach().clone() for p in model.parameters()]
        if step == 4:
            between = own
    with optimizer.shared():
        shared = [p.detach().clone() for p in model.parameters()]
    state = optimizer.state_dict()["state"]
    errors = [state[number]["error"].clone() for number in sorted(state)]
    return between, own, shared, errors, traffic


def simulated(world_size, settings, bad):
    model = network()
    workers = LocalWorkers(Fleet(model, world_size), lambda parameters: inner(parameters, 1.0), **settings)
    traffic, between = [], []
    for step in range(STEPS):
        workers.last = step == STEPS - 1
        workers.begin(LR)
        for rank in range(world_size):
            workers.enter(rank)
            gradients(model, step, rank, bad)
            workers.take(rank)
        cost = workers.finish()
        traffic.append((cost.sent_bytes, cost.received_bytes))
        own = []
        for rank in range(world_size):
            workers.enter(rank)
            own.append([p.detach().clone() for p in model.parameters()])
        if step == 4:
            between = own
    workers.settle()
    shared = [p.detach().clone() for p in model.parameters()]
    states = [optimizer.state_dict()["state"] for optimizer in workers.optimizers]
    errors = [[state[number]["error"].clone() for number in sorted(state)] for state in states]
    workers.close()
    return between, own, shared, errors, traffic


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bad", [False, True], ids=["", "not finite"])
def test_own_and_shared_weights_errors_and_bytes_are_those_of_real_ranks(case, world_size, bad):
    settings = BASE | CASES[case]
    theirs = ranks.run(real, world_size, settings, bad)
    between, own, shared, errors, traffic = simulated(world_size, settings, bad)
    for rank, real_rank in enumerate(theirs):
        assert all(map(torch.equal, between[rank], real_rank[0]))
        assert all(map(torch.equal, own[rank], real_rank[1]))
        assert all(map(torch.equal, shared, real_rank[2]))
        assert all(map(torch.equal, errors[rank], real_rank[3]))
        assert traffic == real_rank[4]
    assert all(tensor.isfinite().all() for tensor in shared)
