"""Inner optimizers beyond torch's: closures, second copies of weights, own communication, settings, state in groups."""

import copy
import enum
import itertools
import math
import threading
from collections import deque
from contextlib import nullcontext
from fractions import Fraction
from functools import partial

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

import problems
import ranks
from demopt import FolderExchange, LocalDeMo, SettingsError
from demopt.exchange import Collective, SingleRank
from demopt.optim.muon import BatchedMuon
from demopt.runs.store import ObjectStore
from problems import NEEDS_MUON
from problems import fingerprints as train

# Closures (promises/test_step_inputs.py has those of ordinary optimizers)


class Sam(torch.optim.SGD):
    """Climbs along the gradient, has the closure compute the one there, and descends from where it was."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.5)
        self.base = torch.optim.SGD(self.param_groups)

    @torch.no_grad()
    def step(self, closure=None):
        climbs = [0.05 * p.grad for p in self.param_groups[0]["params"]]
        torch._foreach_add_(self.param_groups[0]["params"], climbs)
        loss = closure()
        torch._foreach_sub_(self.param_groups[0]["params"], climbs)
        self.base.step()
        return loss


@ranks.alike(2)
def test_sam_gets_the_closure_in_its_step(exchange):
    optimizer = problems.local(exchange, [(8, 8)], Sam, sync_every=2)
    (weight,), losses, x = problems.all_parameters(optimizer), [], problems.draw((4, 8), exchange.rank)

    def closure():
        optimizer.zero_grad()
        loss = (x @ weight - x).square().mean()
        loss.backward()
        return loss.detach()

    for _ in range(6):
        first = float(closure())
        losses.append(float(optimizer.step(closure)))
        assert losses[-1] > first  # of the place that it has climbed to
    assert losses[-1] < losses[0]
    return optimizer.fingerprint()


def test_state_of_an_optimizer_inside_an_inner_one_is_told_as_not_saved():
    optimizer = problems.local(inner=Sam)
    problems.set_gradients(problems.all_parameters(optimizer), 0)
    optimizer.step(lambda: 0.0)
    with pytest.warns(UserWarning, match="Sam holds a SGD, whose state is not in its own: it is not saved"):
        optimizer.state_dict()


class Lookahead(torch.optim.SGD):
    """Every second step, goes halfway back to slow weights; `lazily` copies those the first time."""

    def __init__(self, parameters, lazily=True):
        super().__init__(parameters, lr=0.1)
        self.steps = 0
        for p in self.param_groups[0]["params"] if not lazily else ():
            self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.steps += 1
        for p in self.param_groups[0]["params"] if self.steps % 2 == 0 else ():
            slow = self.state[p].setdefault("slow", p.detach().clone())
            p.copy_(slow.lerp_(p, 0.5))


class Holding(torch.optim.SGD):
    """As timm's Lookahead: the optimizer inside it has the state."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.base = Lookahead(self.param_groups[0]["params"])

    def step(self, closure=None):
        self.base.step()


#: Like schedule-free optimizers; and like a wrapper that keeps its own and another optimizer's state apart.
TwoViews = type("TwoViews", (torch.optim.SGD,), dict.fromkeys(("train", "eval"), lambda _: None))
Bare = type("Bare", (torch.optim.SGD,), {"__init__": lambda *_: None})  # as Opacus's
MirrorMADGRAD = type("MirrorMADGRAD", (torch.optim.SGD,), {})
OtherState = type("OtherState", (torch.optim.SGD,), {"state_dict": lambda _: {"mine": {}, "base": {}}})


@pytest.mark.parametrize(
    ("inner", "told"),
    [
        (lambda p: Lookahead(p, lazily=False), r"Lookahead keeps a second copy of the weights \(its state 'slow'\)"),
        (TwoViews, r"inner is a TwoViews, whose train\(\) and eval\(\) switch .*schedule-free"),
        (Bare, "inner is a Bare, which wraps an optimizer without torch's constructor"),
        (OtherState, "inner is a OtherState, whose state_dict has mine, base and no state by"),
        (MirrorMADGRAD, "inner is a MirrorMADGRAD, which keeps a second copy of the weights, which rounds do not"),
    ],
)
def test_optimizers_with_two_copies_of_the_weights_or_another_state_are_refused(inner, told):
    with pytest.raises(TypeError, match=told):
        problems.local(inner=inner)


