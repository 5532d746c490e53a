"""LocalDeMo keeps DeMo's promises: replicas, state, failures, gradients that are not finite, groups."""

import copy
import functools
import itertools
import math
import pickle
import signal
import threading
import time
from collections import Counter
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch.nn import Parameter
from torch.nn.utils import prune

import problems
import ranks
from demopt import DeMo, FolderExchange, LocalDeMo
from demopt.errors import ExchangeError
from demopt.exchange import SingleRank
from demopt.optim.local_weights import LocalWeights
from demopt.replicator import replicator
from demopt.runs.store import ObjectStore
from problems import fingerprints as train

ZERO = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})  # torch's needs a process group


def make(exchange=None, shapes=problems.FEW, inner=problems.ADAMW, **settings):
    return problems.local(exchange, shapes, inner, **{"sync_every": 3, "top_k": 24, **settings})


@pytest.mark.parametrize(
    ("delay", "flush_after", "applied"),
    [(0, 3, [0, 1, 0, 1]), (1, 1, [0, 1, 0, 1]), (1, 2, [0, 0, 1, 1]), (1, 3, [0, 0, 0, 2])],
)
@ranks.alike(2)
def test_bytes_of_a_round_are_counted_once_by_the_step_or_flush_that_applies_it(exchange, delay, flush_after, applied):
    optimizer = make(exchange, sync_every=2, delay=delay)
    for step in range(4):
        train(optimizer, [step], exchange.rank)
        costs = [optimizer.stats]
        if step in (flush_after, 3):
            optimizer.flush()
            costs += [optimizer.stats] if optimizer.stats is not costs[0] else []
        counted = [sum(cost.sent_bytes for cost in costs), sum(cost.received_bytes for cost in costs)]
        assert counted == [applied[step] * optimizer.replicator.message_bytes] * 2
    optimizer.finish_round(last=True)  # without local steps: the stats are still those of the last flush
    assert optimizer.stats.sent_bytes == optimizer.stats.received_bytes == optimizer.replicator.message_bytes


@pytest.mark.parametrize("settings", [{}, {"delay": 1}, {"values": "2-bit", "outer_momentum": 0.5}], ids=str)
@pytest.mark.parametrize("at", [0, 3, 4, 5, 6])
@ranks.alike(2)
def test_resumed_run_equals_the_uninterrupted_one_and_all_ranks_after_a_round(exchange, at, settings):
    """Saved right after a round, between rounds, or just before one; with delay, after a flush."""
    whole, new = make(exchange, **settings), make(exchange, **settings)
    train(whole, range(at), exchange.rank)
    whole.flush()
    with whole.shared(), torch.no_grad():
        state = copy.deepcopy(whole.state_dict())
        torch._foreach_copy_(problems.all_parameters(new), problems.values(whole))
    for optimizer in (whole, new):
        if optimizer is new:
            optimizer.load_state_dict(state)
        if at == 5:
            optimizer.finish_round()
        train(optimizer, range(at, 12), exchange.rank)
        optimizer.finish_round(last=True)
    assert problems.same(problems.values(whole), problems.values(new))
    return whole.fingerprint()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "1 step after the last round"),
        ({"delay": 1, "sync_every": 1}, r"saved before its round was applied.*with delay after flush\(\)"),
    ],
)
def test_state_dict_between_rounds_warns_once_outside_shared(settings, told):
    optimizer = make(**settings)
    train(optimizer, range(1))
    with optimizer.shared():
        optimizer.state_dict()
    with pytest.warns(UserWarning, match=told):
        optimizer.state_dict()
    optimizer.state_dict()


def _load(optimizer, value):
    for parameter in problems.all_parameters(optimizer):
        parameter.detach().fill_(value)


def test_weights_that_are_loaded_during_training_are_told_and_refused_in_a_folder():
    optimizer = make()
    train(optimizer, range(3))
    told = pytest.warns(UserWarning, match=r"changed inside shared\(\), which takes its own back.*resync")
    with told, optimizer.shared():
        _load(optimizer, 0.5)

    with pytest.raises(ValueError, match="a run in a folder goes on from its own weights"):
        make(FolderExchange(ObjectStore())).resync(model=True)


@pytest.mark.parametrize("steps", [3, 4], ids=["after a round", "between rounds"])
@pytest.mark.parametrize("delay", [0, 1])
def test_weights_that_the_script_changed_are_told_once_by_whatever_loses_them(steps, delay):
    told = "changed after the last round, outside the optimizer: "
    next_one = {
        "shared": (lambda optimizer: optimizer.shared().__enter__(), r"shared\(\) shows the global weights, without"),
        "step": (lambda optimizer: train(optimizer, range(steps, steps + 1)), "that counts as a local step"),
        "save": (LocalDeMo.state_dict, "the state has the global weights, without that"),
        "resync": (LocalDeMo.resync, r"resync\(\) drops that"),
        "flush": (LocalDeMo.flush, r"flush\(\) drops that, or counts"),
        "finish": (LocalDeMo.finish_round, "that counts as a local step"),
    }
    for name, (call, effect) in next_one.items():
        optimizer = make(delay=delay)
        train(optimizer, range(steps))
        kept = [each.detach().clone() for each in problems.all_parameters(optimizer)]
        _load(optimizer, 0.5)
        for parameter, value in zip(problems.all_parameters(optimizer), kept, strict=True):
            parameter.detach().copy_(value)  # as an EMA restores them after an evaluation
        with optimizer.shared():
            pass
        _load(optimizer, 0.5)
        if optimizer.weights_differ and (name == "save" or optimizer._weights.are_elsewhere):
            continue  # the state has the local weights, too; a device whose state is elsewhere is spared the copies
        with pytest.warns(UserWarning, match=f"{told}{effect}.*resync"):
            call(optimizer)


