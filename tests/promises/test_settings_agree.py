"""Ranks with different settings or versions: an error at the first step that names rank and setting."""

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import problems
import ranks
from demopt import DeMo, Lion, SettingsError
from demopt.exchange import Exchange

OTHER: dict[str, Any] = {
    "lr": 0.011,
    "momentum_decay": 0.91,
    "alpha": 0.5,
    "top_k": 25,
    "chunk": 15,
    "transform": "identity",
    "update": "lion(beta1=0.91, beta2=0.99)",
    "reduction": "mean",
    "values": "float32",
    "weight_decay": 1e-9,
    "gradient_scale": "lr",
    "chunking": "divisor",
    "exact": False,
    "clip_to_median": True,
    "maximize": True,
}


def _assert_named(error: SettingsError | None, odd: int, *names: str) -> None:
    assert isinstance(error, SettingsError)
    for name in (f"rank {odd or 1}", *names):  # rank 0 is what others are compared with
        assert name in str(error)


def _each_setting(rank: int, world_size: int, odd: int) -> dict[str, tuple[SettingsError | None, ...]]:
    """By setting: what a rank finds if that of rank `odd` is another one, for all groups or for the second alone."""
    found = {}
    for name, value in OTHER.items():
        other = {name: value} if rank == odd else {}
        groups = [{"params": problems.parameters([(20,)])}, {"params": problems.parameters(problems.FEW), **other}]
        pair = (problems.demo(**other), DeMo(groups, **problems.SMALL))
        found[name] = (problems.refusal(pair[0], rank=rank), problems.refusal(pair[1], rank=rank))
    return found


@pytest.mark.parametrize(("world_size", "odd"), [(2, 0), (3, 2)])
def test_differing_setting_is_named_with_its_rank(world_size, odd):
    for found in ranks.run(_each_setting, world_size, odd):
        for name, value in OTHER.items():
            _assert_named(found[name][0], odd, f"'{name}'", str(value))
            _assert_named(found[name][1], odd, f"'{name}'", str(value), "[1]")


def test_differing_settings_cover_every_setting():
    group = DeMo([Parameter(torch.zeros(3))]).param_groups[0]
    assert set(OTHER) == set(group) - {"params"}
    assert all(OTHER[name] != {**group, **problems.SMALL}[name] for name in OTHER)


def _each_model(rank: int, world_size: int) -> dict[str, SettingsError | None]:
    """What a rank finds if the parameters of rank 1 are not those of the others."""
    few, frozen, more = (problems.parameters(shapes) for shapes in (problems.FEW, problems.FEW, [(3,)]))
    frozen[0].requires_grad_(False)
    models = {
        "a parameter more": few + more,
        "the same size, another shape": problems.parameters([(16, 32)]) + few[1:],
        "another dtype": problems.parameters([(32, 16)], torch.bfloat16) + few[1:],
        "a frozen parameter": frozen,
        "another order": [few[1], few[0], *few[2:]],
        "a group more": [{"params": few}, {"params": more}],
        "one group for each": [{"params": [parameter]} for parameter in few],
    }
    found = {}
    for kind, others in models.items():
        of = others if rank == 1 else problems.parameters(problems.FEW)
        found[kind] = problems.refusal(DeMo(of, **problems.SMALL), rank=rank)
    return found


def test_differing_models_are_refused():
    for found in ranks.run(_each_model, 2):
        for each in found.values():
            _assert_named(each, 1, "param_groups[")


def _each_difference(rank: int, world_size: int) -> dict[str, SettingsError | None]:
    """In version, route, threads and precision (which can change bits of matrix products), and in two at once."""
    from demopt.replicator import wiring

    found = {}
    wiring.VERSION += rank
    found["version"] = problems.refusal(problems.demo(), rank=rank)
    wiring.VERSION -= rank
    found["route"] = problems.refusal(problems.two_way(route=["gather", "owner"][rank]), rank=rank)
    torch.set_num_threads(1 + rank)
    for name, updates in {"muon": ("muon", "muon"), "signum": ("signum", "signum"), "both": ("muon", "signum")}.items():
        found[name] = problems.refusal(problems.demo(shapes=[(32, 16)], update=updates[rank]), rank=rank)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(["highest", "high"][rank])
    found["precision"] = problems.refusal(problems.demo(shapes=[(32, 16)], update="muon"), rank=rank)
    torch.set_float32_matmul_precision("highest")
    return found