class FromFirst(torch.optim.SGD):
    """Goes on from a copy of the weights before its first step, as MADGRAD does."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            held = self.state[p]
            if not held:
                held.update(x0=p.clone(), s=torch.zeros_like(p))
            held["s"].add_(p.grad, alpha=0.1)
            p.lerp_(held["x0"] - held["s"], 0.1)


def test_copy_of_the_weights_before_the_first_step_is_noticed():
    optimizer = problems.local(inner=FromFirst, sync_every=5)
    with pytest.warns(UserWarning, match=r"FromFirst keeps a second copy of the weights \(its state 'x0'\)"):
        train(optimizer, range(2))


def test_moment_that_is_zero_as_the_first_weights_were_is_no_copy_of_them():
    class Later(torch.optim.SGD):  # has a second moment from a later step on, as Sophia its Hessian
        def step(self, closure=None):
            super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["hessian"] = torch.zeros_like(parameter)

    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = LocalDeMo(Later([parameter], lr=0.1), sync_every=5)
    for _ in range(3):
        parameter.grad = torch.arange(4.0)
        optimizer.step()


@pytest.mark.parametrize("inner", [Lookahead, Holding])
def test_copy_of_the_weights_that_comes_later_is_noticed_and_moments_and_outputs_are_none(inner):
    optimizer = problems.local(inner=inner, sync_every=5)
    train(optimizer, range(1))
    with pytest.warns(UserWarning, match=f"{inner.__name__} keeps a second copy of the weights"):
        train(optimizer, range(1, 2))
    train(optimizer, range(2, 6))  # and it is said once
    for silent in (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.ASGD):
        train(problems.local(inner=silent, sync_every=2), range(4))


class Apart(torch.optim.SGD):
    """Has state of no parameter, as MADGRAD; state outside `state`, as Ranger21; and no given rate, as Adafactor."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["lr"] = None
        self.state["k"], self.steps = torch.zeros(1), 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        self.state["k"] += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 * float(self.state["k"]) / self.steps**2)
            self.state[p].update(before=p.data, cache={})  # the same memory, as SAM's: no copy; and an empty dict

    def state_dict(self):
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = state_dict.pop("steps")
        super().load_state_dict(state_dict)


def test_state_of_an_inner_optimizer_apart_from_its_parameters_is_resumed():
    one, other = (problems.local(inner=Apart, sync_every=2) for _ in range(2))
    train(one, range(4))
    other.load_state_dict(problems.by_file(one.state_dict()))
    assert (other.inner[0].steps, other.inner[0].state["k"]) == (4, 4)
    assert all(other.inner[0].state[parameter]["cache"] == {} for parameter in problems.all_parameters(other))
    assert train(other, range(4, 8)) == train(one, range(4, 8))
    with pytest.raises(RuntimeError, match="ranks would drift apart"):
        one.inner[0].step()
    state = one.state_dict()
    state["state"][0]["demopt.in_optimizer"] = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"its entry 'demopt\.in_optimizer' cannot be read"):
        other.load_state_dict(state)
    one.inner[0].state["k"] = lambda: 0
    with pytest.warns(UserWarning, match="Apart has state beside that of parameters, which is not saved"):
        one.state_dict()


def test_numbers_in_the_state_of_an_inner_optimizer_are_resumed_and_lent_in_their_precision():
    shapes = [(4, 2), ()]
    mine, *others = (LocalDeMo(torch.optim.NAdam(problems.parameters(shapes, torch.bfloat16))) for _ in range(3))
    train(mine, range(5))
    others[0].load_state_dict(problems.by_file(mine.state_dict()))
    others[1]._inner.borrow(mine._inner.moments())
    train(others[1], range(1))
    for each, name in itertools.product(others, ("0.mu_product", "1.mu_product")):
        assert torch.equal(each._inner.moments()[name], mine._inner.moments()[name])
    assert others[0].inner[0].state[others[0].param_groups[0]["params"][1]]["exp_avg"].dtype == torch.bfloat16


def test_learning_rate_that_a_closure_sets_is_the_users_and_not_the_optimizers():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = LocalDeMo(torch.optim.AdamW([weight], lr=0.1), sync_every=1)

    def closure(rate, gradient=1.0):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.full_like(weight, gradient)
        return 1.0

    for gradient in (1.0, math.nan):
        optimizer.step(lambda gradient=gradient: closure(0.01, gradient))
    assert optimizer.param_groups[0]["lr"] == 0.01, "after a restart, too"
    assert optimizer._inner.facts() == LocalDeMo(torch.optim.AdamW([weight], lr=0.01))._inner.facts()


def test_closure_of_several_inner_optimizers_is_called_once_and_no_group_can_be_given_to_all_of_them():
    found, calls = [], []
    for takes_closure in (False, True):
        weights = problems.parameters([(4, 4), (4,)])
        optimizer = LocalDeMo([problems.SGD([each]) for each in weights], sync_every=1, process_group=SingleRank())

        def closure(weights=weights):
            calls.append(problems.set_gradients(weights, 0))
            return 5.0

        loss = optimizer.step(closure) if takes_closure else (closure(), optimizer.step())[0]
        found.append((loss, optimizer.fingerprint()))
    assert found[0] == found[1]
    assert len(calls) == 2
    with pytest.raises(ValueError, match=r"add the group to one of optimizer\.inner"):
        optimizer.add_param_group({"params": problems.parameters([(3,)])})


