"""With its state on the host, LocalDeMo runs only copies on an accelerator, and takes none of its memory."""

import threading
from typing import Any

import pytest
import torch
import toy
from torch.nn import Parameter

import demopt
import problems
import ranks
from demopt.exchange import Exchange, SingleRank
from demopt.train.config import config_of, resolve
from demopt.train.method import make_optimizer
from laboratory import gpu

SETTINGS: dict[str, dict[str, Any]] = {
    "gather": {"route": "gather"},
    "owner": {"route": "owner"},
    "top-k": {"top_k": 24, "outer_momentum": 0.5},
    "delay": {"delay": 1},
}
SHAPES = [(64, 48), (33, 20), (70,), ()]
DRAWING = threading.Lock()


def _parameters(dtype: torch.dtype) -> list[Parameter]:
    with DRAWING:
        found = [Parameter(problems.draw(shape, 1).to("toy", dtype)) for shape in SHAPES]
    return [*found, Parameter(torch.ones(7, device="toy"), requires_grad=False)]


def _launches(rank: int, world_size: int, name: str, dtype: torch.dtype) -> tuple[list[dict[str, int]], set[str]]:
    """What four steps, looks at the weights, and saving run on the device, with LocalDeMo and without."""

    def work(exchange: Exchange) -> list[dict[str, int]]:
        counts = []
        for wrapped in (True, False):
            parameters = _parameters(dtype)
            inner = torch.optim.AdamW(parameters, lr=0.01, foreach=True)
            optimizer: Any = inner
            if wrapped:
                between = gpu.ThroughHost(exchange) if name == "delay" else exchange
                more = {"chunk": 16, "state_device": "cpu", "process_group": between, **SETTINGS[name]}
                with toy.counting() as found:
                    optimizer = demopt.LocalDeMo(inner, sync_every=2, fingerprint_every=1, **more)
                counts.append(found)
            for step in range(4):
                for parameter, shape in zip(parameters, SHAPES, strict=False):
                    parameter.grad = problems.draw(shape, step, exchange.rank).to("toy", dtype)
                with toy.counting() as found:
                    optimizer.step()
                counts.append(found)
            if wrapped:
                with toy.counting() as found:
                    optimizer.flush()
                    with optimizer.shared():
                        optimizer.fingerprint()
                    optimizer.state_dict()
                counts.append(found)
        return counts

    toy.races()
    return ranks.threads(work, 2)[0], toy.races()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_but_copies_runs_on_the_device(on_toy: Any, name: str, dtype: torch.dtype) -> None:
    ((counts, races),) = on_toy(_launches, 1, name, dtype)
    built, *steps, looks = counts[:6]
    alone = counts[6:]
    copies = {"to host", "to device", "syncs"}
    for mine, theirs in zip([built, *steps, looks], [{}, *alone, {}], strict=True):
        launched = {key: n for key, n in mine.items() if key not in copies and not key.startswith("sync ")}
        expected = {key: n for key, n in theirs.items() if key not in copies and not key.startswith("sync ")}
        assert launched == expected
    assert steps[1]["to host"] > 0
    assert steps[1]["to device"] > 0
    assert alone[1]["launches"] > 0
    assert races == set()


def _trained_by_command(rank: int, world_size: int) -> list[str]:
    config = resolve(config_of({"optimizer": "local"}))
    found = []
    for device in ("toy", "cpu"):
        optimizer: Any = make_optimizer(config, torch.nn.Linear(4, 4).to(device), SingleRank())
        found += sorted({entry["global"].device.type for entry in optimizer.state_dict()["state"].values()})
    return found


def test_demopt_train_keeps_the_state_of_an_unknown_accelerator_on_the_host(on_toy: Any) -> None:
    assert on_toy(_trained_by_command, 1) == [["cpu", "cpu"]]
