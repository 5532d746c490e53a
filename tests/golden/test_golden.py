"""The published algorithm's own histories (README.md beside this file), reproduced sign by sign."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import demopt
import oracle
import ranks
from oracles.reference import reference_step, zero_momentum

FOLDER = Path(__file__).parent
TENSORS = ("matrix", "wide", "vector", "short")
CASES: dict[str, dict[str, Any]] = {
    "default": {"momentum_decay": 0.999, "top_k": 32, "chunk": 64, "weight_decay": 0.0},
    "schedule": {"momentum_decay": 0.99, "top_k": 8, "chunk": 64, "weight_decay": 0.0},
    "decay": {"momentum_decay": 0.9, "top_k": 4, "chunk": 32, "weight_decay": 0.1},
    "k1": {"momentum_decay": 0.999, "top_k": 1, "chunk": 64, "weight_decay": 0.0},
}
WORLD_SIZES = {"decay": (1, 2), "default": (1, 2, 4), "k1": (1,), "schedule": (1, 2, 4)}
FILES = [(case, world_size) for case, sizes in WORLD_SIZES.items() for world_size in sizes]
EVERY_FILE = pytest.mark.parametrize(
    ("case", "world_size"), FILES, ids=[f"{case}_w{world_size}" for case, world_size in FILES]
)


@dataclass(frozen=True)
class Ran:
    """What one rank did: the sign of each step's movement, then its end."""

    signs: dict[str, Tensor]  # int8 [steps, shape]
    parameters: dict[str, Tensor]
    momenta: dict[str, Tensor]  # dense, in the parameter's domain
    kept: list[int]
    fingerprints: list[int]


def load(case: str, world_size: int) -> dict[str, Tensor]:
    with numpy.load(FOLDER / f"v1_{case}_w{world_size}.npz") as file:
        return {name: torch.from_numpy(file[name].copy()) for name in file.files}


def settings(case: str) -> dict[str, Any]:
    """V1 in float64."""
    return {**demopt.V1, **CASES[case], "values": "float64"}


def reproduce(rank: int, world_size: int, case: str) -> Ran:
    """One rank's part of a golden history; the sign of an update is read off the parameters' movement."""
    golden = load(case, world_size)
    parameters = {name: Parameter(golden[f"init.{name}"].double()) for name in TENSORS}
    optimizer = demopt.DeMo(parameters.values(), lr=1.0, **settings(case))
    signs: dict[str, list[Tensor]] = {name: [] for name in TENSORS}
    kept, fingerprints = [], []
    for step, lr in enumerate(golden["lr"].tolist()):
        optimizer.param_groups[0]["lr"] = lr
        before = {name: p.detach() * (1 - lr * CASES[case]["weight_decay"]) for name, p in parameters.items()}
        for name, parameter in parameters.items():
            parameter.grad = golden[f"grad.{name}"][rank, step].double()
        optimizer.step()
        for name, parameter in parameters.items():
            signs[name].append(((before[name] - parameter.detach()) / lr).round().to(torch.int8))
        kept.append(optimizer.stats.kept)
        fingerprints.append(optimizer.fingerprint())
    return Ran(
        {name: torch.stack(of_steps) for name, of_steps in signs.items()},
        {name: parameter.detach() for name, parameter in parameters.items()},
        {
            name: oracle.dense(optimizer.state[p]["momentum"], p, optimizer.param_groups[0])
            for name, p in parameters.items()
        },
        kept,
        fingerprints,
    )


def assert_momentum(momentum: Tensor, golden: dict[str, Tensor], name: str, rank: int) -> None:
    """To float32's precision at the size that momenta have: the files were rounded before the last feedback."""
    want = golden[f"momentum_final.{name}"][rank].double()
    size = max(float(golden[f"momentum_final.{other}"].abs().max()) for other in TENSORS)
    bound = torch.finfo(torch.float32).eps * size
    torch.testing.assert_close(momentum.reshape(want.shape), want, rtol=0, atol=bound)


