"""A NaN or Inf gradient on one rank: all ranks skip together, none is poisoned; the same with GradScaler."""

from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import problems
import ranks
from demopt import DeMo

BAD = [float("nan"), float("inf"), float("-inf")]


def _with_bad_gradients(rank: int, world_size: int, bad_ranks: set[int], bad_step: int, bad: float) -> dict[str, Any]:
    parameters = problems.parameters(problems.FEW, torch.float64)
    optimizer = DeMo(parameters, **problems.SMALL, values="float64", weight_decay=0.1)
    seen: dict[str, Any] = {"skipped": [], "fingerprints": [optimizer.fingerprint()], "lengths": []}
    for step in range(4):
        problems.set_gradients(parameters, step, rank)
        if step == bad_step and rank in bad_ranks:
            gradient = parameters[1].grad
            assert gradient is not None
            gradient[3, 4] = bad
            seen["momenta before"] = problems.momenta(optimizer)
        optimizer.step()
        if step == bad_step:
            seen["momenta after"] = problems.momenta(optimizer)
            seen["dense after"] = [
                oracle.dense(m, p, optimizer.param_groups[0])
                for m, p in zip(problems.momenta(optimizer), parameters, strict=True)
            ]
        seen["skipped"].append(optimizer.stats.skipped)
        seen["fingerprints"].append(optimizer.fingerprint())
        seen["lengths"].append(optimizer.stats.payload_bytes)
    seen["history"] = problems.History(
        seen["fingerprints"][1:], [p.detach() for p in parameters], problems.momenta(optimizer)
    )
    return seen


def _gradients(step: int, world_size: int) -> list[list[Tensor]]:
    shapes = list(enumerate(problems.FEW))
    return [
        [problems.draw(shape, 9, step, r, i, dtype=torch.float64) for i, shape in shapes] for r in range(world_size)
    ]


PATTERNS = [({2}, 0, BAD[0]), ({0, 1}, 2, BAD[1]), ({0, 1, 2}, 0, BAD[2])]