def test_pruning_that_is_made_permanent_is_told_by_shared_whether_outside_or_inside():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    optimizer = LocalDeMo(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=1)
    for number in range(2):
        problems.set_gradients(model.parameters(), number)
        optimizer.step()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # as model.to(device) and back
    with optimizer.shared():
        model.bfloat16().load_state_dict(copy.deepcopy(model.state_dict()))  # as for an evaluation
        model.float()
    with pytest.warns(UserWarning, match=r"changed inside shared\(\), which takes its own back"), optimizer.shared():
        prune.remove(model[0], "weight")
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    prune.remove(model[0], "weight")
    with pytest.warns(UserWarning, match=r"outside the optimizer: shared\(\) shows the global weights, without that"):
        optimizer.shared().__enter__()


def test_model_that_is_saved_in_eight_bits_inside_shared_is_no_change_of_weights():
    model = torch.nn.Linear(8, 2)
    optimizer = LocalDeMo(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=1)
    problems.set_gradients(model.parameters(), 0)
    optimizer.step()
    with optimizer.shared():
        model.to(torch.float8_e4m3fn)


@pytest.mark.parametrize("shape", [(0, 300), (3000, 20), (5000,), ()])
def test_looking_at_changed_weights_keeps_few_of_them_and_none_of_an_empty_shard(shape):
    optimizer = make(shapes=[shape], top_k=None)
    train(optimizer, range(4))
    _, kept = optimizer._weights._left
    assert kept is None or kept.untyped_storage().nbytes() < 5000


@pytest.mark.parametrize("delay", [0, 1])
@ranks.alike(2)
def test_resync_of_the_model_gives_loaded_weights_to_all_ranks(exchange, delay):
    optimizer = make(exchange, delay=delay)
    train(optimizer, range(6), exchange.rank)
    optimizer.inner[0].add_param_group({"params": problems.parameters([(3,)])})
    _load(optimizer, 0.25 * exchange.rank)
    optimizer.resync(src=1, model=True)
    with optimizer.shared():
        assert {each.item() for p in problems.all_parameters(optimizer) for each in p.unique()} == {0.25}
    return train(optimizer, range(6, 9), exchange.rank)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_interrupt_at_either_end_of_shared_keeps_local_weights(at, monkeypatch):
    copies, copy_all = itertools.count(1), LocalWeights._copy

    def interrupted(self, pairs):
        copy_all(self, pairs)
        if next(copies) == at:
            signal.raise_signal(signal.SIGINT)

    optimizer = make()
    train(optimizer, range(4))
    monkeypatch.setattr(LocalWeights, "_copy", interrupted)
    with problems.unchanged(optimizer), pytest.raises(KeyboardInterrupt), optimizer.shared():
        pass
    assert not optimizer._weights.aside


