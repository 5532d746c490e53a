"""Simulated workers end with the parameters of real ones, bit for bit, whatever the route."""

import pytest
import torch

import demopt
import ranks
from demopt.simulate.demo import DeMoWorkers
from demopt.simulate.method import Fleet

STEPS = 7
ROUTES = {
    "gather": {"route": "gather"},
    "owner": {"route": "owner"},
    "relay": {"route": "relay", "relay_top_k": 6},
    "adamw": {"route": "gather", "update": "adamw"},
    "nesterov": {"route": "relay", "update": "nesterov"},
    "floats": {"route": "relay", "values": "float32", "update": "sgd", "reduction": "mean"},
}
BASE = {"lr": 1e-2, "chunk": 16, "top_k": 12, "momentum": 0.9, "fingerprint_every": 3}


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))


def gradients(model, step, rank, bad):
    """Worker `rank`'s, of its own data; with `bad` one of rank 1 is not finite in step 3, which all then skip."""
    model.zero_grad()
    inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + rank))
    model(inputs).square().mean().backward()
    if bad and (step, rank) == (3, 1):
        model[0].bias.grad[0] = float("nan")


def real(rank, world_size, settings, bad):
    model = network()
    optimizer = demopt.DeMo(model.parameters(), **settings)
    traffic = []
    for step in range(STEPS):
        gradients(model, step, rank, bad)
        optimizer.step()
        traffic.append((optimizer.stats.sent_bytes, optimizer.stats.received_bytes, optimizer.stats.skipped))
    momenta = [optimizer.state[p]["momentum"].clone() for p in model.parameters()]
    return [p.detach() for p in model.parameters()], momenta, traffic


def simulated(world_size, settings, bad):
    model = network()
    workers = DeMoWorkers(Fleet(model, world_size), **settings)
    traffic = []
    for step in range(STEPS):
        workers.begin(settings["lr"])
        for rank in range(world_size):
            gradients(model, step, rank, bad)
            workers.take(rank)
        cost = workers.finish()
        traffic.append((cost.sent_bytes, cost.received_bytes, workers.optimizers[-1].stats.skipped))
    workers.close()
    momenta = [[opt.state[p]["momentum"] for p in model.parameters()] for opt in workers.optimizers]
    return [p.detach() for p in model.parameters()], momenta, traffic


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("bad", [False, True], ids=["", "one skipped"])
def test_simulate_equals_real_ranks_bit_for_bit(route, world_size, bad):
    settings = BASE | ROUTES[route]
    theirs = ranks.run(real, world_size, settings, bad)
    parameters, momenta, traffic = simulated(world_size, settings, bad)
    for rank, (their_parameters, their_momenta, their_traffic) in enumerate(theirs):
        assert all(map(torch.equal, parameters, their_parameters))
        assert all(map(torch.equal, momenta[rank], their_momenta))
        assert traffic == their_traffic
    assert any(skipped for _, _, skipped in traffic) == bad
