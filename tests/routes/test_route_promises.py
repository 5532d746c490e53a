"""Every route keeps the same promises: one list of routes, one list of promises. A new route adds a line to ROUTES."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

import problems
import ranks
from demopt import DeMo, MessageError
from demopt.errors import ExchangeError
from demopt.exchange import Collective, Exchange, Faulty, Meter, SingleRank
from demopt.optim.chunk_group import build
from demopt.optim.compress import Workspace
from demopt.optim.routes.choice import make_route

#: Each route, with settings that it allows.
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("gather", {"values": "float32"}),
    ("gather", {"values": "sign", "update": "sgd"}),
    ("owner", {"values": "float32"}),
    ("owner", {"values": "2-bit", "reduction": "mean"}),
    ("relay", {"values": "float32"}),
    ("relay", {"values": "int8", "update": "sgd"}),
    ("gather", {"values": "sign", "update": "adamw"}),
    ("relay", {"values": "2-bit", "update": "lion"}),
    ("relay", {"values": "float32", "update": "nesterov"}),
]
EVERY = pytest.mark.parametrize(("route", "more"), ROUTES, ids=[f"{r}-{'-'.join(m.values())}" for r, m in ROUTES])
ONE_EACH = pytest.mark.parametrize("route", ["gather", "owner", "relay"])
MANY = [(32, 16), (100, 20), (17, 19), (20,), ()]  # more than a granule of chunks, so that several ranks own some


def make(exchange: Exchange | None, route: str, shapes: list[tuple[int, ...]] = MANY, **more: Any) -> DeMo:
    settings = {**problems.SMALL, "relay_top_k": 10, "weight_decay": 0.1, "values": "float32", **more}
    return DeMo(problems.parameters(shapes), **settings, route=route, process_group=exchange)


def relays(optimizer: DeMo) -> list[Tensor]:
    """Copies of what relay keeps back on this rank; empty for other routes."""
    states = [optimizer.state[parameter] for parameter in problems.all_parameters(optimizer)]
    return [state["relay"].clone() for state in states if "relay" in state]


def values_of(optimizer: DeMo) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in problems.all_parameters(optimizer)]


def planned(optimizer: DeMo, route: str, rank: int, world_size: int) -> Any:
    chunk_groups = [group for group in build(optimizer.param_groups) if group.chunks and not group.key.frozen]
    return make_route(route, chunk_groups, rank, world_size, Workspace())[0].traffic


# Replicas and bytes


def _trained(exchange: Exchange, route: str, more: dict[str, Any], shapes: list[tuple[int, ...]]) -> dict[str, Any]:
    optimizer = make(exchange, route, shapes, **more)
    meter = Meter(exchange)  # counts nothing: the optimizer has its own
    seen: dict[str, Any] = {"bytes": [], "before": optimizer.fingerprint()}

    def note(_: int) -> None:
        seen["bytes"].append((optimizer.stats.sent_bytes, optimizer.stats.received_bytes))

    seen["history"] = problems.train(optimizer, range(4), exchange.rank, note)
    note(4)
    plan = planned(optimizer, route, meter.rank, meter.world_size)
    seen["plan"] = (plan.sent, plan.received)
    seen["route"] = optimizer.stats.route
    seen["relay"] = relays(optimizer)
    return seen


def _check(found: list[dict[str, Any]], route: str) -> None:
    problems.assert_replicas([seen["history"] for seen in found])
    for seen in found:
        assert seen["history"].fingerprints[-1] != seen["before"]
        assert seen["bytes"][1:] == [seen["plan"]] * 4
        assert seen["route"].startswith(f"{route}: as asked")
        assert all(bool(torch.isfinite(t).all()) for t in (*seen["history"].parameters, *seen["relay"]))


@EVERY
@pytest.mark.parametrize("world_size", [1, 5])
def test_route_keeps_replicas_equal_with_planned_bytes(route: str, more: dict[str, Any], world_size: int) -> None:
    _check(ranks.threads(_trained, world_size, route, more, MANY), route)


def _trained_over_gloo(rank: int, world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    exchange = Collective(dist.group.WORLD)
    return [_trained(exchange, route, more, MANY) for route, more in cases]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_route_keeps_replicas_equal_over_gloo(world_size: int) -> None:
    for (route, _), found in zip(
        ROUTES, zip(*ranks.run(_trained_over_gloo, world_size, ROUTES), strict=True), strict=True
    ):
        _check(list(found), route)


def _bits(rank: int, world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> list[list[int]]:
    exchange = Collective(dist.group.WORLD)
    return [_trained(exchange, *case, MANY)["history"].fingerprints for case in cases]


def test_route_gives_same_bits_in_threads_and_gloo() -> None:
    over_gloo = ranks.run(_bits, 3, ROUTES)[0]
    for case, fingerprints in zip(ROUTES, over_gloo, strict=True):
        threads = ranks.threads(_trained, 3, *case, MANY)
        assert threads[0]["history"].fingerprints == fingerprints, case


@EVERY
def test_route_takes_empty_and_odd_shapes(route: str, more: dict[str, Any]) -> None:
    _check(ranks.threads(_trained, 3, route, more, problems.SHAPES), route)


def _nothing(exchange: Exchange, route: str) -> int:
    optimizer = make(exchange, route, [(0,), (4, 0, 2)])
    problems.train(optimizer, range(2), exchange.rank)
    return optimizer.stats.kept


@ONE_EACH
def test_route_takes_nothing_but_empty_parameters(route: str) -> None:
    assert ranks.threads(_nothing, 3, route) == [0, 0, 0]


@EVERY
def test_route_alone_equals_group_of_one(route: str, more: dict[str, Any]) -> None:
    alone = problems.train(make(None, route, **more), range(3))
    of_one = problems.train(make(SingleRank(), route, **more), range(3))
    assert problems.same_history(alone, of_one)


# Vetoes


def _vetoed(exchange: Exchange, route: str, more: dict[str, Any], bad_rank: int) -> dict[str, Any]:
    optimizer = make(exchange, route, **more)
    problems.train(optimizer, range(2), exchange.rank)
    before = values_of(optimizer), relays(optimizer), problems.momenta(optimizer)
    problems.set_gradients(problems.all_parameters(optimizer), 2, exchange.rank)
    if exchange.rank == bad_rank:
        gradient = problems.all_parameters(optimizer)[1].grad
        assert gradient is not None
        gradient[3, 4] = float("nan")
    optimizer.step()
    seen = {
        "skipped": optimizer.stats.skipped,
        "parameters": problems.same(values_of(optimizer), before[0]),
        "relay": problems.same(relays(optimizer), before[1]),
        "momenta": problems.same(problems.momenta(optimizer), before[2]),
    }
    seen["history"] = problems.train(optimizer, range(3, 5), exchange.rank)
    return seen


@EVERY
@pytest.mark.parametrize("bad_rank", [0, 2])
def test_route_skips_on_all_ranks_for_one_bad_gradient(route: str, more: dict[str, Any], bad_rank: int) -> None:
    found = ranks.threads(_vetoed, 3, route, more, bad_rank)
    for rank, seen in enumerate(found):
        assert seen["skipped"]
        assert seen["parameters"]
        assert seen["relay"]
        assert seen["momenta"] == (rank == bad_rank)  # the others' took in their gradients, as before a rollback
    problems.assert_replicas([seen["history"] for seen in found])


# Failures


class _Failing(Exchange):
    """Gives up at the call of that number, before or after the others have had their bytes."""

    def __init__(self, inner: Exchange, call: int, late: bool) -> None:
        self.inner, self.rank, self.world_size = inner, inner.rank, inner.world_size
        self.call, self.late, self.armed = call, late, False

    def _run(self, run: Callable[[], Any]) -> Any:
        self.call -= self.armed
        if self.armed and self.call < 0:
            if self.late:
                run()
            raise ExchangeError("the link is down")
        return run()

    def all_gather(self, message_B: Tensor) -> Tensor:
        return self._run(lambda: self.inner.all_gather(message_B))

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        return self._run(lambda: self.inner.all_to_all(parts_WB))

    def all_reduce(self, values: Tensor) -> None:
        self._run(lambda: self.inner.all_reduce(values))

    def broadcast(self, data_B: Tensor, src: int) -> None:
        self._run(lambda: self.inner.broadcast(data_B, src))


def _accumulated(optimizer: DeMo, momenta: list[Tensor]) -> list[Tensor]:
    """What momenta are after the gradients were taken in and nothing was sent."""
    settings = {**problems.SMALL, "values": optimizer.param_groups[0]["values"]}
    twin = DeMo([Parameter(p.detach().clone()) for p in problems.all_parameters(optimizer)], **settings)
    for parameter, of_twin, momentum in zip(
        problems.all_parameters(optimizer), problems.all_parameters(twin), momenta, strict=True
    ):
        twin.state[of_twin]["momentum"].copy_(momentum)
        of_twin.grad = parameter.grad
    twin.extract()
    twin.rollback()
    return problems.momenta(twin)


def _unchanged(optimizer: DeMo, broken: Callable[[], None], rank: int) -> dict[str, Any]:
    problems.train(optimizer, range(2), rank)
    before = values_of(optimizer), relays(optimizer), problems.momenta(optimizer)
    problems.set_gradients(problems.all_parameters(optimizer), 2, rank)
    broken()
    error: BaseException | None = None
    try:
        optimizer.step()
    except (ExchangeError, MessageError) as caught:
        error = caught
    return {
        "error": error,
        "parameters": problems.same(values_of(optimizer), before[0]),
        "relay": problems.same(relays(optimizer), before[1]),
        "momenta": problems.same(problems.momenta(optimizer), _accumulated(optimizer, before[2])),
        "saveable": bool(optimizer.state_dict()),
    }


def _broken_off(exchange: Exchange, route: str, call: int, late: bool) -> dict[str, Any]:
    failing = _Failing(exchange, call, late)
    optimizer = make(failing, route, weight_decay=0.1)
    seen = _unchanged(optimizer, lambda: setattr(failing, "armed", True), exchange.rank)
    failing.armed = False
    seen["after"] = problems.train(optimizer, range(2, 4), exchange.rank)
    return seen


@ONE_EACH
@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_route_failed_exchange_changes_nothing(route: str, call: int, late: bool) -> None:
    """On all ranks at once, at each of the route's collectives. The gradients stay in the momentum."""
    if route == "gather" and call == 1:
        pytest.skip("one collective")
    found = ranks.threads(_broken_off, 3, route, call, late)
    for seen in found:
        assert isinstance(seen["error"], ExchangeError)
        assert "step 2" in str(seen["error"])
        assert [seen[name] for name in ("parameters", "relay", "momenta", "saveable")] == [True] * 4
    problems.assert_replicas([seen["after"] for seen in found])