@pytest.mark.parametrize("call", ["step", "shared", "deepcopy", "resync"])
def test_interrupt_before_shared_takes_its_weights_back_is_made_good_by_the_next_call(call, monkeypatch):
    optimizer, twin = make(), make()
    for each in (optimizer, twin):
        train(each, range(4))
    with pytest.raises(KeyboardInterrupt), optimizer.shared():
        monkeypatch.setattr(LocalWeights, "take_back", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.undo()
    if call == "resync":  # weights that were loaded since stay
        for each in (optimizer, twin):
            _load(each, 0.25)
            each.resync(model=True)
    elif call == "shared":
        with optimizer.shared():
            pass
        assert problems.same(problems.values(optimizer), problems.values(twin))
    elif call == "deepcopy":
        optimizer = copy.deepcopy(optimizer)
    assert train(optimizer, range(4, 7)) == train(twin, range(4, 7))


def test_shallow_copy_leaves_the_comparison_of_settings_to_the_original():
    optimizer = make()
    facts = optimizer.replicator.wiring().facts()
    copy.copy(optimizer)
    assert optimizer.replicator.wiring().facts() == facts
    optimizer = copy.copy(optimizer)  # the original has no other name now
    train(optimizer, range(3))
    assert optimizer.replicator.wiring().facts() == facts


def test_shared_shows_the_global_weights_and_takes_them_back():
    optimizer = make()
    train(optimizer, range(3))
    after = problems.values(optimizer)
    train(optimizer, range(3, 4))
    local = problems.values(optimizer)
    with optimizer.shared():
        with optimizer.shared():
            assert problems.same(problems.values(optimizer), after)
        assert problems.same(problems.values(optimizer), after)
        for call in (optimizer.step, optimizer.extract, optimizer.rollback, optimizer.flush, optimizer.resync):
            with pytest.raises(RuntimeError, match=r"inside `with optimizer\.shared"):
                call()
        for duplicate in (copy.deepcopy, pickle.dumps):
            with pytest.raises(RuntimeError, match=r"copying or pickling came inside `with optimizer\.shared"):
                duplicate(optimizer)
    as_decorator = optimizer.shared()(lambda: problems.values(optimizer))
    assert problems.same(as_decorator(), after)
    assert problems.same(as_decorator(), after)
    assert problems.same(problems.values(optimizer), local)
    assert not problems.same(local, after)


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    optimizer = make(None, [(32, 16)])
    optimizer.param_groups[0]["lr"] = 0.5
    groups_alone = {"param_groups": copy.deepcopy(optimizer.state_dict()["param_groups"])}
    plain = torch.optim.AdamW([Parameter(torch.zeros(32, 16))]).state_dict()
    for state, told in (
        (
            make(None, [(16, 32)]).state_dict(),
            r"of parameter 0 has shapes \[\[16, 32\]\], the parameter has \[32, 16\]",
        ),
        ({}, "the state has nothing, and no param_groups; give the result of"),
        *((each, "no global weights and error of any parameter: another opt") for each in (groups_alone, plain)),
        (
            make(None, [(32, 16)], transform="identity").state_dict(),
            "transform 'identity', and this LocalDeMo has 'dct'",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5


@torch.no_grad()
@pytest.mark.parametrize("call", ["step", "finish_round", "resync", "extract", "shared", "state_dict"])
def test_weights_loaded_after_construction_and_before_the_first_step_stay(call):
    parameter, sevens = Parameter(torch.zeros(4, 4)), torch.full((4, 4), 7.0)
    optimizer = LocalDeMo(torch.optim.SGD([parameter], lr=0.0), sync_every=1)
    parameter.fill_(7.0)
    parameter.grad = torch.zeros(4, 4)
    found = getattr(optimizer, call)()
    if call == "extract":
        optimizer.apply(optimizer.exchange(found))
    elif call == "shared":
        with found:
            assert torch.equal(parameter, sevens)
    assert torch.equal(parameter, sevens)
    assert torch.equal(optimizer.state_dict()["state"][0]["global"], sevens)
    assert optimizer.fingerprint() == LocalDeMo(torch.optim.SGD([parameter], lr=0.0)).fingerprint()


def test_looks_at_a_replay_of_bfloat16_weights_do_not_move_them():
    def bfloat16():
        return LocalDeMo(torch.optim.SGD([Parameter(torch.ones(8, 8, dtype=torch.bfloat16))], lr=1.0), sync_every=1)

    trains, looks, rests = bfloat16(), bfloat16(), bfloat16()
    for step in range(3):
        trains.param_groups[0]["params"][0].grad = torch.full((8, 8), 0.1 + step, dtype=torch.bfloat16)
        trains.local_step()
        message = trains.extract()
        messages = trains.exchange(message)
        for each in (trains, looks, rests):
            each.apply(messages)
        looks.fingerprint()
    assert looks.fingerprint() == rests.fingerprint() == trains.fingerprint()


def test_resync_from_a_rank_that_is_not_there_keeps_local_steps():
    optimizer = make()
    train(optimizer, range(2))
    before = problems.values(optimizer)
    with pytest.raises(ValueError, match="src is 7"):
        optimizer.resync(src=7)
    assert optimizer.local_steps == 2
    assert problems.same(before, problems.values(optimizer))


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("owner", ["compress", "compressed", "_copies"])
def test_local_steps_count_once_where_memory_ends_in_the_middle_of_a_round(owner, kernels, monkeypatch):
    """Some chunk groups have the pseudo-gradient then, others do not; or there is no room for new starts."""
    found = []
    for fails in (False, True):
        settings = {"top_k": 256, "transform": "identity", "values": "float32", "error_decay": 1.0, "kernels": kernels}
        optimizer = make(shapes=[(8, 8), (4, 16), (5,)], inner=problems.SGD, **settings)
        train(optimizer, range(2))
        with monkeypatch.context() as full:
            if fails:
                holder, name = (LocalWeights, owner) if owner == "_copies" else (replicator, "compress")
                calls, call = itertools.count(), getattr(holder, name)

                def second(*given, calls=calls, call=call):
                    if owner == "_copies" or next(calls) == 1:
                        if owner == "compressed":
                            call(*given)
                        raise torch.OutOfMemoryError("device is full")
                    return call(*given)

                full.setattr(holder, name, second)
                full.setattr(optimizer.replicator, "exchange", Mock(side_effect=ExchangeError("away")))
                with pytest.raises((torch.OutOfMemoryError, ExchangeError)):
                    optimizer.finish_round()
        optimizer.finish_round()
        found.append([weight.detach().clone() for weight in optimizer._weights.global_of.values()])
    for whole, failed in zip(*found, strict=True):
        torch.testing.assert_close(failed, whole)


@pytest.mark.parametrize("call", ["flush", "rollback"])
def test_round_that_a_handler_of_a_signal_ends_or_forgets_is_not_applied_twice_or_in_part(call, monkeypatch):
    optimizers = [make(sync_every=1) for _ in range(2)]
    travel = replicator.Replicator._travel

    def interrupted(self, *given):
        if self is optimizers[1].replicator:
            getattr(optimizers[1], call)()
        return travel(self, *given)

    for optimizer in optimizers:
        train(optimizer, range(1))
    with monkeypatch.context() as signalled:
        signalled.setattr(replicator.Replicator, "_travel", interrupted)
        train(optimizers[0], range(1, 2))
        with pytest.raises(RuntimeError, match="forgotten while it travelled") if call == "rollback" else nullcontext():
            train(optimizers[1], range(1, 2))
    if call == "rollback":
        optimizers[1].finish_round()
        assert optimizers[1].local_steps == 0
    else:
        assert problems.same(*map(problems.values, optimizers))


class _Nested(torch.optim.SGD):
    """Keeps its momentum in a list, inside a class other than dict, and creates it only at construction."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.01)
        for parameter in parameters:
            self.state[parameter] = Counter(buffers=[torch.zeros_like(parameter)])

    def step(self, closure=None):
        del closure
        for parameter in self.param_groups[0]["params"]:
            (momentum,) = self.state[parameter]["buffers"]
            parameter.data.add_(momentum.mul_(0.9).add_(parameter.grad), alpha=-0.01)


class _Around(torch.optim.SGD):
    """Steps with an optimizer of its own, which has the state, as SAM does."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.01)
        self.base_optimizer = MOMENTUM(self.param_groups)

    def step(self, closure=None):
        return self.base_optimizer.step(closure)


MOMENTUM = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e33])
@pytest.mark.parametrize("inner", [problems.ADAMW, MOMENTUM, torch.optim.Adagrad, _Nested, _Around])
@ranks.alike(2)
def test_a_bad_gradient_costs_one_round_and_leaves_nothing_behind(exchange, inner, bad):
    """A huge finite gradient is beside it: nothing of either may stay in a state."""

    optimizer, skipped = make(exchange, [(20, 12), (5,)], inner, sync_every=2, top_k=None), []

    def spoil(step):
        for parameter in problems.all_parameters(optimizer) if (exchange.rank, step) == (1, 4) else ():
            parameter.grad.view(-1)[:2] = torch.tensor([bad, 1e22])

    for step in range(16):
        train(optimizer, [step], exchange.rank, spoil)
        skipped += [step] if optimizer.local_steps == 0 and optimizer.stats.skipped else []
    normalises = inner in (problems.ADAMW, torch.optim.Adagrad)  # any finite gradient makes a step
    assert skipped == ([] if normalises and bad == 1e33 else [5])
    assert max(float(value.abs().max()) for value in problems.values(optimizer)) < 10
    return skipped


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("delay", [0, 1])
@ranks.alike(2)
def test_flush_gives_all_ranks_the_global_weights_also_after_a_skipped_round_and_keeps_local_steps(
    exchange, delay, steps
):
    optimizer = make(exchange, sync_every=2, delay=delay)

    def spoil(_):
        if exchange.rank:
            problems.all_parameters(optimizer)[0].grad.fill_(torch.nan)

    train(optimizer, range(2), exchange.rank, spoil)
    optimizer.flush()
    assert optimizer.stats.skipped
    assert not optimizer.weights_differ, "its steps are in the error"
    train(optimizer, range(steps), exchange.rank)
    with problems.unchanged(optimizer):
        optimizer.flush()
    assert optimizer.local_steps == steps


def test_grad_scaler_changes_nothing_of_local_demo_and_an_infinite_step_counts():
    def trained(enabled):
        optimizer = make(None, [(8, 4)], problems.SGD, sync_every=2, top_k=None)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(problems.all_parameters(optimizer)[0].square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.local_steps == 0
        return problems.values(optimizer), optimizer

    (scaled, _), (plain, optimizer) = trained(True), trained(False)
    assert problems.same(scaled, plain)
    assert not problems.same(plain, problems.parameters([(8, 4)]))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    optimizer.step()
    assert optimizer.local_steps == 1
    assert problems.same(problems.values(optimizer), plain)
    optimizer.zero_grad()
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()  # without a gradient to unscale
    assert optimizer.local_steps == 0


def test_bfloat16_parameters_have_float32_global_weights_and_error():
    parameters = problems.parameters([(32, 16)], dtype=torch.bfloat16)
    optimizer = problems.optimizer_of("LocalDeMo", parameters)
    train(optimizer, range(4))
    entry = optimizer.state_dict()["state"][0]
    assert entry["global"].dtype == entry["error"].dtype == torch.float32
    assert torch.equal(entry["global"].to(torch.bfloat16), parameters[0].detach())


@pytest.mark.parametrize(("kind", "more"), [("DeMo", {}), ("LocalDeMo", {}), ("LocalDeMo", {"delay": 1})], ids=str)
def test_frozen_parameters_cost_nothing_until_they_are_unfrozen(kind, more):
    """test_local_counting.py freezes and unfreezes some on two ranks."""
    quantized = Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    parameters = [*problems.parameters(problems.FEW), quantized]
    parameters[0].requires_grad_(False)
    optimizer = problems.optimizer_of(kind, parameters, **more)
    frozen, lengths = parameters[0].detach().clone(), []
    for step in range(11):  # unfreezes it with a round in flight
        parameters[0].requires_grad_(step >= 4)
        problems.set_gradients(parameters[:-1], step)
        optimizer.step()
        lengths.append(optimizer.replicator.message_bytes)
        assert (parameters[0] in optimizer.state) == (step >= 4)
        assert step > 3 or torch.equal(parameters[0], frozen)
    assert quantized not in optimizer.state
    late, always = (optimizer.state[parameter] for parameter in parameters[:2])
    assert late.keys() == always.keys()
    rounds = "step" if kind == "DeMo" else "round"
    assert late[rounds] == always[rounds]
    assert lengths[0] == lengths[3] < lengths[4] == lengths[10]
    assert not torch.equal(parameters[0], frozen)


@ranks.alike(2)
def test_frozen_weights_that_differ_between_ranks_later_stay_so_after_resuming(exchange):
    """As with a momentum encoder inside the model, which each rank averages by itself."""

    def build():
        *_, frozen = parameters = problems.parameters([(4, 4), (3,)])
        frozen.requires_grad_(False)
        return problems.optimizer_of("LocalDeMo", parameters, process_group=exchange, sync_every=1), frozen

    one, frozen = build()
    train(one, range(2), exchange.rank)
    frozen.data.fill_(exchange.rank)
    other, again = build()
    again.data.copy_(frozen)
    other.load_state_dict(problems.by_file(one.state_dict()))
    assert train(other, range(2, 4), exchange.rank) == train(one, range(2, 4), exchange.rank)
    assert torch.equal(again, frozen)


@pytest.mark.parametrize("delay", [0, 1])
def test_group_that_is_refused_leaves_no_trace(delay):
    optimizer = make(exact=True, delay=delay)
    train(optimizer, range(3))
    complex_, double = (Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.complex64, torch.float64))
    bad = {"DeMo trains real floats": complex_, "in more than one": problems.all_parameters(optimizer)[0]}
    if not delay:  # with delay, the next step says it, after the round in flight
        bad["exact=True computes in float32"] = double
    for told, parameter in bad.items():
        with pytest.raises((TypeError, ValueError), match=told):
            optimizer.add_param_group({"params": [parameter]})
    assert len(optimizer.param_groups) == len(optimizer.inner[0].param_groups) == 1
    train(optimizer, range(3, 6))


# as transformers' Trainer calls the class in optimizer_cls_and_kwargs
WRAPS = r"LocalDeMo wraps an optimizer.*optimizers=\(optimizer, None\)"
BY_ITSELF = "which synchronizes the ranks itself"


@pytest.mark.parametrize(
    ("inner", "settings", "error", "said"),
    [
        (lambda _: None, {}, TypeError, "inner is a NoneType; give a torch optimizer"),
        (lambda _: [], {}, ValueError, "inner is an empty list"),
        *((given, {}, TypeError, WRAPS) for given in (lambda p: p, lambda p: [{"params": p}])),
        *((kind, {}, TypeError, BY_ITSELF) for kind in (DeMo, lambda p: LocalDeMo(torch.optim.SGD(p)), ZERO)),
        (torch.optim.LBFGS, {}, TypeError, "LBFGS"),
        (lambda p: [torch.optim.SGD(p), torch.optim.AdamW(p)], {}, ValueError, r"inner\[0\] and inner\[1\] both have"),
        *((problems.SGD, settings, ValueError, said) for settings, said in [
            *(({"sync_every": 0}, "sync_every is 0"), ({"error_decay": 1.1}, "error_decay is 1.1")),
            *(({"samples": 0}, "samples is 0"), ({"delay": 2}, "delay is 2; give 0, or 1")),
            ({"state_device": "gpu"}, "state_device is 'gpu'; give 'cpu', or None"),
            ({"route": "owner", "top_k": 9}, "answers with signs of all .* top_k is 9: leave it out"),
            ({"samples": 2**32}, "samples is 4294967296; give at most 4294967295"),
            ({"samples": 2, "top_k": 9}, "samples weigh signs of all coefficients"),
            ({"values": "2-bit"}, "sends the signs of all coefficients; values is '2-bit'"),
        ]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_impossible_arguments_are_refused(inner, settings, error, said):
    with pytest.raises(error, match=said):
        LocalDeMo(inner([Parameter(torch.zeros(4, 4))]), **settings)


@pytest.mark.parametrize("steps", ["2", None, math.nan, math.inf, 0, -1, 1.5, True, torch.ones(2)])
def test_impossible_sync_every_is_refused_also_when_set_later(steps):
    optimizer = make(SingleRank(), sync_every=3)
    with pytest.raises((TypeError, ValueError), match="sync_every is "):
        optimizer.sync_every = steps
    assert optimizer.sync_every == copy.deepcopy(optimizer).sync_every == 3


def test_extract_by_hand_is_refused_with_a_round_in_flight_and_in_a_folder():
    optimizer = make(SingleRank(), delay=1, sync_every=1)
    train(optimizer, range(1))
    with pytest.raises(RuntimeError, match=r"call flush\(\)"):
        optimizer.extract()
    optimizer.flush()
    message = optimizer.extract()
    for step in (optimizer.local_step, optimizer.step):  # the next message would contain these steps again
        with problems.unchanged(optimizer), pytest.raises(RuntimeError, match="call apply or rollback first"):
            step()
    optimizer.apply(optimizer.exchange(message))
    with pytest.raises(RuntimeError, match="call step, or local_step and finish_round"):
        make(FolderExchange(ObjectStore())).extract()


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_loading_replaces_the_whole_state_of_a_used_optimizer(kind):
    """Also the number of rounds. A loaded state may be loaded again; a frozen parameter keeps its saved weights."""
    a, b = problems.parameters([(17, 19), (20,)])
    b.requires_grad_(False)
    optimizer = problems.optimizer_of(kind, [a, b], process_group=SingleRank())
    train(optimizer, range(4))
    saved, weights = copy.deepcopy(optimizer.state_dict()), problems.values(optimizer)
    b.requires_grad_(True)
    train(optimizer, range(4, 12))
    with torch.no_grad():  # the model loads first, then the optimizer
        torch._foreach_copy_([a, b], weights)
    fresh = problems.optimizer_of(kind, problems.twins(optimizer), process_group=SingleRank())
    for each in (optimizer, fresh):
        with pytest.warns(UserWarning, match="nothing of parameter 1, .* starts at zero: right for a parameter that w"):
            each.load_state_dict(saved)
    assert optimizer.replicator.step is optimizer.replicator.round_number == (4 if kind == "DeMo" else 2)
    assert torch.equal(optimizer.replicator.parameters[1], weights[1])
    assert not optimizer.state[b]["momentum" if kind == "DeMo" else "error"].any()
    assert train(optimizer, range(20, 26)) == train(fresh, range(20, 26))


class _ByNumber(torch.optim.SGD):
    """Keeps momentum per half of a parameter, under the half's number, as HeavyBall does by view."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in [each for each in self.param_groups[0]["params"] if each.grad is not None]:
            for number, (part, gradient) in enumerate(zip(parameter.chunk(2), parameter.grad.chunk(2), strict=True)):
                entry = self.state[parameter].setdefault(number, {"momentum": torch.zeros_like(part)})
                entry["momentum"].mul_(0.9).add_(gradient)
                part.sub_(entry["momentum"], alpha=0.1)


class _NamedAlike(torch.optim.SGD):
    """Names its momenta like entries of LocalDeMo's state."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in [each for each in self.param_groups[0]["params"] if each.grad is not None]:
            for name in ("error", "global", "momentum", "inner_error"):
                momentum = self.state[parameter].setdefault(name, torch.zeros_like(parameter))
                parameter.sub_(momentum.mul_(0.9).add_(parameter.grad), alpha=0.02 * len(name))


@pytest.mark.parametrize("inner", [_NamedAlike, _ByNumber])
def test_inner_state_named_like_ours_or_by_number_is_saved_and_loaded(inner):
    ends = []
    for resumes in (False, True):
        optimizer = make(SingleRank(), [(16, 16), (20,)], inner, sync_every=2)
        ends.append(train(optimizer, range(4)))
        problems.all_parameters(optimizer)[1].requires_grad_(False)
        if resumes:
            saved = problems.by_file(optimizer.state_dict())
            twins = problems.twins(optimizer)
            twins[1].requires_grad_(False)
            optimizer = LocalDeMo(inner(twins), sync_every=2, top_k=24, chunk=16, process_group=SingleRank())
            optimizer.load_state_dict(saved)
        ends[-1] += train(optimizer, range(4, 6))
        problems.all_parameters(optimizer)[1].requires_grad_(True)
        ends[-1] += train(optimizer, range(6, 10))
    assert ends[0] == ends[1]
    if inner is _ByNumber:
        with pytest.raises(TypeError, match="the state of parameter 0 holds 0, a dict, which cannot be consolidated"):
            optimizer.consolidate_state_dict()


def test_a_step_does_not_wait_for_the_extraction_and_saving_does(monkeypatch):
    ends = []
    for apart in (False, True):
        monkeypatch.setattr(LocalWeights, "_is_here", lambda *_, apart=apart: not apart)
        optimizer = problems.local(SingleRank(), delay=1, state_device="cpu", route="gather")
        for number in range(4):
            held = threading.Event()
            optimizer.replicator.session._background.submit(held.wait)
            threading.Timer(0.05, held.set).start()
            problems.fingerprints(optimizer, [number])
            current = optimizer.replicator.round
            assert current.message is None or held.is_set() or not apart
            assert optimizer.replicator.in_flight
        with optimizer.shared():  # the weights do not wait
            saved = optimizer.state_dict()
        assert current.message is not None
        errors = [entry["error"].clone() for entry in saved["state"].values()]
        optimizer.flush()
        ends.append([*errors, *problems.values(optimizer)])
    assert problems.same(*ends)


def test_needless_flush_changes_no_bit_of_a_resumed_run_either():
    parameters, resumed = problems.parameters([(64, 64)]), problems.parameters([(64, 64)])
    optimizer = problems.optimizer_of("LocalDeMo", parameters, sync_every=5)
    problems.train(optimizer, range(6))
    again = problems.optimizer_of("LocalDeMo", resumed, sync_every=5)
    again.load_state_dict(copy.deepcopy(optimizer.own_state_dict()))
    for each in (optimizer, again):
        problems.train(each, range(6, 8))
        each.flush()
    assert problems.same(parameters, resumed)


def test_round_whose_extraction_in_the_background_has_failed_is_forgotten_and_the_next_one_goes_on(monkeypatch):
    monkeypatch.setattr(LocalWeights, "_is_here", lambda *_: False)
    run = FolderExchange(ObjectStore(), late=0.0)
    optimizer = problems.local(run, delay=1, state_device="cpu", kernels="torch")  # torch's tell whether they began
    optimizer.join()
    with monkeypatch.context() as full:
        full.setattr(replicator, "compress", Mock(side_effect=MemoryError("no memory")))
        begun = problems.values(optimizer)
        train(optimizer, range(1))
        with pytest.raises(MemoryError, match="no memory"):
            optimizer.flush()
    starts, weights = optimizer._weights.starts_and_locals()  # the next round has the step that this one had
    assert problems.same(starts, begun)
    assert not any(torch.equal(*pair) for pair in zip(starts, weights, strict=True))
    train(optimizer, range(1, 2))
    optimizer.flush()
    assert (run.decided.round, optimizer.weights_differ) == (0, False)


@pytest.mark.parametrize("rolls_back", [False, True])
def test_local_steps_count_once_where_the_background_has_no_thread_or_fails_in_a_rollback(rolls_back, monkeypatch):
    monkeypatch.setattr(LocalWeights, "_is_here", lambda *_: False)
    exactly = {"top_k": 256, "transform": "identity", "values": "float32", "error_decay": 1.0}
    found = []

    def fail_later(*given):
        time.sleep(0.2)
        raise MemoryError("no memory")

    for fails in (False, True):
        optimizer = make(inner=problems.SGD, sync_every=1, delay=1, state_device="cpu", **exactly)
        with monkeypatch.context() as full:
            if fails and rolls_back:
                full.setattr(replicator, "compress", Mock(side_effect=fail_later))
            elif fails:
                full.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
            with pytest.raises(RuntimeError, match="new thread") if fails and not rolls_back else nullcontext():
                train(optimizer, range(1))
            if fails:
                optimizer.rollback()
        train(optimizer, range(1, 3))
        optimizer.flush()
        found.append(problems.values(optimizer))
    for whole, failed in zip(*found, strict=True):
        torch.testing.assert_close(failed, whole)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("loads", [False, True])
def test_global_weights_become_as_wide_as_the_weights_so_that_small_steps_count(delay, loads):
    """With delay, the round in flight ends first, or loading forgets it."""
    parameter = Parameter(torch.ones(2, 2))
    optimizer = LocalDeMo(torch.optim.SGD([parameter], lr=1.0), sync_every=2, delay=delay)
    optimizer.warns_of_saving = False
    for step in range(104):
        if step == 3:
            parameter.data = parameter.data.double()
        if step == 54 and loads:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        parameter.grad = torch.full((2, 2), 1e-9 * (step > 3), dtype=parameter.dtype)
        optimizer.step()
    optimizer.flush()
    torch.testing.assert_close(parameter.detach(), torch.full((2, 2), 1 - 1e-7, dtype=torch.float64), rtol=0, atol=2e-8)


def test_parameter_begins_to_train_also_where_an_interrupt_comes_as_it_does(monkeypatch):
    found = []
    for interrupts in (False, True):
        parameters = problems.parameters(problems.FEW)
        parameters[1].requires_grad_(False)
        optimizer = LocalDeMo(torch.optim.SGD(parameters, lr=0.1), sync_every=2)
        train(optimizer, range(2))
        parameters[1].requires_grad_(True)
        if interrupts:
            with monkeypatch.context() as signalled:
                signalled.setattr(LocalDeMo, "_replicated_groups", Mock(side_effect=KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    train(optimizer, range(2, 3))
        train(optimizer, range(2, 6))
        assert len(optimizer.replicator.parameters) == len(parameters)
        found.append(optimizer.fingerprint())
    assert found[0] == found[1]


def test_group_put_into_the_list_of_groups_trains():
    added = Parameter(torch.zeros(4, 4))
    optimizer = problems.local(sync_every=2)
    train(optimizer, range(2))
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [added]})
    train(optimizer, range(2, 4))
    assert bool(added.any())
    assert len(optimizer.state_dict()["param_groups"]) == 2


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("at", [4, 5])  # right after a round, and between two
def test_parameters_put_into_other_groups_in_another_order_train_as_before(at, delay):
    found = []
    for cut in ([0, 1, 2], [2, 0], [2], [1, 2]):  # the first group's; the rest are in a second one
        parameters = problems.parameters([(16, 16), (16, 8), (16, 16)])
        optimizer = LocalDeMo(problems.SGD(parameters), sync_every=2, delay=delay, chunk=16)
        train(optimizer, range(at))
        group = optimizer.param_groups[0]
        group["params"] = [parameters[number] for number in cut]
        if rest := [parameter for number, parameter in enumerate(parameters) if number not in cut]:
            optimizer.param_groups.append({**group, "params": rest})
        for step in range(at, at + 4):
            problems.set_gradients(parameters, step)
            optimizer.step()
        optimizer.flush()
        found.append([parameter.detach() for parameter in parameters])
    assert all(problems.same(found[0], each) for each in found[1:])


def test_refused_group_after_others_were_put_in_another_order_leaves_each_parameter_its_own():
    found = []
    for refused in (False, True):
        parameters = problems.parameters([(16, 16), (16, 8), (16, 16)])
        optimizer = LocalDeMo(problems.SGD(parameters), sync_every=2, chunk=16)
        train(optimizer, range(4))
        optimizer.param_groups[0]["params"] = parameters[::-1]
        if refused:
            with pytest.raises(TypeError, match=r"complex64; DeMo trains real floats, .* torch\.view_as_real"):
                optimizer.add_param_group({"params": [Parameter(torch.zeros(4, 4, dtype=torch.complex64))]})
        for step in range(4, 8):
            problems.set_gradients(parameters, step)
            optimizer.step()
        found.append([parameter.detach() for parameter in parameters])
    assert problems.same(*found)


def test_state_of_a_parameter_that_is_frozen_now_loads_into_a_group_that_was_added_to_an_inner_optimizer():
    saved, values = None, []
    for frozen in (False, True):
        one, other, added = problems.parameters([(8, 8), (8, 4), (4, 4)])
        optimizer = LocalDeMo([problems.SGD([one]), problems.SGD([other])], sync_every=2)
        optimizer.inner[1].add_param_group({"params": [added.requires_grad_(not frozen)]})
        if saved is None:
            train(optimizer, range(3))
            with optimizer.shared():
                saved = copy.deepcopy(optimizer.state_dict())
        else:
            optimizer.load_state_dict(saved)
        added.requires_grad_(True)
        train(optimizer, range(3, 6))
        values.append(problems.values(optimizer))
    assert problems.same(*values)


def test_weights_are_the_global_ones_after_an_error_in_a_flush_of_steps_that_were_not_finite(monkeypatch):
    optimizer = problems.local(SingleRank(), sync_every=2, delay=1)
    train(optimizer, range(5))
    problems.all_parameters(optimizer)[0].data[0] = torch.nan
    train(optimizer, range(5, 6))
    monkeypatch.setattr(optimizer.replicator, "exchange", Mock(side_effect=ExchangeError("away")))
    with pytest.raises(ExchangeError, match="away"):
        optimizer.flush()
    assert not optimizer.weights_differ


def test_names_that_are_fewer_than_parameters_are_told():
    optimizer = LocalDeMo(torch.optim.SGD(torch.nn.Linear(4, 4).named_parameters(), lr=0.1))
    optimizer.param_groups[0]["params"].append(Parameter(torch.zeros(4)))
    with pytest.raises(ValueError, match=r"param_groups\[0\] has 3 parameters and 2 param_names"):
        optimizer.step()


def test_parameter_that_begins_to_train_beside_a_round_in_flight_is_in_each_state_that_is_saved():
    parameters = problems.parameters(problems.FEW)
    parameters[0].requires_grad_(False)
    optimizer = LocalDeMo(torch.optim.SGD(parameters, lr=0.1), sync_every=1, delay=1)
    train(optimizer, range(1))
    parameters[0].requires_grad_(True)
    problems.set_gradients(parameters, 1)
    optimizer.local_step()
    with pytest.raises(RuntimeError, match="begun to train since the round in flight was sent; call flush"):
        optimizer.own_state_dict()
    optimizer.flush()
    assert "error" in optimizer.own_state_dict()["state"][0]


def test_schedulers_cycle_momentum_where_the_first_inner_optimizer_has_it_and_betas_where_all_have_them():
    first, second = (problems.parameters([(4, 4)]) for _ in range(2))
    sgd, adamw = torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.AdamW(second, lr=0.1)
    cycle = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10)
    cycle(LocalDeMo([sgd, adamw]))
    assert sgd.param_groups[0]["momentum"] == pytest.approx(0.95)
    with pytest.raises(ValueError, match="momentum"):
        cycle(LocalDeMo([adamw, sgd]))


def test_weights_loaded_after_an_own_fresh_state_as_accelerate_loads_one_are_the_global_ones():
    parameters = problems.parameters(problems.FEW)
    optimizer = problems.optimizer_of("LocalDeMo", parameters)
    optimizer.load_state_dict(optimizer.state_dict())
    loaded = problems.parameters(problems.FEW, seed=5)
    for mine, theirs in zip(parameters, loaded, strict=True):
        mine.data.copy_(theirs)
    with optimizer.shared():
        assert problems.same(problems.values(optimizer), loaded)
    problems.train(optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    again = problems.optimizer_of("LocalDeMo", problems.twins(optimizer))
    again.load_state_dict(state)  # the state of a trained optimizer: its weights count
    for parameter in problems.all_parameters(again):
        parameter.data.add_(1.0)
    assert again.fingerprint() == optimizer.fingerprint()


def test_fingerprint_of_state_is_the_same_before_and_after_a_save_notices_frozen_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = LocalDeMo(problems.SGD(model.parameters()), sync_every=1, outer_momentum=0.5)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    model[0].requires_grad_(False)
    before = optimizer.fingerprint(state=True)
    optimizer.state_dict()
    assert optimizer.fingerprint(state=True) == before