def test_differing_version_route_and_hardware_are_refused():
    """Hardware by muon, not by signum, and a setting is named before it."""
    for found in ranks.run(_each_difference, 2):
        _assert_named(found["version"], 1, "version")
        _assert_named(found["route"], 1, "route")
        _assert_named(found["muon"], 1, "its hardware (update='muon'", "with 2 threads", "with 1 threads")
        _assert_named(found["precision"], 1, "its hardware", "float32 products high", "float32 products highest")
        assert found["signum"] is None
        _assert_named(found["both"], 1, "param_groups[0]['update']")


def _equal_in_other_words(rank: int, world_size: int) -> problems.History:
    """1, 1.0 and a tensor of it are equal; so are a rule and its name, and groups with a scheduler's additions."""
    lr, update = [(1, "lion"), (1.0, Lion()), (torch.tensor(1.0), "lion(beta2=.99)")][rank]
    optimizer = problems.demo(lr=lr, update=update)
    if rank == 0:
        optimizer.param_groups[0]["update"] = Lion(beta1=0.9)
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return problems.train(optimizer, range(2), rank)


def test_settings_in_equivalent_forms_agree():
    problems.assert_replicas(ranks.run(_equal_in_other_words, 3))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda o: o.param_groups[0].update(lr=0.5), "[0]['lr'] = 0.5 where rank 0 has 0.01"),
        (lambda o: o.param_groups[0].update(top_k=50), "[0]['top_k'] = 50"),
        (lambda o: o.param_groups[0]["params"][1].requires_grad_(False), "[0]['params'][1] = float32 [17, 19], frozen"),
        (lambda o: o.add_param_group({"params": problems.parameters([(3,)])}), "[1]['lr'] = "),
    ],
)
def test_settings_changed_later_are_named_before_apply(change, said):
    """The usual mistake is ReduceLROnPlateau, which looks at each rank's loss. A rank announces another layout."""

    def changed_later(exchange: Exchange) -> SettingsError | None:
        optimizer = problems.demo(exchange)
        problems.train(optimizer, range(2), exchange.rank)
        if exchange.rank == 1:
            change(optimizer)
        return problems.refusal(optimizer, rank=exchange.rank)

    for found in ranks.threads(changed_later, 3):
        _assert_named(found, 1, f"rank 1 has param_groups{said}")


def test_settings_changed_with_a_round_in_flight_are_named_again_and_again_until_they_agree():
    """A rank with a round in flight hears of another layout at its next round, after which it sends anew."""

    def changed_in_flight(exchange: Exchange) -> tuple[int, int]:
        optimizer, frozen = problems.local(exchange, sync_every=1, delay=1), exchange.rank == 1
        problems.train(optimizer, range(2), exchange.rank)
        optimizer.param_groups[0]["params"][1].requires_grad_(not frozen)
        for step in (2, 3) if frozen else (2, 3, 4, 5):
            sends = step % 2 == 0 and not frozen
            with nullcontext() if sends else pytest.raises(SettingsError, match=r"\[1\] = float32 \[17, 19\], frozen"):
                problems.train(optimizer, range(step, step + 1), exchange.rank)
        optimizer.param_groups[0]["params"][1].requires_grad_(True)
        problems.train(optimizer, range(6, 8), exchange.rank)
        optimizer.flush()
        return int(optimizer.replicator.round_number), optimizer.fingerprint(state=True)

    one, other = ranks.threads(changed_in_flight, 2)
    assert one == other
    assert one[0] == 4


def test_inner_settings_are_compared_as_they_are_at_the_first_step():
    """Rank 0 gets its learning rate after construction."""

    def equal_by_then(exchange: Exchange) -> None:
        first = exchange.rank == 0
        inner = functools.partial(torch.optim.SGD, lr=0.1 if first else 1, foreach=first)  # which changes no result
        optimizer = problems.local(exchange, inner=inner)
        optimizer.param_groups[0]["lr"] = torch.tensor(1.0) if first else 1
        problems.train(optimizer, range(1), exchange.rank)

    ranks.threads(equal_by_then, 2)