@dataclass(frozen=True)
class History:
    """What the oracle did: its end, the sign of each aggregate U, and where U is zero in exact arithmetic."""

    parameters: list[Tensor]
    momenta: list[list[Tensor]]
    signs: dict[str, Tensor]  # [steps, shape]
    zeros: dict[str, Tensor]  # bool [steps, shape]


@functools.cache
def oracle_history(case: str, world_size: int) -> History:
    """Where U is zero in exact arithmetic, a computed sign is that of the rounding error of one machine's cosines.

    With K = 1 an element of U is a product of two cosines, some of which are zero; sums of more coefficients never are.
    """
    golden = load(case, world_size)
    parameters = [golden[f"init.{name}"].double() for name in TENSORS]
    group = settings(case) | {"maximize": False}
    momenta = [[zero_momentum(x, group) for x in parameters] for _ in range(world_size)]
    aggregates: list[list[Tensor]] = []
    for step, lr in enumerate(golden["lr"].tolist()):
        gradients = [[golden[f"grad.{name}"][rank, step].double() for name in TENSORS] for rank in range(world_size)]
        parameters, momenta, U, _ = reference_step(parameters, gradients, momenta, {**group, "lr": lr})
        aggregates.append(U)
    of_steps = {name: [U[number] for U in aggregates] for number, name in enumerate(TENSORS)}
    return History(
        parameters,
        momenta,
        {name: torch.stack([U.sign() for U in steps]) for name, steps in of_steps.items()},
        {name: torch.stack([U.abs() <= 1e-12 * U.abs().max() for U in steps]) for name, steps in of_steps.items()},
    )


def assert_reproduced(
    golden: dict[str, Tensor], signs: dict[str, Tensor], parameters: dict[str, Tensor], zeros: dict[str, Tensor]
) -> None:
    """Every sign, and every parameter that has not moved by a sign of rounding errors."""
    for name in TENSORS:
        assert int(((signs[name] != golden[f"update_sign.{name}"]) & ~zeros[name]).sum()) == 0
        settled = ~zeros[name].any(0)
        final = golden[f"param_final.{name}"]
        torch.testing.assert_close(parameters[name][settled], final[settled], rtol=0, atol=1e-12)


@EVERY_FILE
def test_demo_reproduces_golden_history(case: str, world_size: int) -> None:
    golden, zeros = load(case, world_size), oracle_history(case, world_size).zeros
    results = [reproduce(0, 1, case)] if world_size == 1 else ranks.run(reproduce, world_size, case)
    for rank, ran in enumerate(results):
        assert_reproduced(golden, ran.signs, ran.parameters, zeros)
        assert ran.fingerprints == results[0].fingerprints
        assert [16 * kept for kept in ran.kept] == golden["bytes_sent"].tolist()
        for name in TENSORS:
            assert_momentum(ran.momenta[name], golden, name, rank)


@EVERY_FILE
def test_oracle_reproduces_golden_history(case: str, world_size: int) -> None:
    golden, history = load(case, world_size), oracle_history(case, world_size)
    assert_reproduced(golden, history.signs, dict(zip(TENSORS, history.parameters, strict=True)), history.zeros)
    for number, name in enumerate(TENSORS):
        for rank in range(world_size):
            assert_momentum(history.momenta[rank][number], golden, name, rank)


@EVERY_FILE
def test_golden_files_are_all_tested_and_k1_alone_has_exact_zeros_and_few(case: str, world_size: int) -> None:
    zeros = torch.cat([of_steps.flatten() for of_steps in oracle_history(case, world_size).zeros.values()])
    assert bool(zeros.any()) == (case == "k1")
    assert float(zeros.double().mean()) < 0.02
    assert {path.stem for path in FOLDER.glob("*.npz")} == {f"v1_{case}_w{world_size}" for case, world_size in FILES}
