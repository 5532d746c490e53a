"""Replicas stay equal bit for bit over many steps, however parameters are grouped; drift is noticed."""

from typing import Any

import pytest
import torch
from torch import Tensor

import problems
import ranks
from demopt import DeMo, DriftError
from demopt.exchange import Exchange

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _long_run(rank: int, world_size: int, steps: int, settings: dict[str, Any]) -> problems.History:
    parameters = problems.parameters(problems.FEW) + problems.parameters([(17, 19), (20,)], torch.bfloat16, seed=1)
    optimizer = DeMo(parameters, **{**problems.SMALL, **settings})
    return problems.train(optimizer, range(steps), rank)


@pytest.mark.parametrize(
    ("steps", "settings"),
    [
        (200, {"weight_decay": 0.1}),
        (40, {"values": "float32", "transform": "random"}),
        (40, {"values": "float32", "update": "sgd", "alpha": 0.2, "reduction": "mean", "lr": 1.0}),
    ],
    ids=["defaults", "float32 signum", "float32 sgd"],
)
def test_replicas_of_four_ranks_stay_equal(steps: int, settings: dict[str, Any]) -> None:
    histories = ranks.run(_long_run, 4, steps, settings, seconds=120.0)
    problems.assert_replicas(histories)
    assert len(set(histories[0].fingerprints)) == steps
    assert not problems.same(histories[0].momenta, histories[1].momenta)
    for history in histories:
        assert all(bool(torch.isfinite(parameter).all()) for parameter in history.parameters)


def _drifts(rank: int, world_size: int) -> tuple[int, str]:
    """One weight of rank 1 changes after the third step; ranks compare every fifth."""
    parameters = problems.parameters(problems.FEW)
    optimizer = DeMo(parameters, **problems.SMALL, fingerprint_every=5)
    for step in range(20):
        if (rank, step) == (1, 3):
            with torch.no_grad():
                parameters[1][2, 2] += 1e-6
        try:
            problems.train(optimizer, [step], rank)
        except DriftError as error:
            return step, str(error)
    return -1, "nothing"


def test_fingerprint_every_notices_drift_at_next_check() -> None:
    for step, says in ranks.run(_drifts, 2):
        assert step == 5
        assert "rank 1" in says


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprint_depends_on_every_element_and_their_order_not_on_strides(dtype: torch.dtype) -> None:
    parameters = problems.parameters(problems.FEW, dtype)
    optimizer = DeMo(parameters, **problems.SMALL)
    seen = {optimizer.fingerprint()}
    for parameter in parameters:
        flat = parameter.data.view(-1)
        for place in {0, flat.numel() // 2, flat.numel() - 1}:
            was = flat[place].clone()
            flat[place] = was + 1
            seen.add(optimizer.fingerprint())
            flat[place] = was
    assert len(seen) == 1 + sum(len({0, p.numel() // 2, p.numel() - 1}) for p in parameters)
    flat = parameters[1].data.view(-1)
    flat[[0, 1]] = flat[[1, 0]]
    assert optimizer.fingerprint() not in seen
    flat[[0, 1]] = flat[[1, 0]]
    assert optimizer.fingerprint() in seen
    plain = problems.parameters([(6, 5, 3, 3)])[0]
    strided = torch.nn.Parameter(plain.detach().clone().to(memory_format=torch.channels_last))
    assert DeMo([plain]).fingerprint() == DeMo([strided]).fingerprint()