@pytest.mark.parametrize("frozen", [False, True])
@ranks.alike(2)
def test_group_that_an_inner_optimizer_was_given_is_in_every_ranks_next_round_and_in_states(exchange, frozen):
    def grown(group, steps):
        *first, last = problems.parameters([(4, 4), (4,), (2, 2)])
        optimizer = LocalDeMo([problems.SGD([each]) for each in first], sync_every=1, process_group=group)
        train(optimizer, range(steps), exchange.rank)
        optimizer.inner[1].add_param_group({"params": [last.requires_grad_(not frozen)]})
        return optimizer

    optimizer = grown(exchange, steps=2)
    if exchange.rank == 0:
        grown(problems.OneOf(0, 2), steps=0).load_state_dict(optimizer.state_dict())
    optimizer.finish_round()
    optimizer.inner[1].add_param_group({"params": problems.parameters([(3, 3)])})
    if exchange.rank == 0:
        optimizer.state_dict()
    optimizer.resync()
    return optimizer.fingerprint()


def test_rates_of_a_scheduler_and_those_written_after_an_inner_optimizer_was_loaded_count():
    optimizer = problems.local(sync_every=3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(optimizer, range(1))
    schedule.step()
    assert optimizer.inner[0].param_groups[0]["lr"] == 0.05
    optimizer.inner[0].load_state_dict(optimizer.inner[0].state_dict())
    with pytest.raises(RuntimeError, match="has lost parameters"):
        optimizer.param_groups = []
    with pytest.raises(RuntimeError, match=r"are those of optimizer\.inner"):
        LocalDeMo([torch.optim.SGD([each]) for each in problems.parameters([(3,), (4,)])]).param_groups = []
    optimizer.param_groups[0]["lr"] = 0.0
    with problems.unchanged(optimizer):
        train(optimizer, range(1, 2))


#: How an inner optimizer communicates each gradient before its step, as Muon's and nanochat's do.
COLLECTIVES = {
    "all_reduce": lambda gradient: dist.all_reduce(gradient),
    "broadcast": lambda gradient: dist.broadcast(gradient, 0),
    "all_gather": lambda gradient: dist.all_gather([torch.empty_like(gradient) for _ in range(2)], gradient),
    "nothing": lambda _: None,
}


class Communicating(torch.optim.SGD):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            COLLECTIVES[self.collective](parameter.grad)
        super().step()


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("collective", COLLECTIVES)
@ranks.each(2)
def test_inner_optimizer_that_communicates_is_noticed_by_its_collectives(rank, collective, delay):
    optimizer = problems.local(inner=lambda p: Communicating(p, lr=0.1), sync_every=2, delay=delay)
    optimizer.inner[0].collective = collective
    heard = problems.warned(lambda: train(optimizer, range(6), rank))
    told = ["the step of Communicating communicates between the ranks" in text for text in heard]
    assert told == [True] * (collective != "nothing" and rank == 0)


@ranks.each(2)
def test_inner_optimizer_beside_which_another_thread_exchanges_does_not_communicate(rank):
    beside = Collective(dist.new_group([0, 1]))

    class Meanwhile(torch.optim.SGD):
        def step(self, closure=None):
            thread = threading.Thread(target=beside.all_gather, args=(torch.zeros(1, dtype=torch.uint8),))
            thread.start()
            thread.join()
            super().step(closure)

    optimizer = problems.local(inner=lambda p: Meanwhile(p, lr=0.1), sync_every=2)
    assert problems.warned(lambda: train(optimizer, range(6), rank)) == []


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("at", [0, 1, 2])
@ranks.alike(2)
def test_other_parameters_that_begin_to_train_on_one_rank_are_named(exchange, at, named):
    """All have one shape, so that the layouts are equal."""
    parameters = problems.parameters([(4, 4)] * 3)
    for frozen in parameters[1:]:
        frozen.requires_grad_(False)
    given = [(f"layer {number}", each) for number, each in enumerate(parameters)] if named else parameters
    optimizer = LocalDeMo(problems.SGD(given), sync_every=2, process_group=exchange)

    def thaw(step):
        parameters[1 + exchange.rank].requires_grad_(step >= at)

    said = r"^rank 1 has frozen parameters of param_groups\[0\] = \[1\] where rank 0 has \[2\]$"
    with pytest.raises(SettingsError, match=said):
        problems.fingerprints(optimizer, range(4), exchange.rank, thaw)


@ranks.alike(2)
def test_parameters_that_one_rank_alone_has_frozen_are_named(exchange):
    """Not the next parameter, which takes their place among those that train."""
    first, second = problems.parameters([(4, 4), (3,)])
    first.requires_grad_(exchange.rank == 0)
    optimizer = LocalDeMo(problems.SGD([first, second]), process_group=exchange)
    with pytest.raises(SettingsError, match=r"frozen parameters of param_groups\[0\] = \[0\] where rank 0 has \[\]"):
        problems.fingerprints(optimizer, range(1), exchange.rank)


@pytest.mark.parametrize("delay", [0, 1])
@ranks.alike(2)
def test_group_that_is_added_between_two_rounds_trains_from_then_on(exchange, delay):
    first, second = problems.parameters([(32, 16), (20,)])
    optimizer = LocalDeMo(problems.ADAMW([first]), sync_every=3, delay=delay, process_group=exchange)
    marks = train(optimizer, range(4), exchange.rank)
    before = [first.detach().clone(), second.detach().clone()]
    optimizer.add_param_group({"params": [second]})
    assert problems.same(problems.values(optimizer), before), "local steps since the round are kept"
    marks += train(optimizer, range(4, 6), exchange.rank)
    assert not torch.equal(second, before[1])
    assert optimizer.inner[0].param_groups[1] is optimizer.param_groups[1]
    marks += train(optimizer, range(6, 12), exchange.rank)
    assert len({*marks}) > 3
    return marks


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo", "in a folder"])
@ranks.each(2)
def test_parameters_that_were_replaced_are_noticed_at_the_second_round(rank, kind):
    """Each rank has a folder of its own."""
    torch.manual_seed(0)
    model, exchange = nn.Linear(4, 4), FolderExchange(ObjectStore(), late=0.0, patience=0.0)
    group = exchange if kind == "in a folder" else None
    optimizer = problems.optimizer_of(kind, model.parameters(), process_group=group)
    model.weight, model.bias = (nn.Parameter(p.detach().clone()) for p in (model.weight, model.bias))
    for step in range(4):
        model(torch.ones(2, 4)).sum().backward()
        if (rank == 0 or kind == "in a folder") and step == (1 if kind == "DeMo" else 3):
            with pytest.warns(UserWarning, match="no parameter of this optimizer has had a gradient"):
                optimizer.step()
        else:
            optimizer.step()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo", "delay"])
@ranks.alike(2)
def test_gradients_that_come_late_on_one_rank_or_after_freezing_cause_no_warning(exchange, kind, frozen):
    """Rank 0 has none in the first rounds, as with images without boxes, or nothing trains yet."""
    settings = {} if kind == "DeMo" else {"sync_every": 1, "delay": int(kind == "delay")}
    parameters = [each.requires_grad_(not frozen) for each in problems.parameters(problems.FEW)]
    optimizer = problems.optimizer_of(kind, parameters, process_group=exchange, **settings)
    for step in range(4):
        if step == 3:
            parameters = [each.requires_grad_() for each in parameters]
        if step == 3 or exchange.rank == 1:
            problems.set_gradients(parameters, step, exchange.rank)
        optimizer.step()  # a warning would be an error


@pytest.mark.parametrize("kind", ["autocast", "parametrized", "spectral_norm", "compiled"])
def test_swapped_weights_leave_no_cache_of_torch_stale(kind):
    """shared(), its end, a round, loading: each time the model computes with the weights that it has then."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    if kind == "parametrized":
        parametrize.register_parametrization(model, "weight", nn.Tanh())
    elif kind == "spectral_norm":
        nn.utils.parametrizations.spectral_norm(model)
    run, x = torch.compile(model, backend="eager") if kind == "compiled" else model, torch.randn(4, 16)
    optimizer = LocalDeMo(problems.SGD(model.parameters()), sync_every=4)

    def both():
        return copy.deepcopy(model.state_dict()), run(x).detach().clone()

    def caching():
        return torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else parametrize.cached()

    saved = copy.deepcopy(optimizer.state_dict())
    train(optimizer, range(3))
    with caching():
        found = [both()]
        with optimizer.shared():
            found.append(both())
        for change in (int, optimizer.finish_round, optimizer.resync, lambda: optimizer.load_state_dict(saved)):
            change()
            found.append(both())
    for state, got in found:
        model.load_state_dict(state)
        with caching():  # another cache, which is empty
            assert torch.equal(got, model(x))
    assert len({float(got.sum()) for _, got in found}) >= 3


class Adapting(torch.optim.SGD):
    """Keeps state in its group: a counter, the d of Prodigy, which adapts to gradients, a list, and a tensor."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.param_groups[0].update(d=1e-6, seen=[0, 0.5], norms=torch.zeros(2))

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        norm = float(sum(p.grad.norm() for p in group["params"] if p.grad is not None))
        group["step"] = group.get("step", 0) + 1
        group["d"] = max(group["d"], norm * 1e-3)
        group["seen"][0] = group["step"]
        group["norms"].add_(norm)
        for parameter in group["params"]:
            self.state[parameter]["in_group"] = group["step"]
        rate = group["lr"]
        group["lr"] = rate * group["d"]
        super().step()
        group["lr"] = rate


def make(exchange, lr=0.1, **settings):
    return problems.local(exchange, inner=lambda p: Adapting(p, lr), **{"sync_every": 2, **settings})


def adapted(optimizer):
    group = optimizer.inner[0].param_groups[0]
    return [group["step"], group["d"], group["seen"], optimizer.inner[0].state[group["params"][0]]["in_group"]]


@pytest.mark.filterwarnings("ignore:rank 0 received .* bytes of states")
@pytest.mark.parametrize("how", ["a file per rank", "a file of early 0.3.0", "consolidated", "deepcopy"])
def test_state_in_groups_is_each_ranks_own_and_resumed_and_is_no_setting_then(how):
    box = {}

    def work(exchange):
        optimizer = make(exchange)
        train(optimizer, range(4), exchange.rank)
        if how == "consolidated":
            optimizer.consolidate_state_dict()
        box[exchange.rank] = saved = copy.deepcopy(optimizer.state_dict())
        if how == "consolidated":
            exchange.all_gather(torch.zeros(8, dtype=torch.uint8))
            saved = box[0]
        for entry in saved["state"].values() if how == "a file of early 0.3.0" else ():
            entry["own.in_group"], entry["in_group"] = entry.pop("in_group"), entry.pop("demopt.in_group")
        if how == "deepcopy":
            again = copy.deepcopy(optimizer)
            again.regroup(exchange)
        else:
            again = make(exchange)
            again.load_state_dict(saved)
        assert adapted(again)[:2] == adapted(optimizer)[:2]
        assert train(again, range(4, 7), exchange.rank) == train(optimizer, range(4, 7), exchange.rank)
        return adapted(again)

    first, second = ranks.threads(work, 2)
    assert first[1] != second[1]


@pytest.mark.filterwarnings("ignore:rank 0 received .* bytes of states")
def test_state_in_the_group_of_one_rank_is_no_setting_of_another_that_loads_a_consolidated_state():
    """As Prodigy's d, which has not changed yet on a rank without gradients."""
    box = {}

    def work(exchange):
        optimizer, again = make(exchange), make(exchange)
        parameters = problems.all_parameters(optimizer)
        for step in range(4):
            problems.set_gradients(parameters, step, exchange.rank)
            for parameter in parameters if exchange.rank else ():
                parameter.grad.zero_()
            optimizer.step()
        optimizer.consolidate_state_dict()
        box[exchange.rank] = copy.deepcopy(optimizer.state_dict())
        exchange.all_gather(torch.zeros(8, dtype=torch.uint8))
        again.load_state_dict(box[0])
        assert adapted(again)[:2] == adapted(optimizer)[:2]
        assert train(again, range(4, 7), exchange.rank) == train(optimizer, range(4, 7), exchange.rank)
        return again.param_groups[0]["d"]

    first, second = ranks.threads(work, 2)
    assert first > second


def test_state_in_a_group_that_has_just_restarted_is_saved_as_absent():
    optimizer, again = make(None), make(None)
    for step, factor in enumerate([1.0, math.nan]):
        problems.set_gradients(problems.all_parameters(optimizer), step)
        problems.all_parameters(optimizer)[0].grad.mul_(factor)
        optimizer.step()
    again.load_state_dict(problems.by_file(optimizer.state_dict()))
    assert "step" not in {*optimizer.param_groups[0], *again.param_groups[0]}
    assert train(again, range(2, 6)) == train(optimizer, range(2, 6))


def test_state_that_is_born_in_a_group_and_did_not_come_along_is_told():
    """As from torch.distributed.checkpoint, which asks for the names that a new optimizer has."""
    one, other = make(None), make(None)
    train(one, range(2))
    one.inner[0].register_step_post_hook(
        lambda inner, *_: inner.param_groups[0].setdefault("sums", torch.zeros(2)).add_(1)
    )
    train(one, range(2, 4))
    state = one.state_dict()
    del state["param_groups"][0]["sums"]
    with pytest.warns(UserWarning, match="the state lacks sums of an inner optimizer's group, which begins anew"):
        other.load_state_dict(state)


@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adafactor])
def test_state_of_another_inner_optimizer_is_refused_and_changes_none_of_them(other):
    def trained(second, lr):
        optimizer = problems.local(inner=lambda p: [torch.optim.AdamW(p[:2], lr=lr), second(p[2:], lr=lr)])
        train(optimizer, range(2))
        return optimizer

    optimizer, told = trained(other, 0.1), rf"not of these inner optimizers \(AdamW, {other.__name__}\).*groups lack"
    with pytest.raises(ValueError, match=told):
        optimizer.load_state_dict(trained(torch.optim.AdamW, 0.5).state_dict())
    damaged = optimizer.state_dict()
    damaged["state"][0]["step"] = 10**400
    with pytest.raises(ValueError, match=r"not of these inner optimizers .*OverflowError"):
        optimizer.load_state_dict(damaged)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    train(optimizer, range(2, 4))


