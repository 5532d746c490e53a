"""Ranks with different settings or versions: an error at the first step that names rank and setting."""

from typing import Any

import pytest
import torch
from torch.nn import Parameter

import problems
import ranks
from demopt import DeMo, Lion, LocalDeMo, SettingsError

OTHER: dict[str, Any] = {
    "lr": 0.011,
    "momentum_decay": 0.91,
    "alpha": 0.5,
    "top_k": 25,
    "chunk": 15,
    "transform": "hadamard",
    "update": "lion(beta1=0.91, beta2=0.99)",
    "reduction": "mean",
    "values": "bfloat16",
    "weight_decay": 1e-9,
    "gradient_scale": "lr",
    "chunking": "divisor",
    "exact": False,
    "clip_to_median": True,
    "maximize": True,
}


def _attempt(optimizer: DeMo, rank: int) -> dict[str, Any]:
    """The error of one step, and whether anything changed."""
    parameters = problems.all_parameters(optimizer)
    problems.set_gradients(parameters, 0, rank)
    before = optimizer.fingerprint()
    found: dict[str, Any] = {"error": None}
    try:
        optimizer.step()
    except Exception as error:
        found["error"] = error
    found["unchanged"] = optimizer.fingerprint() == before
    found["saveable"] = bool(optimizer.state_dict())
    return found


def _each_setting(rank: int, world_size: int, odd: int) -> dict[str, dict[str, Any]]:
    found = {}
    for name, value in OTHER.items():
        given = {**problems.SMALL, name: value} if rank == odd else problems.SMALL
        found[name] = _attempt(DeMo(problems.parameters(problems.FEW), **given), rank)
        found[f"{name} of the second group"] = _attempt(
            DeMo(
                [
                    {"params": problems.parameters([(20,)])},
                    {"params": problems.parameters(problems.FEW), **({name: value} if rank == odd else {})},
                ],
                **problems.SMALL,
            ),
            rank,
        )
    return found


def _assert_named(found: dict[str, Any], odd: int, *names: str) -> None:
    assert isinstance(found["error"], SettingsError), repr(found["error"])
    text = str(found["error"])
    culprit = odd if odd != 0 else 1  # rank 0 is what others are compared with
    assert f"rank {culprit}" in text
    for name in names:
        assert name in text
    assert found["unchanged"]
    assert found["saveable"]


@pytest.mark.parametrize("odd", [0, 1])
def test_differing_setting_is_named_with_its_rank(odd: int) -> None:
    results = ranks.run(_each_setting, 2, odd)
    for found in results:
        for name, value in OTHER.items():
            _assert_named(found[name], odd, f"'{name}'", str(value))
            _assert_named(found[f"{name} of the second group"], odd, f"'{name}'", str(value), "[1]")


def test_differing_rank_of_three_is_named_on_all() -> None:
    for found in ranks.run(_each_setting, 3, 2):
        for name, value in OTHER.items():
            _assert_named(found[name], 2, f"'{name}'", str(value))


def test_differing_settings_cover_every_setting() -> None:
    group = DeMo([Parameter(torch.zeros(3))]).param_groups[0]
    assert set(OTHER) == set(group) - {"params"}
    assert all(OTHER[name] != {**group, **problems.SMALL}[name] for name in OTHER)


MODELS = [
    "a parameter more",
    "another shape",
    "the same size, another shape",
    "another dtype",
    "a frozen parameter",
    "another order",
    "a group more",
    "one group for each",
]


def _other_model(kind: str) -> list[Any]:
    shapes = list(problems.FEW)
    parameters: list[Any] = problems.parameters(shapes)
    if kind == "a parameter more":
        parameters += problems.parameters([(3,)])
    elif kind == "another shape":
        parameters[0] = problems.parameters([(33, 16)])[0]
    elif kind == "the same size, another shape":
        parameters[0] = problems.parameters([(16, 32)])[0]
    elif kind == "another dtype":
        parameters[0] = problems.parameters([(32, 16)], torch.bfloat16)[0]
    elif kind == "a frozen parameter":
        parameters[0].requires_grad_(False)
    elif kind == "another order":
        parameters[0], parameters[1] = parameters[1], parameters[0]
    elif kind == "a group more":
        return [{"params": parameters}, {"params": problems.parameters([(3,)])}]
    elif kind == "one group for each":
        return [{"params": [parameter]} for parameter in parameters]
    return parameters


