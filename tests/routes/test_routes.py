"""Routes: "auto" takes the one that receives fewer bytes, and says so; both refuse damage, and resync repairs it."""

import functools
import re
from contextlib import nullcontext

import pytest
import torch
from torch.nn import Parameter

import problems
import ranks
from demopt import DeMo, DriftError, LocalDeMo, MessageError
from demopt.replicator import owner

pytestmark = pytest.mark.filterwarnings("ignore:no parameter of this optimizer has had a gradient")


def _local(world_size, **settings):
    inner = torch.optim.SGD([Parameter(torch.zeros(2048, 1024))], lr=0.1)
    optimizer = LocalDeMo(inner, process_group=problems.OneOf(0, world_size), **settings)
    optimizer.extract()
    return optimizer.replicator.stats.route


def test_route_auto_is_owner_from_five_ranks_on():
    """Bytes received then do not grow with the ranks."""
    assert _local(1).startswith("gather: a rank alone")
    assert _local(2).startswith("gather: ")
    assert re.match("gather: .*pays with 5 ranks or more", _local(4))
    told = [re.findall(r"^owner|\d[\d,]*", _local(world_size)) for world_size in (5, 64)]
    assert [each.pop(0) for each in told] == ["owner", "owner"]
    (five, *_), (many, of_gather, *_) = ([int(number.replace(",", "")) for number in each] for each in told)
    assert many < 1.3 * five
    assert of_gather > 20 * many


@pytest.mark.parametrize(("settings", "says"), [({"top_k": 64}, "top_k"), ({"clip_to_median": True}, "clip_to_median")])
def test_route_auto_of_other_pseudo_gradients_is_gather(settings, says):
    why = _local(64, **settings)
    assert why.startswith("gather: ")
    assert says in why
    with pytest.raises(ValueError, match=says):
        _local(64, route="owner", **settings)


def _demo(world_size, **settings):
    optimizer = DeMo([Parameter(torch.zeros(64, 64))], process_group=problems.OneOf(0, world_size), **settings)
    optimizer.extract()
    return optimizer.stats.route


def test_demo_has_route_gather():
    assert re.fullmatch("gather: [0-9,]+ bytes received per round; route 'owner' is LocalDeMo's", _demo(1000))


def test_too_many_ranks_for_exact_sums_are_refused():
    """In 2 bits, the sum over more than 2**18 ranks can exceed 2**24."""
    assert _demo(1 << 18, values="2-bit")
    with pytest.raises(ValueError, match=r"exact sums of 262145 ranks .*; use exact=False"):
        _demo((1 << 18) + 1, values="2-bit")
    assert _demo((1 << 18) + 1, values="2-bit", exact=False)


MANY = [(32, 16), (100, 20), (17, 19), (20,), ()]  # more than a granule of chunks, so that several ranks own some
ON = {"gather": problems.demo, "owner": problems.two_way}


def _corrupted(exchange, route, bad_rank, place):
    """Flips a bit that rank 0 gets from `bad_rank`, in collective `place` of step 3; then all take rank 1's weights."""
    flips = []  # in the collectives to come

    def flip(rows):
        if flips and flips.pop(0):
            rows[bad_rank, 64] ^= 1
        return rows

    optimizer = ON[route](problems.Faulty(exchange, flip), MANY)
    problems.train(optimizer, range(2), exchange.rank)
    flips += [False] * place + [exchange.rank == 0]
    error = problems.refusal(optimizer, 2, exchange.rank)
    flips.clear()
    optimizer.resync(1)
    return error, problems.fingerprints(optimizer, range(3, 5), exchange.rank)


@pytest.mark.parametrize("bad_rank", [0, 2])
@pytest.mark.parametrize(("route", "place"), [("gather", 0), ("owner", 1), ("owner", 0)])
def test_corrupted_bytes_are_refused_where_they_arrive_parts_by_all_and_resync_repairs(route, place, bad_rank):
    parts = route == "owner" and place == 0
    (first, marks), *others = ranks.threads(_corrupted, 3, route, bad_rank, place)
    for error in [first, *(error for error, _ in others if parts)]:
        assert isinstance(error, MessageError)
        assert error.rank == bad_rank
        assert ("refused by rank 0" in str(error)) == parts
    assert parts or [error for error, _ in others] == [None, None]
    assert all(of_rank == marks for _, of_rank in others)


@pytest.mark.parametrize("name", ["decompress", "subtract"])
def test_an_owner_that_cannot_apply_its_answer_does_not_answer_with_it_again(name, monkeypatch):
    call, full = getattr(owner, name), set()

    def ends(chunk_group, *given):
        if id(chunk_group) in full:
            raise torch.OutOfMemoryError("device is full")
        return call(chunk_group, *given)

    monkeypatch.setattr(owner, name, ends)

    def errors(exchange, fails):
        optimizer = problems.two_way(exchange, MANY)
        problems.fingerprints(optimizer, range(2), exchange.rank)
        if fails and exchange.rank == 1:
            full.update(id(each) for each in optimizer.replicator.wiring().chunk_groups[-1:])
        with pytest.raises(DriftError, match="device is full") if fails and exchange.rank == 1 else nullcontext():
            problems.fingerprints(optimizer, [2], exchange.rank)
        return [each.clone() for each in optimizer.replicator.wiring().route.errors]

    (_, whole), (_, failed) = (ranks.threads(functools.partial(errors, fails=fails), 2) for fails in (False, True))
    assert any(each.any() for each in whole)
    if name == "decompress":
        assert problems.same(whole, failed)
    else:  # an error that its answer has not left is dropped
        assert problems.same([*whole[:-1], torch.zeros_like(whole[-1])], failed)
