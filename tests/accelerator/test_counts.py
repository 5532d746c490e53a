"""A step launches few kernels on an accelerator, and waits for it twice: ceilings that a change may not pass unseen."""

from typing import Any

import counts
import pytest

WIDTH = 128  # of the 124M shapes: launches depend on it only where lists of tensors are long
#: Launches and waits. A round's include those of the inner optimizer. The wider model takes some 20 more.
CEILINGS = {
    "DeMo signum": (192, 2),
    "DeMo bfloat16": (210, 2),
    "DeMo muon": (1577, 2),
    "LocalDeMo round": (161, 2),
    "LocalDeMo round, owner": (251, 3),
}


def _count(rank: int, world_size: int, name: str) -> tuple[int, int]:
    found = counts.count(name, WIDTH)
    return found["launches"], found.get("syncs", 0)


@pytest.mark.parametrize("name", CEILINGS)
def test_a_step_stays_below_its_ceilings(on_toy: Any, name: str) -> None:
    ((launches, syncs),) = on_toy(_count, 1, name)
    assert launches <= CEILINGS[name][0]
    assert syncs <= CEILINGS[name][1]
    assert launches > 10  # or nothing was seen


def test_a_local_step_adds_nothing_to_the_inner_optimizer(on_toy: Any) -> None:
    assert on_toy(_count, 1, "LocalDeMo step") == on_toy(_count, 1, "AdamW")
