"""A step waits for an accelerator twice: where its message leaves, and where messages arrive.

On route owner they arrive twice, and before it answers an owner must know on the host that all parts are whole, which
of them are flagged, and their weights: that is the third. The exchange itself is not counted.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import toy
from torch.nn import Parameter

import demopt
import problems
from demopt.exchange import Exchange, Threads

MOST = {"DeMo": 2, "DeMo muon": 2, "LocalDeMo": 2, "LocalDeMo owner": 3}


def _waits(rank: int, world_size: int, name: str) -> list[int]:
    """Of the third step of each of two ranks in threads."""

    def uncounted(threads: Threads, combine: Callable[[Threads], None] = Threads._combine) -> None:
        with toy.counting(False):
            combine(threads)

    def work(exchange: Exchange) -> int:
        params = [Parameter(each.detach().to("toy")) for each in problems.parameters([(96, 64), (64, 64), (64, 200)])]
        kind, _, more = name.partition(" ")
        if kind == "DeMo":
            optimizer: Any = demopt.DeMo(params, update=more or "signum", process_group=exchange)
        else:
            inner = problems.SGD(params)
            optimizer = demopt.LocalDeMo(inner, sync_every=1, route=more or "gather", process_group=exchange)
        for step in range(3):
            for number, parameter in enumerate(params):
                parameter.grad = problems.draw(parameter.shape, step, exchange.rank, number).to("toy")
            with toy.counting() as found:
                optimizer.step()
        assert found["launches"] > 10  # or nothing was seen
        return found.get("syncs", 0)

    with mock.patch.object(Threads, "_combine", uncounted):
        return Threads(2, timeout=300.0).run(work)


@pytest.mark.parametrize("name", MOST)
def test_a_step_waits_for_the_device_where_its_message_leaves_and_messages_arrive(on_toy: Any, name: str) -> None:
    assert max(on_toy(_waits, 1, name)[0]) <= MOST[name]