KINDS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True, foreach=True),
    "SGD": lambda parameters: torch.optim.SGD([{"params": [each]} for each in parameters], lr=0.1, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "BatchedMuon": lambda parameters: BatchedMuon(parameters, lr=0.1),
}


@pytest.mark.filterwarnings("ignore:the state of a parameter of shape .* entries that were saved")
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(
    ("kind", "name", "change", "told"),
    [
        ("AdamW", "step", None, r"not of these inner optimizers \(AdamW\): KeyError\('step'\)"),
        ("AdamW", "exp_avg", None, "of parameter 1 lacks exp_avg, which AdamW needs"),
        ("AdamW", "max_exp_avg_sq", None, "of parameter 1 lacks max_exp_avg_sq, which"),
        ("AdamW", "step", lambda held: held.expand(2), r"has step of shape \[2\]; AdamW needs \[\]"),
        ("AdamW", "exp_avg_sq", lambda held: held[:1], r"has exp_avg_sq of shape \[1, 2\]; AdamW needs \[3, 2\]"),
        ("SGD", "momentum_buffer", lambda _: "text", "has momentum_buffer of type str; SGD needs a tensor"),
        ("Adafactor", "row_var", None, "lacks row_var, which"),
        pytest.param(
            *("BatchedMuon", "momentum_buffer", lambda held: held.T, r"of shape \[2, 3\]; BatchedMuon needs \[3, 2\]"),
            marks=NEEDS_MUON,
        ),
    ],
)
def test_state_of_an_inner_optimizer_that_its_step_cannot_use_is_refused_as_it_loads(kind, name, change, told, used):
    def made(steps):
        optimizer = problems.local(SingleRank(), [(7, 5), (3, 2)], KINDS[kind], sync_every=9)
        problems.fingerprints(optimizer, range(steps))
        return optimizer

    state, optimizer = made(3).own_state_dict(), made(2 * used)
    last = len(state["state"]) - 1  # in a group of its own, or in the only one
    entry = state["state"][last]
    held = entry.pop(name)
    if change:
        entry[name] = change(held)
    with problems.unchanged(optimizer), pytest.raises(ValueError, match=told):
        optimizer.load_state_dict(state)
    problems.fingerprints(optimizer, [5])


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adafactor", pytest.param("BatchedMuon", marks=NEEDS_MUON)])
def test_state_of_an_inner_optimizer_loads_also_where_some_parameters_have_none(kind):
    optimizer = problems.local(SingleRank(), [(7, 5), (3, 2)], KINDS[kind], sync_every=9)
    first, second = problems.all_parameters(optimizer)
    second.requires_grad_(False)
    first.grad = torch.ones_like(first)
    optimizer.step()
    other = problems.local(SingleRank(), [(7, 5), (3, 2)], KINDS[kind], sync_every=9)
    other.load_state_dict(optimizer.own_state_dict())
    problems.fingerprints(other, [1])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, problems.by_pickle])
