"""The published algorithm's own histories (README.md beside this file), reproduced bit by bit of every sign."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

import demopt
import oracle
import ranks
from demopt.optim.reference import reference_step, zero_momentum

FOLDER = Path(__file__).parent
TENSORS = ("matrix", "wide", "vector", "short")
CASES: dict[str, dict[str, Any]] = {
    "default": {"momentum": 0.999, "top_k": 32, "chunk": 64, "weight_decay": 0.0},
    "schedule": {"momentum": 0.99, "top_k": 8, "chunk": 64, "weight_decay": 0.0},
    "decay": {"momentum": 0.9, "top_k": 4, "chunk": 32, "weight_decay": 0.1},
    "k1": {"momentum": 0.999, "top_k": 1, "chunk": 64, "weight_decay": 0.0},
}
FILES = [
    ("decay", 1),
    ("decay", 2),
    ("default", 1),
    ("default", 2),
    ("default", 4),
    ("k1", 1),
    ("schedule", 1),
    ("schedule", 2),
    ("schedule", 4),
]
EVERY_FILE = pytest.mark.parametrize(("case", "world"), FILES, ids=[f"{case}_w{world}" for case, world in FILES])


@dataclass(frozen=True)
class Ran:
    """What one rank did: the sign of each step's movement, then its end."""

    signs: dict[str, Tensor]  # int8 [steps, shape]
    parameters: dict[str, Tensor]
    momenta: dict[str, Tensor]  # dense, in the parameter's domain
    kept: list[int]
    fingerprints: list[int]


def load(case: str, world: int) -> dict[str, Tensor]:
    with numpy.load(FOLDER / f"v1_{case}_w{world}.npz") as file:
        return {name: torch.from_numpy(file[name].copy()) for name in file.files}


def settings(case: str) -> dict[str, Any]:
    """V1 in float64."""
    return {**demopt.V1, **CASES[case], "values": "float64"}


def reproduce(rank: int, world: int, case: str) -> Ran:
    """One rank's part of a golden history; the sign of an update is read off the parameters' movement."""
    golden = load(case, world)
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


def mismatches(golden: dict[str, Tensor], ran: Ran) -> int:
    return sum(int((ran.signs[name] != golden[f"update_sign.{name}"]).sum()) for name in TENSORS)


@EVERY_FILE
def test_optimizer_reproduces(case: str, world: int) -> None:
    golden = load(case, world)
    if world == 1:
        assert not dist.is_initialized()
        results = [reproduce(0, 1, case)]
    else:
        results = ranks.run(reproduce, world, case)
    assert sum(mismatches(golden, ran) for ran in results) == 0
    for rank, ran in enumerate(results):
        assert ran.fingerprints == results[0].fingerprints
        assert [16 * kept for kept in ran.kept] == golden["bytes_sent"].tolist()
        for name in TENSORS:
            torch.testing.assert_close(ran.parameters[name], golden[f"param_final.{name}"], rtol=0, atol=1e-12)
            assert_momentum(ran.momenta[name], golden, name, rank)


@EVERY_FILE
def test_oracle_reproduces(case: str, world: int) -> None:
    """All signs but those where U is zero in exact arithmetic: there the golden sign is that of its round-off.

    The oracle's DCT is the cosine itself, which differs from the published code's in the last bit. With K = 1 an
    element of U is a product of two cosines, some of which are zero; sums of more coefficients never are.
    """
    golden = load(case, world)
    parameters = [golden[f"init.{name}"].double() for name in TENSORS]
    group = settings(case) | {"maximize": False}
    momenta = [[zero_momentum(x, group) for x in parameters] for _ in range(world)]
    exact_zeros = [torch.zeros(x.shape, dtype=torch.bool) for x in parameters]
    for step, lr in enumerate(golden["lr"].tolist()):
        gradients = [[golden[f"grad.{name}"][rank, step].double() for name in TENSORS] for rank in range(world)]
        parameters, momenta, aggregates, _ = reference_step(parameters, gradients, momenta, {**group, "lr": lr})
        for name, U, zeros in zip(TENSORS, aggregates, exact_zeros, strict=True):
            zero = U.abs() <= 1e-12 * U.abs().max()
            assert bool((zero | (U.sign() == golden[f"update_sign.{name}"][step])).all())
            zeros |= zero
    assert bool(torch.cat([zeros.flatten() for zeros in exact_zeros]).any()) == (case == "k1")
    for number, name in enumerate(TENSORS):
        settled = ~exact_zeros[number]
        final = golden[f"param_final.{name}"]
        torch.testing.assert_close(parameters[number][settled], final[settled], rtol=0, atol=1e-12)
        for rank in range(world):
            assert_momentum(momenta[rank][number], golden, name, rank)


def test_no_file_is_left_out() -> None:
    assert {path.stem for path in FOLDER.glob("*.npz")} == {f"v1_{case}_w{world}" for case, world in FILES}