def _each_model(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    return {
        kind: _attempt(DeMo(_other_model(kind if rank == 1 else "plain"), **problems.SMALL), rank) for kind in MODELS
    }


def test_differing_models_are_refused() -> None:
    for found in ranks.run(_each_model, 2, seconds=90.0):
        for kind in MODELS:
            _assert_named(found[kind], 1, "param_groups[")


def _other_version(rank: int, world_size: int) -> dict[str, Any]:
    if rank == 1:
        from demopt.replicator import plan

        plan.VERSION += 1
    try:
        return _attempt(DeMo(problems.parameters(problems.FEW), **problems.SMALL), rank)
    finally:
        if rank == 1:
            plan.VERSION -= 1


def test_differing_version_is_refused() -> None:
    for found in ranks.run(_other_version, 2):
        _assert_named(found, 1, "version")


def _equal_in_other_words(rank: int, world_size: int) -> problems.History:
    """1, 1.0 and a tensor of it are equal; so are a rule and its name, and groups with a scheduler's additions."""
    lr: Any = [1, 1.0, torch.tensor(1.0)][rank]
    update: Any = ["lion", Lion(), "lion(beta2=.99)"][rank]
    optimizer = DeMo(problems.parameters(problems.FEW), **{**problems.SMALL, "lr": lr, "update": update})
    if rank == 0:
        optimizer.param_groups[0]["update"] = Lion(beta1=0.9)
    if rank == 0:
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return problems.train(optimizer, range(2), rank)


def test_settings_in_equivalent_forms_agree() -> None:
    problems.assert_replicas(ranks.run(_equal_in_other_words, 3))


# Later differences


def _changed_later(rank: int, world_size: int, what: str, settings: dict[str, Any]) -> dict[str, Any]:
    optimizer = DeMo(problems.parameters(problems.FEW), **{**problems.SMALL, **settings})
    problems.train(optimizer, range(2), rank)
    if rank == 1:
        if what == "frozen":
            problems.all_parameters(optimizer)[1].requires_grad_(False)
        elif what == "a group":
            optimizer.add_param_group({"params": problems.parameters([(3,)])})
        else:
            optimizer.param_groups[0][what] = {"lr": 0.5, "update": Lion(beta1=0.5), "top_k": 50}[what]
    return _attempt(optimizer, rank)


@pytest.mark.parametrize(
    ("what", "settings", "said"),
    [
        ("lr", {}, "rank 1 has param_groups[0]['lr'] = 0.5 where rank 0 has 0.01"),
        ("lr", {"route": "owner"}, "rank 1 has param_groups[0]['lr'] = 0.5 where rank 0 has 0.01"),
        ("update", {"update": "lion"}, "rank 1 has param_groups[0]['update'] = lion(beta1=0.5"),
        ("top_k", {}, "rank 1 has param_groups[0]['top_k'] = 50"),
        ("frozen", {}, "rank 1 has param_groups[0]['params'][1] = float32 [17, 19], frozen"),
        ("a group", {}, "rank 1 has param_groups[1]['lr'] = "),
    ],
)
def test_settings_changed_later_are_named_before_apply(what: str, settings: dict[str, Any], said: str) -> None:
    """The usual mistake is ReduceLROnPlateau, which looks at each rank's loss."""
    for found in ranks.run(_changed_later, 2, what, settings):
        assert isinstance(found["error"], SettingsError), found["error"]
        assert said in str(found["error"])
        assert found["unchanged"]
        assert found["saveable"]


# LocalDeMo: the settings of its inner optimizers


def _local(rank: int, world_size: int, what: str, at: int, delay: int) -> tuple[int, str]:
    """The step at which a setting of rank 1, changed before step `at`, is noticed."""
    parameters = problems.parameters(problems.FEW)
    inner = torch.optim.AdamW(
        [{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1
    )
    optimizer = LocalDeMo(inner, sync_every=2, delay=delay)
    for step in range(10):
        if step == at and rank == 1:
            if what == "sync_every":
                optimizer.sync_every = 3
            else:
                inner.param_groups[1][what] = {"lr": 0.2, "betas": (0.8, 0.95), "weight_decay": 0.0}[what]
        problems.set_gradients(parameters, step, rank)
        try:
            optimizer.step()
        except SettingsError as error:
            return step, str(error)
    return -1, "nothing"


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    ("what", "at", "said"),
    [
        ("lr", 0, "rank 1 has inner param_groups[1]['lr'] = 0.2 where rank 0 has 0.1"),
        ("lr", 3, "rank 1 has inner param_groups[1]['lr'] = 0.2 where rank 0 has 0.1"),
        ("weight_decay", 3, "rank 1 has inner param_groups[1]['weight_decay'] = 0.0 where rank 0 has 0.1"),
        ("betas", 3, "rank 1 has inner param_groups[1]['betas'] = (0.8, 0.95) where rank 0 has (0.9, 0.95)"),
        ("sync_every", 2, "rank 1 has sync_every = 3 where rank 0 has 2"),
    ],
)
def test_inner_settings_of_ranks_that_differ_are_named(what: str, at: int, said: str, delay: int) -> None:
    for step, told in ranks.run(_local, 2, what, at, delay):
        assert said in told
        assert step <= at + 5


def _equal_by_the_first_step(rank: int, world_size: int) -> None:
    """Rank 0 gets its learning rate after construction: settings are compared as they are at the first step."""
    parameters = problems.parameters(problems.FEW)
    inner = torch.optim.SGD(parameters, lr=0.1 if rank == 0 else 1)
    optimizer = LocalDeMo(inner, sync_every=1)
    inner.param_groups[0]["lr"] = torch.tensor(1.0) if rank == 0 else 1
    problems.set_gradients(parameters, 0, rank)
    optimizer.step()


def test_inner_settings_are_compared_as_they_are_at_the_first_step() -> None:
    ranks.run(_equal_by_the_first_step, 2)


def test_sync_every_is_checked_when_it_changes() -> None:
    optimizer = LocalDeMo(torch.optim.SGD(problems.parameters([(3,)]), lr=0.1))
    with pytest.raises(ValueError, match="sync_every is 0; it must be at least 1"):
        optimizer.sync_every = 0
    optimizer.sync_every = 2
    assert optimizer.sync_every == 2


def _other_route(rank: int, world_size: int) -> dict[str, Any]:
    route = "owner" if rank == 1 else "gather"
    return _attempt(DeMo(problems.parameters(problems.FEW), **problems.SMALL, route=route), rank)


def test_differing_route_is_refused() -> None:
    """Routes make different collectives."""
    for outcome in ranks.outcomes(_other_route, 2):
        assert outcome.value is not None, outcome.trace or outcome.error
        _assert_named(outcome.value, 1, "route")


def _different_hardware(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Another number of threads can change the bits of a matrix product."""
    found = []
    torch.set_num_threads(1 + rank)
    try:
        for update in ("muon", "signum"):
            optimizer = DeMo(problems.parameters([(32, 16)]), **{**problems.SMALL, "update": update})
            found.append(_attempt(optimizer, rank))
    finally:
        torch.set_num_threads(1)
    return found


def test_differing_hardware_is_refused_by_muon_not_signum() -> None:
    for muon, signum in ranks.run(_different_hardware, 2):
        _assert_named(muon, 1, "its hardware (update='muon'", "with 2 threads", "with 1 threads")
        assert muon["unchanged"]
        assert signum["error"] is None


def _muon_on_one(rank: int, world_size: int) -> dict[str, Any]:
    update = "muon" if rank == 0 else "signum"
    return _attempt(DeMo(problems.parameters([(32, 16)]), **{**problems.SMALL, "update": update}), rank)


def test_differing_setting_is_named_before_the_hardware() -> None:
    for found in ranks.run(_muon_on_one, 2):
        _assert_named(found, 1, "param_groups[0]['update']")
