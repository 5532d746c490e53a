"""Settings at which DeMo is a well-known optimizer, and pairs of runs that must agree."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import problems
import ranks
from demopt import DeMo
from demopt.exchange import Exchange

EVERYTHING = problems.SMALL["chunk"] ** 2  # a top_k that keeps all coefficients


def _train(
    exchange: Exchange, settings: dict[str, Any], order: tuple[int, ...] | None = None, scale: float = 1.0
) -> problems.History:
    """Four steps in float64; rank r draws the gradients of rank order[r]."""
    parameters = problems.parameters(problems.FEW, torch.float64)
    optimizer = DeMo(parameters, **{**problems.SMALL, "values": "float64", **settings}, process_group=exchange)
    rank = exchange.rank if order is None else order[exchange.rank]

    def rescale(_: int) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(scale)

    return problems.train(optimizer, range(4), rank, before_step=rescale)


def _mean_gradients(step: int, world_size: int) -> list[Tensor]:
    return [
        torch.stack([problems.draw(shape, 9, step, r, i, dtype=torch.float64) for r in range(world_size)]).mean(0)
        for i, shape in enumerate(problems.FEW)
    ]


@pytest.mark.parametrize(
    ("transform", "momentum_decay", "world_size"), [("dct", 0.9, 3), ("hadamard", 0.999, 1), ("identity", 0.0, 3)]
)
def test_signum_with_all_coefficients_is_sign_sgd(transform: str, momentum_decay: float, world_size: int) -> None:
    """The momentum empties at each step, so its decay does not matter."""
    settings = {"top_k": EVERYTHING, "momentum_decay": momentum_decay, "transform": transform}
    histories = ranks.threads(_train, world_size, settings)
    problems.assert_replicas(histories)
    expected = [p.detach().clone() for p in problems.parameters(problems.FEW, torch.float64)]
    for step in range(4):
        for parameter, gradient in zip(expected, _mean_gradients(step, world_size), strict=True):
            parameter -= problems.SMALL["lr"] * gradient.sign()
    for got, want in zip(histories[0].parameters, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for history in histories:
        assert all(float(momentum.abs().max()) < 1e-15 for momentum in history.momenta)


def test_sgd_with_all_coefficients_is_plain_sgd() -> None:
    settings = {"top_k": EVERYTHING, "momentum_decay": 0.0, "update": "sgd", "reduction": "mean", "weight_decay": 0.1}
    histories = ranks.threads(_train, 3, {**settings, "transform": "random"})
    expected = problems.parameters(problems.FEW, torch.float64)
    sgd = torch.optim.SGD(expected, lr=problems.SMALL["lr"])
    for step in range(4):
        with torch.no_grad():
            for parameter in expected:
                parameter.mul_(1 - problems.SMALL["lr"] * 0.1)
        for parameter, gradient in zip(expected, _mean_gradients(step, 3), strict=True):
            parameter.grad = gradient
        sgd.step()
    for got, want in zip(histories[0].parameters, expected, strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("update", ["sgd", "signum"])
def test_update_ignores_the_order_of_ranks(update: str) -> None:
    settings = {"update": update, "transform": "random"}
    runs = {order: ranks.threads(_train, 3, settings, order) for order in itertools.permutations(range(3))}
    plain = runs[0, 1, 2]
    for order, histories in runs.items():
        for got, want in zip(histories[0].parameters, plain[0].parameters, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
        for rank, source in enumerate(order):
            assert problems.same(histories[rank].momenta, plain[source].momenta)


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**10])
def test_signum_ignores_gradient_scale(scale: float) -> None:
    """Bit for bit, because the scale is a power of two."""
    plain, scaled = ranks.threads(_train, 2, {}), ranks.threads(_train, 2, {}, None, scale)
    for one, other in zip(plain, scaled, strict=True):
        assert one.fingerprints == other.fingerprints
        assert problems.same([scale * momentum for momentum in one.momenta], other.momenta)


def _grouped(exchange: Exchange, cut: list[list[int]]) -> list[Tensor]:
    """Parameters and momenta, in the order of `problems.FEW`; `cut` lists the parameters of each group."""
    parameters = problems.parameters(problems.FEW)
    groups = [{"params": [parameters[number] for number in numbers]} for numbers in cut]
    optimizer = DeMo(groups, **problems.SMALL, weight_decay=0.1, process_group=exchange)
    for step in range(3):
        problems.set_gradients(parameters, step, exchange.rank)
        optimizer.step()
    return [p.detach() for p in parameters] + [optimizer.state[p]["momentum"] for p in parameters]


@pytest.mark.parametrize("cut", [[[0], [1], [2], [3]], [[3, 2, 1, 0]], [[1], [3, 0], [2]]], ids=str)
def test_cut_and_order_of_parameter_groups_do_not_matter(cut: list[list[int]]) -> None:
    whole, parts = ranks.threads(_grouped, 2, [[0, 1, 2, 3]]), ranks.threads(_grouped, 2, cut)
    assert all(problems.same(one, other) for one, other in zip(whole, parts, strict=True))


def test_dct_update_of_a_transpose_is_transposed() -> None:
    """The two-dimensional DCT of a transposed chunk is the transposed DCT."""
    ends = []
    for turned in (False, True):
        values = problems.draw((32, 19), 1, dtype=torch.float64)
        parameter = torch.nn.Parameter(values.T.contiguous() if turned else values)
        optimizer = DeMo([parameter], **problems.SMALL, values="float64")
        for step in range(3):
            gradient = problems.draw((32, 19), 2, step, dtype=torch.float64)
            parameter.grad = gradient.T.contiguous() if turned else gradient
            optimizer.step()
        ends.append(parameter.detach().T if turned else parameter.detach())
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)