def _corrupted(exchange: Exchange, route: str, where: str, bad_rank: int, more: dict[str, Any]) -> dict[str, Any]:
    armed = [False]

    def damage(rows: Tensor) -> Tensor:
        flip = armed[0] and exchange.rank == 0 and rows.shape[0] == exchange.world_size and rows.shape[1] >= 64
        is_parts = armed[0] and called[0] == "part"
        if flip and is_parts == (where == "part"):
            rows[bad_rank, 64 if rows.shape[1] > 64 else 10] ^= 1
        return rows

    called = [""]

    class Told(Faulty):
        def all_gather(self, message_B: Tensor) -> Tensor:
            called[0] = "answer"
            return super().all_gather(message_B)

        def all_to_all(self, parts_WB: Tensor) -> Tensor:
            called[0] = "part"
            return super().all_to_all(parts_WB)

    optimizer = make(Told(exchange, damage), route, **more)
    return _unchanged(optimizer, lambda: armed.__setitem__(0, True), exchange.rank)


@pytest.mark.parametrize("bad_rank", [0, 2])
def test_gather_refuses_corrupted_message_where_it_arrives(bad_rank: int) -> None:
    first, *others = ranks.threads(_corrupted, 3, "gather", "answer", bad_rank, {})
    assert isinstance(first["error"], MessageError)
    assert first["error"].rank == bad_rank
    assert [first[name] for name in ("parameters", "relay", "momenta", "saveable")] == [True] * 4
    assert [seen["error"] for seen in others] == [None, None]