def test_copy_goes_on_like_the_original_also_with_state_in_groups(duplicate):
    optimizer = make(None, sync_every=3, samples=8)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    train(optimizer, range(4))
    twin = duplicate(optimizer)
    assert (twin.samples, adapted(twin)) == (8, adapted(optimizer))
    assert twin._inner.facts() == optimizer._inner.facts()
    with problems.unchanged(optimizer):  # a copy steps itself
        marks = train(twin, range(4, 9))
    assert train(optimizer, range(4, 9)) == marks
    assert problems.same(problems.values(twin), problems.values(optimizer))


@ranks.alike(2)
def test_state_in_groups_restarts_with_the_rest_after_a_gradient_that_is_not_finite(exchange):
    optimizer = make(exchange)

    def spoil(step):
        if (exchange.rank, step) == (1, 4):
            problems.all_parameters(optimizer)[0].grad.fill_(torch.inf)

    train(optimizer, range(6), exchange.rank, spoil)
    group = optimizer.param_groups[0]
    assert (("step" in group, group["d"], group["seen"]) == (False, 1e-6, [0, 0.5])) == (exchange.rank == 1)
    return train(optimizer, range(6, 8), exchange.rank)


class Signs(torch.optim.Optimizer):
    """Moves by the signs of a momentum, as Lion: its steps are finite where that is not. It counts in the group."""

    def __init__(self, parameters, lr=0.01, counts=True, **masks):
        super().__init__(parameters, {"lr": lr})
        self.counts = counts
        for parameter in [parameter for group in self.param_groups for parameter in group["params"] if masks]:
            self.state[parameter]["mask"] = torch.ones_like(parameter).triu_().bool()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if self.counts:
                group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 / group.get("step", 2))
                move = momentum.nan_to_num().sign() * self.state[parameter].get("mask", 1)
                parameter.sub_(group["lr"] * move)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@ranks.alike(2)
