"""route="auto" takes the route that receives fewer bytes, and says so; unsuitable settings are refused."""

import re
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import problems
from demopt import DeMo, LocalDeMo

pytestmark = pytest.mark.filterwarnings("ignore:no parameter of this optimizer has had a gradient")

SHAPES = [(1024, 1024), (64,)]


def _why(world_size: int, route: str = "auto", **settings: Any) -> str:
    exchange, parameters = problems.OneOf(0, world_size), [Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = DeMo(parameters, route=route, process_group=exchange, **settings)
    optimizer.extract()
    return optimizer.stats.route


def _received(why: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", why)]


@pytest.mark.parametrize(
    ("world_size", "settings", "picked"),
    [
        (1, {}, "gather"),
        (2, {"values": "sign"}, "gather"),
        (32, {"values": "sign"}, "owner"),
        (2, {"values": "float32"}, "gather"),
        (2, {"values": "float32", "top_k": 512}, "owner"),
        (1000, {"values": "sign"}, "owner"),
        (5, {"values": "float32"}, "gather"),
        (13, {"values": "float32"}, "owner"),
    ],
    ids=str,
)
def test_route_auto_picks_the_cheaper(world_size: int, settings: dict[str, Any], picked: str) -> None:
    why = _why(world_size, **settings)
    assert why.startswith(f"{picked}: ")
    if world_size > 1:
        chosen, other = _received(why)
        assert chosen <= other
        assert ("gather" if picked == "owner" else "owner") in why.partition(": ")[2]


def test_route_auto_is_gather_for_other_updates_and_for_a_rank_alone() -> None:
    assert re.match("gather: .*signum", _why(1000, update="sgd"))
    assert _why(1).startswith("gather: a rank alone")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"route": "owner", "update": "sgd"}, "'signum', not 'sgd'"),
        ({"route": "swarm"}, "route is 'swarm'.*'owner'"),
        ({"route": None}, "route is None"),
    ],
    ids=str,
)
def test_route_option_refuses_unsuitable_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DeMo([Parameter(torch.zeros(4, 4))], **settings)


def test_route_refuses_too_many_ranks_for_exact_sums() -> None:
    assert _why(4000, route="gather", values="int8") == "gather: as asked"
    with pytest.raises(ValueError, match="exact sums of 5000 ranks"):
        _why(5000, route="gather", values="int8")
    assert _why(5000, route="gather", values="int8", exact=False) == "gather: as asked"


def _local(world_size: int, **settings: Any) -> str:
    inner = torch.optim.SGD([Parameter(torch.zeros(2048, 1024))], lr=0.1)
    optimizer = LocalDeMo(inner, process_group=problems.OneOf(0, world_size), **settings)
    optimizer.extract()
    return optimizer.replicator.stats.route


def test_route_auto_of_signs_is_two_way_from_five_ranks_on() -> None:
    """Bytes received then do not grow with the ranks."""
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