@pytest.mark.parametrize("route", ["owner", "relay"])
@pytest.mark.parametrize("bad_rank", [0, 2])
@pytest.mark.parametrize("values", ["float32", "sign"])
def test_owner_and_relay_refuse_corrupted_part_on_all_ranks(route: str, bad_rank: int, values: str) -> None:
    for seen in ranks.threads(_corrupted, 3, route, "part", bad_rank, {"values": values}):
        assert isinstance(seen["error"], MessageError)
        assert seen["error"].rank == bad_rank
        assert "refused by rank 0" in str(seen["error"])
        assert [seen[name] for name in ("parameters", "relay", "momenta", "saveable")] == [True] * 4


@pytest.mark.parametrize("route", ["owner", "relay"])
@pytest.mark.parametrize("bad_rank", [0, 2])
def test_owner_and_relay_refuse_corrupted_answer_on_arrival(route: str, bad_rank: int) -> None:
    first, *others = ranks.threads(_corrupted, 3, route, "answer", bad_rank, {})
    assert isinstance(first["error"], MessageError)
    assert first["error"].rank == bad_rank
    assert [first[name] for name in ("parameters", "relay", "momenta", "saveable")] == [True] * 4
    assert [seen["error"] for seen in others] == [None, None]


# Checkpoints


