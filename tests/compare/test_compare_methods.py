"""Each method's step against what its paper writes down, spelled out for one matrix and three workers."""

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import demopt
import ranks
from demopt.compare.catalogue import METHODS
from demopt.compare.methods.galore import GaLore
from demopt.compare.methods.local import diloco, local_sgd
from demopt.compare.methods.powersgd import PowerSGD
from demopt.compare.methods.sparse import DGC, RandomK
from demopt.exchange.wrappers import all_reduce_bytes
from demopt.simulate.method import Fleet, set_rate

P, W, LR = 96, 3, 0.1
close = torch.testing.assert_close


def ones():
    return torch.ones(12, 8)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_averaged_methods_equal_torch_on_mean_gradient(name, matrix, fleet, gradients, walk):
    twin = torch.nn.Linear(8, 12, bias=False)
    torch.nn.init.ones_(twin.weight)
    optimizers = METHODS[name].make(Fleet(twin, W))._optimizers
    method = METHODS[name].make(fleet)
    for given in gradients:
        cost = walk(method, given, LR)
        set_rate(optimizers, LR)
        twin.weight.grad = torch.stack(given).mean(0)
        for optimizer in optimizers:
            optimizer.step()
    close(matrix.weight, twin.weight)
    assert (cost.payload_bytes, cost.sent_bytes) == (4 * P, all_reduce_bytes(4 * P, W))


def test_local_sgd_averages_diverged_weights(matrix, fleet, gradients, walk):
    method = local_sgd(fleet, every=2, momentum=0.5)
    assert walk(method, gradients[0], LR).sent_bytes == 0
    close(matrix.weight.data, ones())  # what would be delivered is what was last agreed on
    cost = walk(method, gradients[1], LR)
    apart = [ones() - LR * g - LR * (0.5 * g + h) for g, h in zip(*gradients, strict=True)]
    close(matrix.weight.data, torch.stack(apart).mean(0))
    assert (cost.payload_bytes, cost.received_bytes) == (4 * P, all_reduce_bytes(4 * P, W))
    assert all(torch.equal(weights[0], method.shared[0]) for weights in method.weights)


def test_diloco_uses_mean_drift_as_nesterov_gradient(matrix, fleet, gradients, walk):
    method = diloco(fleet, every=1, outer_lr=0.7, outer_momentum=0.9, weight_decay=0.0)
    walk(method, gradients[0], LR)
    drift = torch.stack([LR * g.sign() for g in gradients[0]]).mean(0)  # Adam's first step is its rate
    close(matrix.weight.data, ones() - 0.7 * (drift + 0.9 * drift), atol=1e-5, rtol=1e-5)


def test_dgc_sends_the_largest_accumulated_values(matrix, fleet, gradients, walk):
    method = DGC(fleet, density=5 / P, momentum=0.9)
    weight, u, v = ones().flatten(), [torch.zeros(P) for _ in range(W)], [torch.zeros(P) for _ in range(W)]
    for given in gradients:
        cost = walk(method, given, LR)
        for rank, gradient in enumerate(given):
            u[rank] = 0.9 * u[rank] + gradient.flatten()
            v[rank] = v[rank] + u[rank]
            for position in sorted(range(P), key=lambda j, r=rank: -abs(v[r][j].item()))[:5]:
                weight[position] -= LR / W * v[rank][position]
                u[rank][position] = v[rank][position] = 0
    close(matrix.weight.data.flatten(), weight)
    assert (cost.payload_bytes, cost.sent_bytes, cost.received_bytes) == (5 * 8, 2 * 5 * 8, 2 * 5 * 8)


def test_random_k_sends_the_same_positions_on_all_ranks(matrix, fleet, gradients, walk):
    method = RandomK(fleet, density=5 / P, momentum=0.0)
    cost = walk(method, gradients[0], LR)
    changed = (matrix.weight.data - 1).flatten().nonzero().flatten()
    assert len(changed) == 5
    close(matrix.weight.data.flatten()[changed], 1 - LR * torch.stack(gradients[0]).mean(0).flatten()[changed])
    before = set(changed.tolist())
    walk(method, gradients[1], LR)
    assert set((matrix.weight.data - 1).flatten().nonzero().flatten().tolist()) != before
    assert (cost.payload_bytes, cost.sent_bytes) == (5 * 4, all_reduce_bytes(5 * 4, W))


