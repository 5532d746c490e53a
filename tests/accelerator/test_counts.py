"""A step launches few kernels on an accelerator, and waits for it twice: ceilings that a change may not pass unseen.

The parameters are those of a narrow GPT-2, two ranks are in threads, and the third step of rank 0 counts, or
LocalDeMo's second round.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import toy
from torch.nn import Parameter

import demopt
from demopt.exchange import Exchange, Threads

WIDTH = 64


def shapes() -> list[tuple[int, ...]]:
    """GPT-2 with fewer tokens and places too."""
    norms, inner = 4 * [(WIDTH,)], 4 * WIDTH
    attention = [(3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
    mlp = [(inner, WIDTH), (inner,), (WIDTH, inner), (WIDTH,)]
    return [(65 * WIDTH, WIDTH), (WIDTH, WIDTH), *12 * [*norms, *attention, *mlp], (WIDTH,), (WIDTH,)]


def _uncounted(threads: Threads, combine: Callable[[Threads], None] = Threads._combine) -> None:
    """The work of the exchange, which the thread does that comes last."""
    with toy.counting(False):
        combine(threads)


def _adamw(params: list[Parameter], _: Any = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, foreach=True)


def _demo(params: list[Parameter], group: Exchange) -> torch.optim.Optimizer:
    return demopt.DeMo(params, process_group=group)


def _muon(params: list[Parameter], group: Exchange) -> torch.optim.Optimizer:
    matrices = [p for p in params[2:] if p.dim() == 2]
    rest = [*params[:2], *(p for p in params if p.dim() == 1)]
    groups = [{"params": matrices, "update": "muon"}, {"params": rest, "update": "adamw"}]
    return demopt.DeMo(groups, process_group=group)


def _local(params: list[Parameter], group: Exchange) -> torch.optim.Optimizer:
    return demopt.LocalDeMo(_adamw(params), sync_every=2, route="gather", process_group=group)


def _owner(params: list[Parameter], group: Exchange) -> torch.optim.Optimizer:
    return demopt.LocalDeMo(torch.optim.SGD(params, lr=0.1), sync_every=1, route="owner", process_group=group)


NOTHING = "nothing"
#: The optimizer, the step to count, the dtype; then the most launches beyond those of another optimizer, and the most
#: waits: where a message leaves, and where messages arrive. On route owner they arrive twice, and before it answers an
#: owner must know on the host that all parts are whole, which of them are flagged, and their weights: that is the
#: third. The exchange itself is not counted.
METHODS: dict[str, tuple[Callable[..., torch.optim.Optimizer], int, torch.dtype, str, int, int]] = {
    "AdamW": (_adamw, 2, torch.float32, NOTHING, 0, 0),  # others are compared with it
    "DeMo signum": (_demo, 2, torch.float32, NOTHING, 134, 2),
    "DeMo bfloat16": (_demo, 2, torch.bfloat16, NOTHING, 152, 2),
    "DeMo muon": (_muon, 2, torch.float32, NOTHING, 369, 2),
    "LocalDeMo step": (_local, 2, torch.float32, "AdamW", 0, 0),
    "LocalDeMo round": (_local, 3, torch.float32, "AdamW", 131, 2),
    "LocalDeMo round, owner": (_owner, 3, torch.float32, NOTHING, 220, 3),
}


def count(rank: int, world_size: int, name: str) -> dict[str, int]:
    """The counts of one row."""
    make, counted, dtype, *_ = METHODS[name]
    drawing = threading.Lock()

    def work(exchange: Exchange) -> dict[str, int]:
        with drawing:
            torch.manual_seed(0)
            params = [Parameter(0.02 * torch.randn(shape).to("toy", dtype)) for shape in shapes()]
            optimizer = make(params, exchange)
        for step in range(counted + 1):
            for number, parameter in enumerate(params):
                parameter.grad = torch.full_like(parameter, 0.1 * (number + step + 1 + exchange.rank))
                parameter.grad.view(-1)[:: 2 + exchange.rank] *= -1
            with toy.counting() as found:
                optimizer.step()
        return found

    with mock.patch.object(Threads, "_combine", _uncounted):
        threads = Threads(2, timeout=300.0)
        counts = threads.run(work)[0]
        threads.close()
    return counts


@pytest.fixture(scope="module")
def counted(on_toy: Any) -> Any:
    return functools.cache(lambda name: {} if name == NOTHING else on_toy(count, 1, name)[0])


@pytest.mark.parametrize("name", [*METHODS][1:])
def test_a_step_stays_below_its_ceilings(counted: Any, name: str) -> None:
    *_, base, most, waits = METHODS[name]
    found = counted(name)
    assert found["launches"] > 10  # or nothing was seen
    assert found["launches"] - counted(base).get("launches", 0) <= most
    assert found.get("syncs", 0) <= waits