def test_momentum_that_is_not_finite_behind_finite_steps_skips_the_round_and_restarts(exchange, bad, delay):
    parameters = problems.parameters([(4, 4)])
    optimizer = LocalDeMo(Signs(parameters), sync_every=2, delay=delay, process_group=exchange)
    skipped = 0
    for step in range(8):
        problems.set_gradients(parameters, step, exchange.rank)
        if (exchange.rank, step) == (1, 2):
            parameters[0].grad.fill_(bad)
        optimizer.step()
        skipped += optimizer.stats.skipped
    optimizer.flush()
    state = optimizer.inner[0].state[parameters[0]]
    assert state["momentum"].isfinite().all()
    assert optimizer.param_groups[0]["step"] == (8 if exchange.rank == 0 else 4)
    return skipped == 1, optimizer.fingerprint()


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    ("change", "lr", "said"),
    [
        (None, 0.1, "sync_every = 3 where rank 0 has 2"),
        (lambda group: group.update(lr=0.2), 0.1, "['lr'] = 0.2 where rank 0 has 0.1"),
        (lambda group: group.update(lr=torch.tensor(0.25)), torch.tensor(0.5), "['lr'] = 0.25 where rank 0 has 0.5"),
        (lambda group: group["lr"].fill_(0.25), torch.tensor(0.5), "['lr'] = 0.25 where rank 0 has 0.5"),
        (lambda group: group.update(d=1.0), 0.1, "['d'] = 1.0 where rank 0 has 1e-06"),
        (lambda group: group.update(nesterov=True), 0.1, "['nesterov'] = True where rank 0 has False"),
        (lambda group: group.update(tags=("a", 1)), 0.1, "['tags'] = ('a', 1.0) where rank 0 has nothing"),
    ],
)
@ranks.alike(2)
def test_a_setting_of_one_rank_is_named_at_the_first_step_and_where_it_changes(exchange, change, lr, said, delay, at):
    optimizer = make(exchange, copy.deepcopy(lr), delay=delay)
    train(optimizer, range(at), exchange.rank)
    if exchange.rank == 1:
        optimizer.sync_every = 3 if change is None else 2
        (change or dict)(optimizer.inner[0].param_groups[0])
    with pytest.raises(SettingsError) as refused:
        train(optimizer, range(at, 10), exchange.rank)
    assert str(refused.value) == f"rank 1 has {'inner param_groups[0]' if change else ''}{said}"


