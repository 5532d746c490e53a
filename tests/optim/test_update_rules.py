"""Update rules: against the literal oracle and torch's own optimizers, their rounding, state, and settings."""

import math

import pytest
import torch
from torch.nn import Parameter

import oracle
import problems
import ranks
from demopt import SGD, AdamW, DeMo, Lion, Muon, Nesterov, Signum
from demopt.codec import chunk_group
from demopt.core.rounding import to_bfloat16
from demopt.core.rules import RULES, rule_of
from demopt.exchange import SingleRank

SHAPES = [(32, 16), (17, 19), (5, 40), (20,), (3, 2, 2), ()]
MATRICES = [(32, 16), (17, 19), (5, 40)]
STATEFUL = [update for update in RULES if RULES[update].moments]
OTHERS = [update for update in RULES if not RULES[update].signs_only]  # which route "owner" cannot carry


def make(update, exchange, eps=1e-3, **more):
    rule, shapes = AdamW(eps=eps) if update == "adamw" else update, MATRICES if RULES[update].whole_matrix else SHAPES
    return problems.demo(exchange, shapes, update=rule, **{"weight_decay": 0.1, **more})


@pytest.mark.parametrize(("values", "exact"), [("sign", None), ("2-bit", None), ("2-bit", False)])
@pytest.mark.parametrize("update", OTHERS)
def test_update_rule_on_integers_matches_oracle_within_rounding(update, values, exact):
    """8-bit bases and 11-bit operands give the update of float32 parameters to about a hundredth of its size."""
    more = {"values": values, "exact": exact, "weight_decay": 0.0, "eps": 0.05, "lr": 1.0, "momentum_decay": 0.5}
    found = ranks.threads(lambda each: problems.train(make(update, each, **more), range(4), each.rank), 3)
    problems.assert_replicas(found)
    fresh = make(update, SingleRank(), **more)
    truth, starts = oracle.Oracle(fresh.param_groups, 3, zero=0.02), problems.values(fresh)
    for step in range(4):
        truth.step([[g.double() for g in of_rank] for of_rank in problems.gradients_of_ranks(starts, step, 3)])
    rest = zip(found[0].parameters, truth.parameters, truth.undecided, starts, strict=True)
    for got, expected, undecided, start in rest:
        moved, wanted = (got - start)[~undecided].double(), (expected - start)[~undecided].double()
        assert float((moved - wanted).norm()) <= (0.05 if exact is None else 1e-3) * float(wanted.norm()) + 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("update", RULES)
def test_update_rule_and_rounding_ignore_block_size(update, chunks, dtype, monkeypatch):
    """The same bits if parameters are spread over many blocks; Muon never cuts a matrix."""

    def run():
        more = {"update": update, "values": "float32", "weight_decay": 0.1}
        optimizer = problems.demo(SingleRank(), [(200, 90), (70, 130)], dtype, **more)
        blocks = sum(len(group.blocks) for group in optimizer.replicator.wiring().chunk_groups)
        return blocks, problems.train(optimizer, range(3))

    few, whole = run()
    monkeypatch.setattr(chunk_group, "_BLOCK_ELEMENTS", chunks * 256 * 8)
    many, cut = run()
    assert problems.same_history(cut, whole)
    assert many > few or update == "muon"


@pytest.mark.filterwarnings("ignore:.*rank 1 differ")
@pytest.mark.parametrize("update", STATEFUL)
@ranks.alike(2)
def test_rule_state_comes_from_rank_0_at_first_and_after_a_resync(exchange, update):
    """As for initial weights, when only one rank has loaded a checkpoint."""

    optimizer, histories = make(update, exchange), []
    for first in (0, 2):
        for entry in optimizer.state.values():
            for name in RULES[update].moments + RULES[update].weights:
                entry[name].add_(exchange.rank + 1.0)
        if first:
            if exchange.rank:  # state that a script has dropped comes back
                optimizer.state.clear()
            optimizer.resync(0)
        histories.append(problems.train(optimizer, range(first, first + 2), exchange.rank))
    return histories


# Rounding to bfloat16: changes below its resolution are kept on average, with the same bits on all ranks


