"""A step launches few kernels on an accelerator, and waits for it twice: ceilings that a change may not pass unseen."""

import functools
from typing import Any

import counts
import pytest

WIDTH = 128  # the counts are those of 124M parameters: see counts.py
NOTHING = "nothing"
#: Launches beyond those of another optimizer, and waits: where a message leaves, and where messages arrive. On route
#: owner they arrive twice, and before it answers an owner must know on the host that all parts are whole, which of them
#: are flagged, and their weights: that is the third. The exchange itself is not counted.
CEILINGS = {
    "DeMo signum": (NOTHING, 149, 2),
    "DeMo bfloat16": (NOTHING, 164, 2),
    "DeMo muon": (NOTHING, 676, 2),
    "LocalDeMo step": ("AdamW", 0, 0),
    "LocalDeMo round": ("AdamW", 146, 2),
    "LocalDeMo round, owner": (NOTHING, 265, 3),
}


def _count(rank: int, world_size: int, name: str) -> tuple[int, int]:
    found = counts.count(name, WIDTH)
    return found["launches"], found.get("syncs", 0)


@pytest.fixture(scope="module")
def counted(on_toy: Any) -> Any:
    return functools.cache(lambda name: (0, 0) if name == NOTHING else on_toy(_count, 1, name)[0])


@pytest.mark.parametrize("name", CEILINGS)
def test_a_step_stays_below_its_ceilings(counted: Any, name: str) -> None:
    base, most, waits = CEILINGS[name]
    (launches, syncs), (known, _) = counted(name), counted(base)
    assert launches > 10  # or nothing was seen
    assert launches - known <= most
    assert syncs <= waits