def test_galore_runs_adam_on_the_projection(matrix, fleet, gradients, walk):
    method = GaLore(fleet, rank=2, gap=2, scale=0.5, weight_decay=0.0)
    dense = walk(method, gradients[0], LR)
    mean = torch.stack(gradients[0]).mean(0).T  # the shorter side first
    basis = torch.linalg.svd(mean).U[:, :2]
    close(matrix.weight.data, ones() - 0.5 * LR * (basis @ (basis.T @ mean).sign()).T, atol=1e-5, rtol=1e-5)
    small = walk(method, gradients[1], LR)
    assert (dense.payload_bytes, small.payload_bytes) == (4 * P, 4 * 2 * 12)
    close(method.bases[0].abs(), basis.abs())  # kept until the next refresh


def hooked(rank, world_size, given):
    """torch's PowerSGD on real ranks: the decoded gradient of each step. It takes two plain steps first."""
    layer = torch.nn.Linear(32, 48, bias=False)
    model = DistributedDataParallel(layer)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=3, start_powerSGD_iter=2, random_seed=5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    decoded = []
    for step in given:
        model.zero_grad()
        model(torch.eye(32)).backward(step[rank].T)  # so that the gradient is what is given
        decoded.append(layer.weight.grad.clone())
    return decoded[2:]


def test_powersgd_equals_torch_hook():
    random = torch.Generator().manual_seed(0)
    given = [[torch.randn(48, 32, generator=random) for _ in range(2)] for _ in range(5)]
    theirs = ranks.run(hooked, 2, given)[0]
    layer = torch.nn.Linear(32, 48, bias=False)
    method = PowerSGD(Fleet(layer, 2), rank=3)
    seed = np.random.RandomState(5).randint(1_000_000_000)
    method.factors[0] = torch.randn(1, 32, 3, generator=torch.Generator().manual_seed(seed))[0]
    for step, decoded in zip(given[2:], theirs, strict=True):
        for rank, gradient in enumerate(step):
            layer.weight.grad = gradient.clone()
            method.take(rank)
        cost = method.finish()
        close(layer.weight.grad, decoded, atol=1e-4, rtol=1e-4)
    assert cost.payload_bytes == 4 * 3 * (32 + 48)


def test_powersgd_sends_incompressible_gradients_dense(matrix, fleet, gradients, walk):
    method = PowerSGD(fleet, rank=4)
    cost = walk(method, gradients[0], LR)
    assert not method.matrices
    close(matrix.weight.grad, torch.stack(gradients[0]).mean(0))
    assert cost.payload_bytes == 4 * P


@pytest.mark.parametrize("name", METHODS)
def test_clip_limits_every_method(name, matrix, gradients, walk):
    """Where workers do not clip, the method does: a gradient a million times as large changes nothing more."""
    settings = {"version": "v2"} if name == "published" else {}
    method = METHODS[name].make(Fleet(matrix, W, clip=1.0), **settings)
    huge = [1e6 * gradient for gradient in gradients[0]]
    if method.clips_workers:
        huge = [gradient / gradient.norm() for gradient in huge]
    walk(method, huge, LR)
    method.close()
    assert matrix.weight.data.isfinite().all()
    assert (matrix.weight.data - 1).abs().max() < 3 * LR


RATES = [0.5, 0.25, 0.125]


def _late(exchange, given):
    weight = torch.nn.Parameter(ones())
    optimizer = demopt.DeMo([weight], process_group=exchange, delay=1)
    for lr, gradient in zip(RATES, given, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = gradient[exchange.rank].clone()
        optimizer.step()
    optimizer.flush()
    return weight.detach()


def test_demo_delayed_equals_real_ranks_and_counts_once(matrix, gradients):
    given = [*gradients, gradients[0]]
    late, sent = METHODS["demo-delayed"].make(Fleet(matrix, W)), []
    for lr, step in zip(RATES, given, strict=True):
        late.begin(lr)
        for rank, gradient in enumerate(step):
            matrix.weight.grad = gradient.clone()
            late.take(rank)
        sent.append(late.finish().sent_bytes)
    late.settle()
    late.settle()  # nothing is left
    assert all(torch.equal(matrix.weight, weight) for weight in ranks.threads(_late, W, given))
    assert sent == [0, 2 * sent[2], sent[2]]
    late.close()