@pytest.mark.parametrize(
    "settings", [{}, {"kernels": "torch"}, {"update": "sgd", "values": "float32"}, {"update": "muon"}], ids=str
)
def test_weight_decay_below_the_resolution_of_bfloat16_is_kept_on_average(settings):
    """400 steps of weight decay only, 1e-4 each: a twentieth of the smallest change that rounding keeps."""
    parameter = Parameter(torch.ones(64, 80, dtype=torch.bfloat16))
    optimizer = DeMo([parameter], lr=1e-3, weight_decay=0.1, process_group=SingleRank(), chunk=16, **settings)
    for _ in range(400):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    weights = parameter.detach().float()  # rounded to the nearest, they would stay 1
    assert abs(float(weights.mean()) - math.exp(-0.04)) < 1e-3
    assert float(weights.std()) < 0.02


def test_to_bfloat16_takes_a_neighbour_and_keeps_what_bfloat16_holds():
    values = torch.cat([problems.draw((70_000,), 3), torch.tensor([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan])])
    rounded = values.clone()
    to_bfloat16(rounded.view(1, -1), 1, [(0, 1, 2, 0)])
    assert torch.equal(rounded[:-1], rounded[:-1].bfloat16().float())
    assert bool(rounded[-1].isnan())
    assert torch.equal(rounded[-6:-1], values[-6:-1])
    assert bool(((rounded - values)[:-3].abs() < 2.0**-7 * values[:-3].abs() + 1e-30).all())
    again = rounded.clone()
    to_bfloat16(again.view(1, -1), 3, [(0, 1, 4, 0)])
    assert torch.equal(again[:-1], rounded[:-1])


@pytest.mark.parametrize("before", RULES)
def test_update_rule_can_change_and_starts_from_zero(before):
    for after in RULES:
        matrices = problems.parameters(MATRICES)
        optimizer = DeMo(matrices, **{**problems.SMALL, "update": before})
        problems.train(optimizer, range(2))
        fresh = DeMo(problems.twins(optimizer), **{**problems.SMALL, "update": after})
        for old, new in zip(matrices, problems.all_parameters(fresh), strict=True):
            fresh.state[new]["momentum"].copy_(optimizer.state[old]["momentum"])
        optimizer.param_groups[0]["update"] = after
        resumed = DeMo(problems.twins(optimizer), **problems.SMALL)
        resumed.load_state_dict(optimizer.state_dict())  # changed, but not yet stepped
        if after != before:
            expected = problems.train(fresh, range(2, 4))
            assert problems.same_history(problems.train(optimizer, range(2, 4)), expected)
            assert problems.same_history(problems.train(resumed, range(2, 4)), expected)
            own = RULES[after].moments + RULES[after].weights
            assert set(optimizer.state[matrices[0]]) == {"momentum", "step", "saved_by", *own}


def test_adamw_bias_correction_counts_per_parameter():
    """A parameter that is unfrozen late begins as at the first step, not with a second moment of almost zero."""
    late, other = problems.parameters([(16, 16), (16, 16)])
    late.requires_grad_(False)
    optimizer = DeMo([late, other], **{**problems.SMALL, "update": AdamW(beta2=0.999), "lr": 1.0})
    problems.train(optimizer, range(10))
    late.requires_grad_(True)
    before = late.detach().clone()
    problems.train(optimizer, range(10, 11))
    assert float((late.detach() - before).abs().max()) <= 1.001
    torch.testing.assert_close(optimizer.state[late]["exp_avg_sq_weight"], torch.full((1, 1), 0.001))


