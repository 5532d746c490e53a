"""Ranks with different settings or versions: an error at the first step that names rank and setting."""

import functools
from contextlib import nullcontext

import pytest
import torch
from torch.nn import Parameter

import problems
import ranks
from demopt import DeMo, Lion, SettingsError
from demopt.replicator import wiring

OTHER = {
    "lr": 0.011, "momentum_decay": 0.91, "alpha": 0.5, "top_k": 25, "chunk": 15, "transform": "identity",
    "update": "lion(beta1=0.91, beta2=0.99)", "reduction": "mean", "values": "float32", "weight_decay": 1e-9,
    "gradient_scale": "lr", "chunking": "divisor", "exact": False, "clip_to_median": True, "maximize": True,
}  # fmt: skip


def _assert_named(error, odd, *names):
    assert isinstance(error, SettingsError)
    for name in (f"rank {odd or 1}", *names):  # the others are compared with rank 0
        assert name in str(error)


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("odd", [0, 2])
@ranks.alike(3)
def test_differing_setting_of_all_groups_or_of_the_second_alone_is_named_with_its_rank(exchange, odd, name):
    other = {name: OTHER[name]} if exchange.rank == odd else {}
    groups = [{"params": problems.parameters([(20,)])}, {"params": problems.parameters(problems.FEW), **other}]
    both = problems.demo(exchange, **other), DeMo(groups, process_group=exchange, **problems.SMALL)
    for optimizer, place in zip(both, ("[0]", "[1]"), strict=True):
        _assert_named(problems.refusal(optimizer, rank=exchange.rank), odd, f"{place}['{name}']", str(OTHER[name]))


def test_differing_settings_cover_every_setting():
    group = DeMo([Parameter(torch.zeros(3))]).param_groups[0]
    assert set(OTHER) == set(group) - {"params"}
    assert all(OTHER[name] != {**group, **problems.SMALL}[name] for name in OTHER)


#: The parameters of rank 1, made from those of rank 0.
MODELS = {
    "a parameter more": lambda few: few + problems.parameters([(3,)]),
    "the same size, another shape": lambda few: problems.parameters([(16, 32)]) + few[1:],
    "another dtype": lambda few: problems.parameters([(32, 16)], torch.bfloat16) + few[1:],
    "a frozen parameter": lambda few: [few[0].requires_grad_(False), *few[1:]],
    "another order": lambda few: [few[1], few[0], *few[2:]],
    "a group more": lambda few: [{"params": few}, {"params": problems.parameters([(3,)])}],
    "one group for each": lambda few: [{"params": [parameter]} for parameter in few],
}


@pytest.mark.parametrize("kind", MODELS)
@ranks.alike(2)
def test_differing_models_are_refused(exchange, kind):
    of = (MODELS[kind] if exchange.rank == 1 else list)(problems.parameters(problems.FEW))
    optimizer = DeMo(of, process_group=exchange, **problems.SMALL)
    _assert_named(problems.refusal(optimizer, rank=exchange.rank), 1, "param_groups[")


@ranks.each(2)
def test_differing_version_route_and_hardware_are_refused(rank):
    """Hardware (threads, precision) can change bits of muon, not of signum; settings are named before it."""

    def refusal(update):
        return problems.refusal(problems.demo(shapes=[(32, 16)], update=update), rank=rank)

    wiring.VERSION += rank
    _assert_named(refusal("signum"), 1, "version")
    wiring.VERSION -= rank
    _assert_named(problems.refusal(problems.two_way(route=["gather", "owner"][rank]), rank=rank), 1, "route")
    torch.set_num_threads(1 + rank)
    _assert_named(refusal("muon"), 1, "its hardware (update='muon'", "with 2 threads", "with 1 threads")
    assert refusal("signum") is None
    _assert_named(refusal(["muon", "signum"][rank]), 1, "param_groups[0]['update']")
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(["highest", "high"][rank])
    _assert_named(refusal("muon"), 1, "its hardware", "float32 products high", "float32 products highest")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = ["ieee", "tf32"][rank]  # after this, torch no longer tells the old name
    _assert_named(refusal("muon"), 1, "its hardware", "float32 products tf32", "float32 products highest")
    torch.set_float32_matmul_precision("highest")