@pytest.mark.parametrize(("bad_ranks", "bad_step", "bad"), PATTERNS, ids=str)
def test_nonfinite_gradient_skips_on_all_ranks(bad_ranks: set[int], bad_step: int, bad: float) -> None:
    results = ranks.run(_with_bad_gradients, 3, bad_ranks, bad_step, bad)
    problems.assert_replicas([seen["history"] for seen in results])
    settings = DeMo(problems.parameters(problems.FEW), **problems.SMALL).param_groups[0]
    for rank, seen in enumerate(results):
        assert seen["skipped"] == [step == bad_step for step in range(4)]
        assert seen["fingerprints"][bad_step] == seen["fingerprints"][bad_step + 1], "no parameter changes"
        assert len(set(seen["lengths"])) == 1
        assert all(bool(torch.isfinite(momentum).all()) for momentum in seen["history"].momenta)
        assert all(bool(torch.isfinite(parameter).all()) for parameter in seen["history"].parameters)
        if rank in bad_ranks:
            assert problems.same(seen["momenta before"], seen["momenta after"])
        elif bad_step == 0:
            for got, gradient in zip(seen["dense after"], _gradients(0, 3)[rank], strict=True):
                rows = gradient.reshape(gradient.shape or (1, 1)) if gradient.dim() != 1 else gradient[None]
                want = torch.zeros_like(got)
                want[: rows.shape[0], : rows.shape[1]] = (1 - settings["momentum_decay"]) * rows
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_skipped_round_loses_only_the_bad_gradient() -> None:
    """As an oracle in which the other ranks accumulate in the skipped round."""
    results = ranks.run(_with_bad_gradients, 3, {1}, 2, float("nan"))
    parameters = problems.parameters(problems.FEW, torch.float64)
    optimizer = DeMo(parameters, **problems.SMALL, values="float64", weight_decay=0.1)
    truth = oracle.Oracle(optimizer.param_groups, 3)
    for step in range(4):
        gradients = _gradients(step, 3)
        if step != 2:
            truth.step(gradients)
            continue
        decay = problems.SMALL["momentum_decay"]
        for rank in (0, 2):
            for number, gradient in enumerate(gradients[rank]):
                momentum = truth.momenta[rank][number]
                rows = gradient.reshape(gradient.shape if gradient.dim() == 2 else (1, -1))
                momentum.mul_(decay)
                momentum[: rows.shape[0], : rows.shape[1]] += (1 - decay) * rows
    for rank, seen in enumerate(results):
        for number, parameter in enumerate(seen["history"].parameters):
            torch.testing.assert_close(parameter, truth.parameters[number], rtol=1e-10, atol=1e-10)
            got = oracle.dense(seen["history"].momenta[number], parameters[number], optimizer.param_groups[0])
            torch.testing.assert_close(got, truth.momenta[rank][number], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bad", BAD)
def test_nonfinite_gradient_skips_on_a_single_rank(bad: float) -> None:
    seen = _with_bad_gradients(0, 1, {0}, 1, bad)
    assert seen["skipped"] == [False, True, False, False]
    assert problems.same(seen["momenta before"], seen["momenta after"])


def test_nonfinite_gradient_of_frozen_parameter_is_ignored() -> None:
    parameters = problems.parameters(problems.FEW)
    optimizer = DeMo(parameters, **problems.SMALL)
    problems.set_gradients(parameters, 0)
    assert parameters[0].grad is not None
    parameters[0].grad.fill_(float("nan"))
    parameters[0].requires_grad_(False)
    optimizer.step()
    assert not optimizer.stats.skipped


@pytest.mark.parametrize("values", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [3.4e38, 3e37])
def test_overflowing_finite_gradients_poison_nothing(values: str, size: float) -> None:
    """The transform adds up a chunk, and bfloat16 rounds up: both can make Inf of finite gradients."""
    parameter = problems.parameters([(16, 16)])[0]
    optimizer = DeMo([parameter], lr=0.1, chunk=16, top_k=24, momentum_decay=0.0, values=values)
    before = parameter.detach().clone()
    parameter.grad = torch.full_like(parameter, size)
    optimizer.step()
    assert optimizer.stats.skipped or bool(torch.isfinite(parameter).all())
    assert not optimizer.stats.skipped or torch.equal(parameter, before)
    assert bool(torch.isfinite(optimizer.state[parameter]["momentum"]).all())
    problems.train(optimizer, range(2))
    assert not optimizer.stats.skipped
    assert bool(torch.isfinite(parameter).all())


# GradScaler


def _scaled(
    rank: int, world_size: int, mode: str, dtype: torch.dtype, bad_step: int | None
) -> tuple[problems.History, list[bool], list[float]]:
    parameters = problems.parameters(problems.FEW, dtype)
    optimizer = DeMo(parameters, **problems.SMALL)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=mode != "off")
    fingerprints, skipped, scales = [], [], []
    for step in range(5):
        optimizer.zero_grad()
        products = [
            (p * problems.draw(p.shape, 9, step, rank, i, dtype=p.dtype)).sum() for i, p in enumerate(parameters)
        ]
        scaler.scale(torch.stack(products).sum()).backward()
        if step == bad_step and rank == 1 and parameters[1].grad is not None:
            parameters[1].grad[0, 0] = float("inf")
        if mode == "unscale first":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 1e9)
        scaler.step(optimizer)
        scaler.update()
        fingerprints.append(optimizer.fingerprint())
        skipped.append(optimizer.stats.skipped)
        scales.append(scaler.get_scale())
    history = problems.History(fingerprints, [p.detach() for p in parameters], problems.momenta(optimizer))
    return history, skipped, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grad_scaler_unscales_exactly(dtype: torch.dtype) -> None:
    """Also while the scales grow."""
    runs = {mode: ranks.run(_scaled, 2, mode, dtype, None) for mode in ("off", "on", "unscale first")}
    for mode, results in runs.items():
        problems.assert_replicas([history for history, _, _ in results])
        for (history, skipped, scales), (plain, _, _) in zip(results, runs["off"], strict=True):
            assert not any(skipped)
            assert (len(set(scales)) > 1) == (mode != "off"), "the scale grows"
            for got, want in zip(history.parameters, plain.parameters, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            for got, want in zip(history.momenta, plain.momenta, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["on", "unscale first"])
def test_grad_scaler_skips_on_all_ranks(mode: str) -> None:
    """GradScaler calls step also on the rank that overflowed; otherwise the others would wait for it."""
    results = ranks.run(_scaled, 2, mode, torch.float32, 2)
    problems.assert_replicas([history for history, _, _ in results])
    for history, skipped, _ in results:
        assert skipped == [False, False, True, False, False]
        assert history.fingerprints[1] == history.fingerprints[2]
        assert all(bool(torch.isfinite(momentum).all()) for momentum in history.momenta)
    assert results[1][2][2] < results[0][2][2], "ranks may have different scales"