ADAMW = {"lr": 0.1, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("update", "settings", "theirs"),
    [
        (SGD(), {"lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1)),
        (Nesterov(beta=0.8), {"lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True)),
        (AdamW(beta2=0.95, eps=1e-4), ADAMW, lambda p: torch.optim.AdamW(p, betas=(0.0, 0.95), eps=1e-4, **ADAMW)),
    ],
    ids=["sgd", "nesterov", "adamw without its first moment"],
)
def test_update_rule_equals_torchs_optimizer_if_everything_is_sent(update, settings, theirs):
    one, other = (Parameter(problems.draw((24, 16), 1, dtype=torch.float64)) for _ in range(2))
    ours = DeMo([one], momentum_decay=0.0, top_k=64, update=update, chunk=8, values="float64", **settings)
    yours = theirs([other])
    for step in range(5):
        one.grad = other.grad = problems.draw((24, 16), 2, step, dtype=torch.float64)
        ours.step()
        yours.step()
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(), (5,), (2, 2, 2, 2)])
def test_muon_refuses_other_shapes_than_matrices(shape):
    """At construction, in an added group, and when a group's rule changes; each time nothing else changes."""
    says = rf"muon.*{'.*'.join(map(str, shape))}.*group of their own"
    with pytest.raises(ValueError, match=says):
        problems.demo(shapes=[(4, 4), shape], update="muon")
    optimizer = problems.demo(SingleRank(), [(4, 4)], update="muon")
    with pytest.raises(ValueError, match=says):
        optimizer.add_param_group({"params": problems.parameters([shape])})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": problems.parameters([shape]), "update": "adamw"})
    optimizer.param_groups[1]["update"] = "muon"
    with problems.unchanged(optimizer), pytest.raises(ValueError, match=says):
        problems.train(optimizer, range(1))


@pytest.mark.parametrize(
    ("rule", "name", "value", "limits"),
    [
        *((Lion, "beta1", 1.0, "[0, 1)"), (Lion, "beta2", -0.1, "[0, 1)"), (Nesterov, "beta", 1, "[0, 1)")),
        *((Nesterov, "beta", "0.9", "give a number"), (AdamW, "beta2", None, "give a number")),
        *((AdamW, "beta2", math.nan, "[0, 1)"), (AdamW, "eps", math.nan, "[1e-30, inf)")),
        (AdamW, "eps", 0.0, "[1e-30, inf)"),
    ],
)
def test_settings_of_rules_have_limits(rule, name, value, limits):
    with pytest.raises((ValueError, TypeError)) as caught:
        rule(**{name: value})
    assert str(caught.value).startswith(f"{name} of {rule.__name__} is {value!r}; ")
    assert limits in str(caught.value)


RULES_SHOWN = r"choose one of 'sgd', .* such as demopt.Lion\(beta1=0.9\)"
SETTINGS_SHOWN = r"write its settings as in 'lion\(beta1=0.9, beta2=0.99\)'"


@pytest.mark.parametrize(
    ("update", "error", "says"),
    [
        *((text, ValueError, RULES_SHOWN) for text in ("adam", "lion(")),
        *((f"lion({words})", ValueError, SETTINGS_SHOWN) for words in ("beta=1", "0.5", "beta1=x", "beta1=1, beta1=1")),
        (Lion, TypeError, r"the class Lion; give an object: demopt\.Lion\(\)"),
        (torch.optim.AdamW, TypeError, "torch.*AdamW.*choose one of"),
        (3, TypeError, "update is 3; choose one of"),
    ],
    ids=str,
)
def test_what_is_no_rule_is_refused(update, error, says):
    with pytest.raises(error, match=f"(?s){says}"):
        DeMo(problems.parameters([(4, 4)]), update=update)


WRITTEN = [
    (SGD(), "sgd"),
    (Muon(), "muon"),
    (Signum(), "signum"),
    (Lion(), "lion"),
    (Lion(beta1=0.9, beta2=0.99), "lion"),
    (Lion(beta1=0), "lion(beta1=0.0, beta2=0.99)"),
    (Lion(beta1=torch.tensor(0.5)), "lion(beta1=0.5, beta2=0.99)"),
    (Nesterov(beta=0.1 + 0.2), "nesterov(beta=0.30000000000000004)"),
    (AdamW(eps=1e-6), "adamw(beta2=0.99, eps=1e-06)"),
    ("adamw", "adamw"),
    ("adamw()", "adamw"),
    (" lion( beta2=.99,beta1=.9 ) ", "lion"),
    ("lion(beta2=5e-1)", "lion(beta1=0.9, beta2=0.5)"),
]


@pytest.mark.parametrize(("update", "text"), WRITTEN, ids=[str(update) for update, _ in WRITTEN])
def test_groups_and_checkpoints_hold_the_rule_as_text(update, text):
    given = {"params": problems.parameters([(4, 4)]), "update": update}
    for optimizer in (DeMo(problems.parameters([(4, 4)]), update=update), DeMo([given]), DeMo([given])):
        assert optimizer.param_groups[0]["update"] == text
    optimizer.param_groups[0]["update"] = update  # as a schedule may
    assert given["update"] is update, "a user's dictionary stays as it was"
    resumed = DeMo(problems.parameters([(4, 4)]))
    resumed.load_state_dict(problems.by_file(optimizer.state_dict()))
    assert resumed.param_groups[0]["update"] == text
    assert rule_of(text) == rule_of(update)
    assert str(rule_of(text)) == text