class Plain:
    """An object whose text contains its address."""


def _looped():
    found = [1]
    found.append(found)
    return found


@pytest.mark.parametrize(
    "pair",
    [
        *((lambda step: step, lambda step: step + 1), (Plain(), Plain()), ([Plain(), 1], [Plain(), 1])),
        *(({"inside": Plain()}, {"inside": Plain()}), (_looped(), _looped()), ({"a", "b"}, {"a", "c"})),
        *((torch.zeros(2), torch.ones(2)), (numpy.zeros(2), numpy.ones(2)), (torch.float32, torch.bfloat16)),
        *((10**400, 10**400), (Fraction(10**400), Fraction(10**400)), (2**60, 2.0**60), (0.0, -0.0)),
        *(([1, 2.0], (1.0, 2)), (True, numpy.bool_(True)), (0.5, numpy.array(0.5))),
        (numpy.float64(0.5), torch.tensor(0.5, dtype=torch.float64)),
        (enum.Enum("Mode", {"FAST": "fast"}, type=str).FAST, "fast"),
        (torch.zeros((), device="meta"), torch.ones((), device="meta")),
    ],
)
@ranks.alike(2)
def test_values_without_a_text_and_equal_ones_of_other_types_stop_no_run(exchange, pair):
    inner = problems.SGD([{"params": problems.parameters(problems.FEW), "given": pair[exchange.rank]}])
    train(LocalDeMo(inner, sync_every=1, process_group=exchange), range(2), exchange.rank)


def in_folder(store, **group):
    run = FolderExchange(store, late=0.0, patience=0.0)
    inner = Adapting(problems.parameters(problems.FEW))
    inner.param_groups[0].update(group)
    return LocalDeMo(inner, sync_every=1, process_group=run)


