"""route="auto" takes the route that receives fewer bytes, and says so; unsuitable settings are refused."""

import re
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import problems
from demopt import DeMo, LocalDeMo

pytestmark = pytest.mark.filterwarnings("ignore:no parameter of this optimizer has had a gradient")


def _local(world_size: int, **settings: Any) -> str:
    inner = torch.optim.SGD([Parameter(torch.zeros(2048, 1024))], lr=0.1)
    optimizer = LocalDeMo(inner, process_group=problems.OneOf(0, world_size), **settings)
    optimizer.extract()
    return optimizer.replicator.stats.route


def _received(why: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", why)]


def test_route_auto_is_owner_from_five_ranks_on() -> None:
    """Bytes received then do not grow with the ranks."""
    assert _local(1).startswith("gather: a rank alone")
    assert _local(2).startswith("gather: ")
    assert re.match("gather: .*pays with 5 ranks or more", _local(4))
    five, many = _local(5), _local(64)
    assert five.startswith("owner: ")
    assert many.startswith("owner: ")
    assert _received(many)[0] < 1.3 * _received(five)[0]
    assert _received(many)[1] > 20 * _received(many)[0]


@pytest.mark.parametrize(("settings", "says"), [({"top_k": 64}, "top_k"), ({"clip_to_median": True}, "clip_to_median")])
def test_route_auto_of_other_pseudo_gradients_is_gather(settings: dict[str, Any], says: str) -> None:
    why = _local(64, **settings)
    assert why.startswith("gather: ")
    assert says in why
    with pytest.raises(ValueError, match=says):
        _local(64, route="owner", **settings)


@pytest.mark.parametrize(("route", "says"), [("swarm", "route is 'swarm'.*'owner'"), (None, "route is None")])
def test_unknown_route_is_refused(route: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _local(2, route=route)


def _demo(world_size: int, **settings: Any) -> str:
    exchange = problems.OneOf(0, world_size)
    optimizer = DeMo([Parameter(torch.zeros(64, 64))], process_group=exchange, **settings)
    optimizer.extract()
    return optimizer.stats.route


def test_demo_has_route_gather() -> None:
    assert re.fullmatch("gather: [0-9,]+ bytes received per round; route 'owner' is LocalDeMo's", _demo(1000))


def test_too_many_ranks_for_exact_sums_are_refused() -> None:
    assert _demo(4000, values="2-bit")
    with pytest.raises(ValueError, match="exact sums of 300000 ranks"):
        _demo(300_000, values="2-bit")
    assert _demo(300_000, values="2-bit", exact=False)