def _resumed(exchange: Exchange, route: str, more: dict[str, Any]) -> list[Any]:
    whole = make(exchange, route, **more)
    problems.train(whole, range(3), exchange.rank)
    state, weights = copy.deepcopy(whole.state_dict()), values_of(whole)
    expected = problems.train(whole, range(3, 6), exchange.rank)
    again = make(exchange, route, **more)
    with torch.no_grad():
        for parameter, weight in zip(problems.all_parameters(again), weights, strict=True):
            parameter.copy_(weight)
    again.load_state_dict(state)
    got = problems.train(again, range(3, 6), exchange.rank)
    same = problems.same_history(got, expected) and got.fingerprints == expected.fingerprints
    return [same, problems.same(relays(again), relays(whole)), any(bool(t.any()) for t in relays(whole))]


@EVERY
@pytest.mark.parametrize("world_size", [1, 3])
def test_route_resumes_bit_for_bit(route: str, more: dict[str, Any], world_size: int) -> None:
    found = ranks.threads(_resumed, world_size, route, more)
    assert all(same and same_relay for same, same_relay, _ in found)
    assert any(kept_back for *_, kept_back in found) == (route == "relay")


def _copied(exchange: Exchange, route: str) -> bool:
    optimizer = make(exchange, route)
    problems.train(optimizer, range(2), exchange.rank)
    twin = copy.deepcopy(optimizer)
    left, right = (problems.train(each, range(2, 4), exchange.rank) for each in (optimizer, twin))
    return problems.same_history(left, right) and problems.same(relays(optimizer), relays(twin))


@ONE_EACH
def test_route_deepcopy_continues_alike(route: str) -> None:
    assert all(ranks.threads(_copied, 2, route))


def _kept_back(state: dict[str, Any]) -> dict[int, float]:
    """What a rank keeps back (equal numbers within a chunk), by the parameter's chunks that it owns."""
    first = int(state["relay_start"])
    return {first + row: float(values.unique()) for row, values in enumerate(state["relay"])}


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"), [((0, 2), (0, 1)), ((1, 2), (0, 2)), ((0, 1), (2, 3)), ((1, 3), (0, 3))]
)
def test_relay_loads_checkpoint_of_other_rank_or_world_size(
    saved_by: tuple[int, int], loaded_by: tuple[int, int]
) -> None:
    """What was kept back of chunks that this rank does not own is left behind; the momentum comes along."""

    class Pretend(SingleRank):
        def __init__(self, rank: int, world_size: int) -> None:
            self.rank, self.world_size = rank, world_size

    old, new = (make(Pretend(*who), "relay") for who in (saved_by, loaded_by))
    for number, parameter in enumerate(problems.all_parameters(old)):
        old.state[parameter]["momentum"].fill_(number + 1)
        rows, first = old.state[parameter]["relay"], int(old.state[parameter]["relay_start"])
        rows.copy_(torch.arange(first + 1, first + 1 + len(rows)).unsqueeze(1))  # each chunk's number, from 1
    kept = {index: _kept_back(old.state[parameter]) for index, parameter in enumerate(problems.all_parameters(old))}
    with pytest.warns(UserWarning, match=f"saved by rank {saved_by[0]}.*this is rank {loaded_by[0]}"):
        new.load_state_dict(old.state_dict())
    for number, parameter in enumerate(problems.all_parameters(new)):
        assert bool((new.state[parameter]["momentum"] == number + 1).all())
        found = _kept_back(new.state[parameter])
        assert found == {chunk: chunk + 1 if chunk in kept[number] else 0 for chunk in found}
    assert new.extract().numel() > 64
