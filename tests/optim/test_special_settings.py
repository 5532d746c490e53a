"""Settings at which DeMo is an optimizer that everybody knows, and pairs of runs that must agree."""

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
    exchange: Exchange, settings: dict[str, Any], shuffle: tuple[int, ...] | None = None, scale: float = 1.0
) -> problems.History:
    """Four steps in float64; rank r draws the gradients of rank shuffle[r]."""
    parameters = problems.parameters(problems.FEW, torch.float64)
    optimizer = DeMo(parameters, **{**problems.SMALL, "values": "float64", **settings}, process_group=exchange)
    rank = exchange.rank if shuffle is None else shuffle[exchange.rank]

    def rescale(_: int) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(scale)

    return problems.train(optimizer, range(4), rank, before_step=rescale)


def _mean_gradients(step: int, world_size: int) -> list[Tensor]:
    shapes = list(enumerate(problems.FEW))
    return [
        torch.stack([problems.draw(shape, 9, step, r, i, dtype=torch.float64) for r in range(world_size)]).mean(0)
        for i, shape in shapes
    ]


@pytest.mark.parametrize("transform", ["dct", "hadamard", "random", "identity"])
@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.999])
@pytest.mark.parametrize("world_size", [1, 3])
def test_signum_with_all_coefficients_is_sign_sgd(world_size: int, momentum: float, transform: str) -> None:
    """The momentum empties each step, so its decay does not matter."""
    settings = {"top_k": EVERYTHING, "momentum": momentum, "transform": transform}
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


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("transform", ["dct", "random"])
def test_sgd_with_all_coefficients_is_plain_sgd(world_size: int, transform: str) -> None:
    settings = {
        "top_k": EVERYTHING,
        "momentum": 0.0,
        "update": "sgd",
        "reduction": "mean",
        "weight_decay": 0.1,
        "transform": transform,
    }
    histories = ranks.threads(_train, world_size, settings)
    expected = problems.parameters(problems.FEW, torch.float64)
    sgd = torch.optim.SGD(expected, lr=problems.SMALL["lr"])
    for step in range(4):
        with torch.no_grad():
            for parameter in expected:
                parameter.mul_(1 - problems.SMALL["lr"] * 0.1)
        for parameter, gradient in zip(expected, _mean_gradients(step, world_size), strict=True):
            parameter.grad = gradient
        sgd.step()
    for got, want in zip(histories[0].parameters, expected, strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12)


def test_dct_in_chunks_of_one_is_the_identity() -> None:
    ends = [ranks.threads(_train, 2, {"chunk": 1, "top_k": 1, "transform": name})[0] for name in ("dct", "identity")]
    for got, want in zip(ends[0].parameters, ends[1].parameters, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


# Pairs


@pytest.mark.parametrize("reduction", ["senders", "mean"])
@pytest.mark.parametrize("update", ["sgd", "signum"])
def test_demo_ignores_rank_order(update: str, reduction: str) -> None:
    settings = {"update": update, "reduction": reduction, "transform": "random"}
    runs = [ranks.threads(_train, 3, settings, order) for order in itertools.permutations(range(3))]
    for histories in runs[1:]:
        for got, want in zip(histories[0].parameters, runs[0][0].parameters, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    order = (2, 0, 1)
    moved = ranks.threads(_train, 3, settings, order)
    for rank, source in enumerate(order):
        assert problems.same(moved[rank].momenta, runs[0][source].momenta)


@pytest.mark.parametrize(
    "settings", [{}, {"values": "bfloat16", "transform": "random"}, {"weight_decay": 0.1}], ids=str
)
@pytest.mark.parametrize("scale", [2.0**-20, 2.0**10])
def test_signum_ignores_gradient_scale(scale: float, settings: dict[str, Any]) -> None:
    """Bit for bit, because the scale is a power of two."""
    plain, scaled = ranks.threads(_train, 2, settings), ranks.threads(_train, 2, settings, None, scale)
    for one, other in zip(plain, scaled, strict=True):
        assert one.fingerprints == other.fingerprints
        assert problems.same([scale * momentum for momentum in one.momenta], other.momenta)


@pytest.mark.parametrize("scale", [0.25, 8.0])
def test_sgd_step_scales_with_gradients(scale: float) -> None:
    settings = {"update": "sgd"}
    start = problems.parameters(problems.FEW, torch.float64)
    plain = ranks.threads(_train, 2, settings)[0]
    scaled = ranks.threads(_train, 2, {**settings, "lr": problems.SMALL["lr"] / scale}, None, scale)[0]
    for got, want, was in zip(scaled.parameters, plain.parameters, start, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert not torch.equal(got, was)


def _grouped(exchange: Exchange, cut: list[list[int]]) -> list[Tensor]:
    """Parameters and momenta, in the order of `problems.FEW`, where `cut` says which parameters share a group."""
    parameters = problems.parameters(problems.FEW)
    groups = [{"params": [parameters[number] for number in numbers]} for numbers in cut]
    optimizer = DeMo(groups, **problems.SMALL, weight_decay=0.1, process_group=exchange)
    for step in range(3):
        problems.set_gradients(parameters, step, exchange.rank)
        optimizer.step()
    return [p.detach() for p in parameters] + [optimizer.state[p]["momentum"] for p in parameters]


@pytest.mark.parametrize("cut", [[[0], [1], [2], [3]], [[0, 2], [1, 3]], [[3, 2, 1, 0]], [[1], [3, 0], [2]]], ids=str)
def test_param_groups_cut_and_order_do_not_matter(cut: list[list[int]]) -> None:
    whole, parts = ranks.threads(_grouped, 2, [[0, 1, 2, 3]]), ranks.threads(_grouped, 2, cut)
    assert all(problems.same(one, other) for one, other in zip(whole, parts, strict=True))


def test_parameter_update_ignores_other_parameters() -> None:
    whole = ranks.threads(_grouped, 2, [[0, 1, 2, 3]])[0]

    def alone(exchange: Exchange, number: int) -> Tensor:
        parameter = problems.parameters(problems.FEW)[number]
        optimizer = DeMo([parameter], **problems.SMALL, weight_decay=0.1, process_group=exchange)
        for step in range(3):
            parameter.grad = problems.draw(parameter.shape, 9, step, exchange.rank, number)
            optimizer.step()
        return parameter.detach()

    for number in range(4):
        assert torch.equal(ranks.threads(alone, 2, number)[0], whole[number])


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