def test_worker_of_a_folder_joins_with_other_state_in_groups_other_objects_and_a_scheduler():
    store = ObjectStore()
    locks = [threading.Lock(), threading.Lock()]
    first, second = (in_folder(store, warmup=lambda n: n, tags={"a", lock}, lock=lock) for lock in locks)
    train(first, range(3), 0)
    second.join()
    schedule = torch.optim.lr_scheduler.OneCycleLR(second, max_lr=0.2, total_steps=9)  # it adds to groups
    train(second, range(1), 1)
    schedule.step()
    train(first, range(3, 4), 0)
    for worker in (first, second):
        assert worker.replicator.session.exchange.decided.refused == {}
    assert second.param_groups[0].pop("lock") is locks[1]
    second.param_groups[0].pop("tags")
    again = in_folder(store)
    again.load_state_dict(second.state_dict())
    again.join()  # d is 1e-6 in the run's record, and another value here
    assert again.replicator.round_number == 4


def test_worker_of_a_folder_names_the_setting_in_which_it_differs_from_the_run():
    store = ObjectStore()
    train(in_folder(store), range(1), 0)
    told = r"-[0-9a-f]{8} has inner param_groups\[0\]\['nesterov'\] = True where the"
    with pytest.raises(SettingsError, match=told):
        in_folder(store, nesterov=True).join()
    later = in_folder(store)
    train(later, range(1), 1)
    for step, nesterov in ((1, True), (2, False)):
        later.inner[0].param_groups[0]["nesterov"] = nesterov
        with pytest.raises(SettingsError, match=told) if nesterov else nullcontext():
            train(later, [step], 1)


def test_worker_of_a_folder_that_has_frozen_a_parameter_is_told_to_thaw_it():
    optimizer = in_folder(ObjectStore())
    train(optimizer, range(1), 0)
    problems.all_parameters(optimizer)[0].requires_grad_(False)
    with pytest.raises(SettingsError, match=r"frozen where the .*; call requires_grad_\(True\) before step\(\) and"):
        optimizer.finish_round()


def test_optimizer_with_state_of_odd_forms_from_its_construction_restarts_and_trains_on():
    (parameter,) = problems.parameters([(4, 4)])
    inner = Signs([parameter])
    odd = {
        "float8": torch.ones(4, 4).to(torch.float8_e4m3fn), "sparse": torch.eye(4).to_sparse(), "step": torch.ones(3),
        "array": numpy.ones(2), "queue": deque([torch.ones(2)]), "mode": "", "given": None, "scale": torch.arange(3.0),
        "nested": {"count": 2, "list": [torch.zeros(2), 0.5]},
    }  # fmt: skip
    inner.state[parameter].update(odd)
    optimizer = LocalDeMo(inner, sync_every=1)
    for step in range(4):
        odd["nested"]["count"], odd["nested"]["list"][1] = 9, 9.0
        odd["scale"].add_(1)
        problems.set_gradients([parameter], step)
        if step == 1:
            parameter.grad.fill_(torch.nan)
        optimizer.step()
        assert optimizer.stats.skipped == (step == 1)
        if step == 1:
            assert (odd["nested"]["count"], odd["nested"]["list"][1]) == (2, 0.5)
            assert odd["scale"].tolist() == [0.0, 1.0, 2.0]
            assert odd["queue"][0].tolist() == [0.0, 0.0]
            assert (odd["array"].tolist(), odd["mode"], odd["given"]) == ([1.0, 1.0], "", None)


@pytest.mark.parametrize("is_used", [True, False])
@pytest.mark.parametrize(
    "inner",
    [
        *(torch.optim.NAdam, torch.optim.Rprop, torch.optim.Adagrad, Signs, partial(Signs, masks=True)),
        partial(Signs, counts=False),
        partial(torch.optim.Adagrad, initial_accumulator_value=1.0),
    ],
)
def test_optimizer_restarts_as_a_new_one_also_with_a_state_from_before(inner, is_used):
    parameters, others = problems.parameters([(4, 4)]), problems.parameters([(4, 4)])
    before = inner(parameters, lr=0.01)
    problems.set_gradients(parameters, 0)
    if is_used:
        before.step()
    optimizer, fresh = LocalDeMo(before, sync_every=1), inner(others, lr=0.01)
    optimizer.join()
    parameters[0].grad = torch.full((4, 4), torch.nan)
    optimizer.step()
    others[0].data.copy_(parameters[0])
    for each, given in ((optimizer, parameters), (fresh, others)):
        problems.set_gradients(given, 1)
        each.local_step() if each is optimizer else each.step()
    assert problems.same(parameters, others)
