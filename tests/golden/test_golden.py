"""The published algorithm's own histories (README.md beside this file), reproduced sign by sign."""

from pathlib import Path

import numpy
import pytest
import torch
from torch.nn import Parameter

import demopt
import oracle
import ranks

FOLDER = Path(__file__).parent
TENSORS = ("matrix", "wide", "vector", "short")
CASES = {
    "default": {"momentum_decay": 0.999, "top_k": 32, "chunk": 64, "weight_decay": 0.0},
    "schedule": {"momentum_decay": 0.99, "top_k": 8, "chunk": 64, "weight_decay": 0.0},
    "decay": {"momentum_decay": 0.9, "top_k": 4, "chunk": 32, "weight_decay": 0.1},
    "k1": {"momentum_decay": 0.999, "top_k": 1, "chunk": 64, "weight_decay": 0.0},
}
FILES = sorted(path.stem[3:].split("_w") for path in FOLDER.glob("v1_*.npz"))  # the case, and how many ranks
assert len(FILES) == 9


def load(case, world_size):
    with numpy.load(FOLDER / f"v1_{case}_w{world_size}.npz") as file:
        return {name: torch.from_numpy(file[name].copy()) for name in file.files}


def settings(case):
    flat = {name: value for name, value in demopt.V1.items() if name != "codec"}
    return {**flat, **demopt.V1["codec"].hyperparameters(), **CASES[case], "values": "float64"}


def reproduce(rank, world_size, case):
    """One rank's part of a history: signs of updates from movements, dense momenta, and each step's fingerprint."""
    golden = load(case, world_size)
    parameters = {name: Parameter(golden[f"init.{name}"].double()) for name in TENSORS}
    optimizer = demopt.DeMo(parameters.values(), lr=1.0, **settings(case))
    ran = {f"update_sign.{name}": [] for name in TENSORS} | {"bytes_sent": [], "fingerprints": []}
    for step, lr in enumerate(golden["lr"].tolist()):
        optimizer.param_groups[0]["lr"] = lr
        before = {name: p.detach() * (1 - lr * CASES[case]["weight_decay"]) for name, p in parameters.items()}
        for name, parameter in parameters.items():
            parameter.grad = golden[f"grad.{name}"][rank, step].double()
        optimizer.step()
        for name, parameter in parameters.items():
            ran[f"update_sign.{name}"].append(((before[name] - parameter.detach()) / lr).round().to(torch.int8))
        ran["bytes_sent"].append(16 * optimizer.stats.kept)
        ran["fingerprints"].append(optimizer.fingerprint())
    for name, parameter in parameters.items():
        ran[f"update_sign.{name}"] = torch.stack(ran[f"update_sign.{name}"])
        ran[f"param_final.{name}"] = parameter.detach()
        momentum = optimizer.state[parameter]["momentum"]
        ran[f"momentum_final.{name}"] = oracle.dense(momentum, parameter, optimizer.param_groups[0])
    return ran


def oracle_history(case, world_size):
    """The oracle's history by rank, as from `reproduce`, and where U is zero in exact arithmetic, [steps, shape].

    There, a computed sign is that of a rounding error in one machine's cosines. With K = 1 an element of U is a
    product of two cosines, some of which are zero; sums of more coefficients never are.
    """
    golden = load(case, world_size)
    parameters = [Parameter(golden[f"init.{name}"].double()) for name in TENSORS]
    group = settings(case) | {"maximize": False, "params": parameters}
    truth, aggregates = oracle.Oracle([group], world_size), []
    for step, group["lr"] in enumerate(golden["lr"].tolist()):
        truth.step([[golden[f"grad.{name}"][rank, step].double() for name in TENSORS] for rank in range(world_size)])
        aggregates.append([*truth.aggregates])
    ran, zeros = [{} for _ in range(world_size)], {}
    for number, name in enumerate(TENSORS):
        of_steps = [U[number] for U in aggregates]
        zeros[name] = torch.stack([U.abs() <= 1e-12 * U.abs().max() for U in of_steps])
        for found, momenta in zip(ran, truth.momenta, strict=True):
            found[f"update_sign.{name}"] = torch.stack([U.sign() for U in of_steps])
            found[f"param_final.{name}"] = truth.parameters[number]
            found[f"momentum_final.{name}"] = momenta[number]
    return ran, zeros


def assert_reproduced(golden, ran, zeros, rank):
    """Compares all signs, parameters that no rounding error's sign has moved, and momenta, in float32 in the files."""
    largest = max(float(golden[f"momentum_final.{name}"].abs().max()) for name in TENSORS)
    bound = torch.finfo(torch.float32).eps * largest
    for name in TENSORS:
        assert int(((ran[f"update_sign.{name}"] != golden[f"update_sign.{name}"]) & ~zeros[name]).sum()) == 0
        settled, final = ~zeros[name].any(0), golden[f"param_final.{name}"]
        torch.testing.assert_close(ran[f"param_final.{name}"][settled], final[settled], rtol=0, atol=1e-12)
        momentum = golden[f"momentum_final.{name}"][rank].double()
        torch.testing.assert_close(ran[f"momentum_final.{name}"].view_as(momentum), momentum, rtol=0, atol=bound)


@pytest.mark.parametrize(("case", "number"), FILES)
def test_demo_and_the_oracle_reproduce_the_golden_history(case, number):
    """Only with K = 1 does U have zeros in exact arithmetic, and few."""
    world_size = int(number)
    golden, (of_oracle, zeros) = load(case, world_size), oracle_history(case, world_size)
    results = ranks.run(reproduce, world_size, case)
    for rank, ran in enumerate(results):
        assert_reproduced(golden, ran, zeros, rank)
        assert_reproduced(golden, of_oracle[rank], zeros, rank)
        assert ran["fingerprints"] == results[0]["fingerprints"]
        assert ran["bytes_sent"] == golden["bytes_sent"].tolist()
    assert world_size > 1 or reproduce(0, 1, case)["fingerprints"] == results[0]["fingerprints"], "without a group"
    undecided = torch.cat([of_steps.flatten() for of_steps in zeros.values()])
    assert bool(undecided.any()) == (case == "k1")
    assert float(undecided.double().mean()) < 0.02
