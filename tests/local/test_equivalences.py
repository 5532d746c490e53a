"""LocalDeMo equals each published method under its named settings, and the round of `oracles` under all settings."""

import copy
import functools

import pytest
import torch
from torch import Tensor

import demopt
import oracle
import problems
import ranks
from demopt import DeMo, LocalDeMo
from demopt.optim.muon import BatchedMuon
from oracles.reference import local_round, zero_momentum

W, H, ROUNDS = 3, 4, 3
SHAPES = [(32, 16), (17, 19), (20,)]
CHUNK = 16
#: All coefficients with all their bits, and no error: the dense mean of the pseudo-gradients.
DENSE = {
    "top_k": CHUNK * CHUNK, "chunk": CHUNK, "transform": "identity", "values": "float64", "reduction": "mean",
    "error_decay": 0.0,
}  # fmt: skip

_sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
_muon = functools.partial(BatchedMuon, lr=0.02, weight_decay=0.1, momentum=0.9)


def _with_demopt(exchange, inner, shapes, every, settings):
    """The global weights and this rank's errors after each round."""
    parameters = problems.parameters(shapes, dtype=torch.float64)
    optimizer = LocalDeMo(inner(parameters), sync_every=every, process_group=exchange, **settings)
    group, found = optimizer.replicator.groups[0], []
    for number in range(ROUNDS):
        history = problems.train(optimizer, range(number * every, (number + 1) * every), exchange.rank)
        errors = [oracle.dense(error, p, group) for error, p in zip(history.momenta, parameters, strict=True)]
        found.append((history.parameters, errors))
    return found


class Published:
    """The ranks of a published method: local steps from common weights; a rule for the next common weights."""

    def __init__(self, inner, shapes):
        self.weights = problems.parameters(shapes, dtype=torch.float64)
        self.local = [copy.deepcopy(self.weights) for _ in range(W)]
        self.inner = [inner(parameters) for parameters in self.local]
        self.step = 0

    def local_steps(self, every):
        for _ in range(every):
            for rank, parameters in enumerate(self.local):
                problems.set_gradients(parameters, self.step, rank)
                self.inner[rank].step()
            self.step += 1

    def pseudo_gradients(self):
        """[P][W]: the common weights minus those of each rank."""
        return [[weight.detach() - own[n].detach() for own in self.local] for n, weight in enumerate(self.weights)]

    def distribute(self):
        """Gives all ranks the common weights; returns a copy of them."""
        with torch.no_grad():
            for parameters in self.local:
                torch._foreach_copy_(parameters, self.weights)
        return [weight.detach().clone() for weight in self.weights]