@ranks.alike(3)
def test_settings_in_equivalent_forms_agree(exchange):
    """1, 1.0 and a tensor of it are equal; so are a rule and its name, and groups with a scheduler's additions."""
    lr, update = [(1, "lion"), (1.0, Lion()), (torch.tensor(1.0), "lion(beta2=.99)")][exchange.rank]
    optimizer = problems.demo(exchange, lr=lr, update=update)
    if exchange.rank == 0:
        optimizer.param_groups[0]["update"] = Lion(beta1=0.9)
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return problems.train(optimizer, range(2), exchange.rank)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda o: o.param_groups[0].update(lr=0.5), "[0]['lr'] = 0.5 where rank 0 has 0.01"),
        (lambda o: o.param_groups[0].update(top_k=50), "[0]['top_k'] = 50"),
        (lambda o: o.param_groups[0]["params"][1].requires_grad_(False), "[0]['params'][1] = float32 [17, 19], frozen"),
        (lambda o: o.add_param_group({"params": problems.parameters([(3,)])}), "[1]['lr'] = "),
    ],
)
@ranks.alike(3)
def test_settings_changed_later_are_named_before_apply(exchange, change, said):
    """The usual mistake is ReduceLROnPlateau, which looks at each rank's loss. A rank announces a new layout."""
    optimizer = problems.demo(exchange)
    problems.train(optimizer, range(2), exchange.rank)
    if exchange.rank == 1:
        change(optimizer)
    _assert_named(problems.refusal(optimizer, rank=exchange.rank), 1, f"rank 1 has param_groups{said}")


@pytest.mark.parametrize("name", ["outer_lr", "error_decay", "outer_momentum", "top_k"])
@ranks.alike(2)
def test_settings_of_local_demo_are_named_as_its_arguments(exchange, name):
    """Its `param_groups` are those of the inner optimizer, whose lr is another one."""
    value = [0.25, 0.5][exchange.rank] if name != "top_k" else [24, 25][exchange.rank]
    optimizer = problems.local(exchange, **{name: value})
    assert "param_groups[0]['lr']" in optimizer.replicator.wiring().facts(), "as in the record of an earlier run"
    refused = problems.refusal(optimizer, rank=exchange.rank)
    _assert_named(refused, 1, f"rank 1 has {name} = ")


@ranks.alike(2)
def test_settings_changed_with_a_round_in_flight_are_named_again_and_again_until_they_agree(exchange):
    """A rank with a round in flight hears of another layout at its next round; after that it sends anew."""
    optimizer, frozen = problems.local(exchange, delay=1), exchange.rank == 1
    problems.train(optimizer, range(2), exchange.rank)
    optimizer.param_groups[0]["params"][1].requires_grad_(not frozen)
    for step in (2, 3) if frozen else (2, 3, 4, 5):
        sends = step % 2 == 0 and not frozen
        with nullcontext() if sends else pytest.raises(SettingsError, match=r"\[1\] = float32 \[17, 19\], frozen"):
            problems.train(optimizer, [step], exchange.rank)
    optimizer.param_groups[0]["params"][1].requires_grad_(True)
    problems.train(optimizer, range(6, 8), exchange.rank)
    optimizer.flush()
    assert int(optimizer.replicator.round_number) == 4
    return optimizer.fingerprint(state=True)


@ranks.alike(2)
def test_inner_settings_are_compared_as_they_are_at_the_first_step(exchange):
    """Rank 0 gets its learning rate after construction."""
    first = exchange.rank == 0
    inner = functools.partial(torch.optim.SGD, lr=0.1 if first else 1, foreach=first)  # foreach changes no result
    optimizer = problems.local(exchange, inner=inner)
    optimizer.param_groups[0]["lr"] = torch.tensor(1.0) if first else 1
    problems.train(optimizer, range(1), exchange.rank)