def _assert_equal(expected, inner, settings, every=H, shapes=SHAPES):
    moved = expected[-1][0] - problems.parameters(shapes, dtype=torch.float64)[0].detach()
    assert moved.abs().max() > 0.01
    for rounds in ranks.threads(_with_demopt, W, inner, shapes, every, settings):
        torch.testing.assert_close([got for got, _ in rounds], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("inner", "shapes", "outer_lr", "outer_momentum"),
    [
        pytest.param(_sgd, SHAPES, 1.0, 0.0, id="local SGD"),
        pytest.param(problems.ADAMW, SHAPES, 0.7, 0.9, id="DiLoCo"),
        pytest.param(_muon, SHAPES[:2], 0.7, 0.6, id="MuLoCo", marks=problems.NEEDS_MUON),
    ],
)
def test_local_demo_with_an_outer_momentum_is(inner, shapes, outer_lr, outer_momentum):
    """arXiv 2311.08105, algorithm 1 (AdamW inside), 2505.23725 (Muon inside): Nesterov on the mean pseudo-gradient."""
    published, expected = Published(inner, shapes), []
    outer = torch.optim.SGD(published.weights, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
    for _ in range(ROUNDS):
        published.local_steps(H)
        for weight, moved in zip(published.weights, published.pseudo_gradients(), strict=True):
            weight.grad = torch.stack(moved).mean(0)
        outer.step()
        expected.append(published.distribute())
    _assert_equal(expected, inner, {**DENSE, "outer_lr": outer_lr, "outer_momentum": outer_momentum}, shapes=shapes)


@pytest.mark.parametrize("reduction", ["mean", "senders"])
def test_local_demo_with_top_k_and_a_decaying_error_is_sparseloco(reduction):
    """arXiv 2508.15706, algorithm 1 without its quantiser; "mean" as in the paper, "senders" as in its code."""
    b, a, K, shapes = 0.95, 0.8, 24, [(32, 16)]  # 2 chunks of 16 x 16
    published, expected = Published(problems.ADAMW, shapes), []
    errors_WCn = torch.zeros(W, 2, CHUNK * CHUNK, dtype=torch.float64)
    for _ in range(ROUNDS):
        published.local_steps(H)
        (moved,) = published.pseudo_gradients()
        errors_WCn = b * errors_WCn + torch.stack(moved).view(W, 2, CHUNK * CHUNK)
        kept = torch.zeros_like(errors_WCn).scatter_(2, errors_WCn.abs().topk(K).indices, 1.0)
        divisor = W if reduction == "mean" else kept.sum(0).clamp(min=1)
        with torch.no_grad():
            published.weights[0].sub_(((kept * errors_WCn).sum(0) / divisor).view(32, 16), alpha=a)
        errors_WCn *= 1 - kept
        expected.append(published.distribute())
    settings = {**DENSE, "top_k": K, "error_decay": b, "outer_lr": a, "reduction": reduction}
    _assert_equal(expected, problems.ADAMW, settings, shapes=shapes)


def test_local_demo_around_sgd_with_a_round_per_step_is_demo_v1_without_its_sign():
    """The error is then version 1's momentum, which takes gradients times the learning rate."""
    shapes = [(32, 16), (48, 32)]  # whole chunks: version 1 cuts and counts others differently
    lr, codec = 0.05, {"top_k": 24, "chunk": CHUNK, "values": "float64"}
    v1 = {**demopt.V1, **codec, "momentum_decay": 0.9, "update": "sgd"}

    def run(exchange):
        # The codec's learning rate is 1 in LocalDeMo: version 1 multiplies by it twice, once on each side of the wire.
        optimizer = DeMo(problems.parameters(shapes, dtype=torch.float64), lr=lr, process_group=exchange, **v1)
        return [problems.train(optimizer, [step], exchange.rank).parameters for step in range(ROUNDS)]

    settings = {**codec, "transform": "dct", "reduction": "senders", "error_decay": 0.9, "outer_lr": lr}
    inner = functools.partial(torch.optim.SGD, lr=lr)
    _assert_equal(ranks.threads(run, W)[0], inner, settings, every=1, shapes=shapes)


SIGNS_OF_ALL = {"top_k": 256, "values": "sign", "reduction": "mean", "error_decay": 1.0}
ROUND = {"error_decay": 0.5, "outer_lr": 0.9, "top_k": 24, "transform": "dct", "reduction": "senders"}


@pytest.mark.parametrize(
    "changed", [{}, {"reduction": "mean"}, {"error_decay": 0.0}, {"values": "2-bit"}, SIGNS_OF_ALL], ids=str
)
@torch.no_grad()
def test_local_demo_equals_the_literal_round(changed):
    settings = {**DENSE, **ROUND, **changed}
    published, expected = Published(_sgd, SHAPES), []
    errors = [[zero_momentum(x, {**settings, "chunking": "padded"}) for x in published.weights] for _ in range(W)]
    for _ in range(ROUNDS):
        published.local_steps(H)
        local = [[*map(Tensor.detach, each)] for each in published.local]
        weights, errors = local_round([*map(Tensor.detach, published.weights)], local, errors, settings)
        torch._foreach_copy_(published.weights, weights)
        expected.append((published.distribute(), errors))
    for rank, rounds in enumerate(ranks.threads(_with_demopt, W, _sgd, SHAPES, H, settings)):
        for (parameters, of_rank), (weights, all_errors) in zip(rounds, expected, strict=True):
            for got, want in zip(parameters + of_rank, weights + all_errors[rank], strict=True):
                torch.testing.assert_close(got.reshape(want.shape), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("delay", [0, 1])
def test_one_rank_that_keeps_everything_equals_its_inner_optimizer(delay):
    alone, wrapped = (problems.parameters(SHAPES, dtype=torch.float64) for _ in range(2))
    inner = problems.ADAMW(alone)
    everything = {"top_k": 256, "chunk": CHUNK, "values": "float64", "error_decay": 0.0}
    optimizer = LocalDeMo(problems.ADAMW(wrapped), sync_every=2, delay=delay, **everything)
    for step in range(6):
        for parameters, each in ((alone, inner), (wrapped, optimizer)):
            problems.set_gradients(parameters, step)
            each.step()
    optimizer.flush()
    torch.testing.assert_close(wrapped, alone, rtol=0, atol=1e-12)


def test_error_of_signs_of_all_stays_below_one_pseudo_gradient():
    """Over 200 rounds of gradients that are noise around a slope: it is not forgotten, and must not grow."""
    (parameter,) = problems.parameters([(32, 48)])
    optimizer = LocalDeMo(torch.optim.SGD([parameter], lr=1.0), sync_every=1, chunk=CHUNK)
    slope, norms = 0.3 * problems.draw(parameter.shape, 0), []
    for step in range(200):
        parameter.grad = slope + problems.draw(parameter.shape, 1, step)
        optimizer.step()
        norms.append(float(optimizer.state[parameter]["error"].norm() / parameter.grad.norm()))
    assert 0.5 < max(norms) < 1
