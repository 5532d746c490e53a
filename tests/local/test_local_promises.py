"""LocalDeMo keeps DeMo's promises: replicas, state, failures, gradients that are not finite, groups, schedules."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import problems
import ranks
from demopt import DeMo, LocalDeMo
from demopt.codec.hyperparameters import Codec
from demopt.exchange import Exchange, SingleRank
from problems import fingerprints as train

SETTINGS: dict[str, Any] = {"sync_every": 3, "top_k": 24, "chunk": 16}
ZERO = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})  # torch's needs a process group


def make(exchange: Any = None, shapes: Any = problems.FEW, **settings: Any) -> LocalDeMo:
    inner = torch.optim.AdamW(problems.parameters(shapes), lr=0.01)
    return LocalDeMo(inner, process_group=exchange, **{**SETTINGS, **settings})


# Replicas and rounds


def test_bytes_of_a_round_are_counted_once_by_the_step_or_flush_that_applies_it() -> None:
    def traffic(exchange: Exchange, delay: int, flush_after: int) -> list[tuple[int, int]]:
        optimizer, counted = make(exchange, sync_every=2, delay=delay), []
        for step in range(4):
            train(optimizer, range(step, step + 1), exchange.rank)
            costs = [optimizer.stats]
            if step in (flush_after, 3):
                optimizer.flush()
                costs += [optimizer.stats] if optimizer.stats is not costs[0] else []
            counted.append((sum(cost.sent_bytes for cost in costs), sum(cost.received_bytes for cost in costs)))
        return counted

    at_once = ranks.threads(traffic, 2, 0, 3)[0]
    none, one = (0, 0), at_once[1]
    assert at_once == [none, one, none, one] != [none] * 4
    twice = (2 * one[0], 2 * one[1])
    for flush_after, counted in ((1, at_once), (2, [none, none, one, one]), (3, [none, none, none, twice])):
        assert ranks.threads(traffic, 2, 1, flush_after)[0] == counted


def test_other_initial_weights_become_those_of_rank_0_before_the_first_step_also_frozen_ones() -> None:
    def from_other_weights(exchange: Exchange) -> list[Tensor]:
        parameters = problems.parameters(problems.FEW, seed=exchange.rank)
        parameters[1].requires_grad_(False)
        optimizer = LocalDeMo(torch.optim.SGD(parameters, lr=0.0), process_group=exchange, **SETTINGS)
        train(optimizer, range(1), exchange.rank)
        return problems.values(optimizer)

    with pytest.warns(UserWarning, match="of rank 1 differ from rank 0's"):
        first, second = ranks.threads(from_other_weights, 2)
    assert problems.same(first, second)
    assert problems.same(first, [p.detach() for p in problems.parameters(problems.FEW)])


# State


def _resumed(exchange: Exchange, at: int, settings: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    whole = make(exchange, **settings)
    train(whole, range(at), exchange.rank)
    whole.flush()
    with whole.shared():
        weights, state = problems.values(whole), copy.deepcopy(whole.state_dict())
    found = []
    for optimizer in (whole, make(exchange, **settings)):
        if optimizer is not whole:
            with torch.no_grad():
                for parameter, value in zip(problems.all_parameters(optimizer), weights, strict=True):
                    parameter.copy_(value)
            optimizer.load_state_dict(state)
        train(optimizer, range(at, 12), exchange.rank)
        optimizer.flush()
        found.append(problems.values(optimizer))
    return found[0], found[1]


@pytest.mark.parametrize("settings", [{}, {"delay": 1}, {"values": "2-bit", "outer_momentum": 0.5}], ids=str)
@pytest.mark.parametrize("at", [0, 3, 4, 6])
def test_resumed_run_equals_the_uninterrupted_one_and_all_ranks_after_a_round(
    at: int, settings: dict[str, Any]
) -> None:
    """Right after a round, in the middle of H steps, and with delay after a flush."""
    (first, _), *_ = found = ranks.threads(_resumed, 2, at, settings)
    for whole, resumed in found:
        assert problems.same(whole, resumed)
        assert problems.same(whole, first)


def test_state_has_all_keys_from_construction() -> None:
    keys = {"global", "error", "round", "local_steps", "transform", "saved_by"}
    optimizer = make(shapes=problems.SHAPES, outer_momentum=0.5)
    assert all(set(entry) == {*keys, "outer_velocity"} for entry in optimizer.state.values())
    assert len(optimizer.state) == len(problems.SHAPES)


def test_state_of_another_transform_is_refused() -> None:
    """The error is in the domain of the transform."""
    optimizer, other = make(), make(transform="identity")
    with pytest.raises(ValueError, match="domain of transform 'dct', and this LocalDeMo has 'identity'"):
        other.load_state_dict(optimizer.state_dict())


def test_a_parameter_that_was_frozen_when_saved_keeps_the_loaded_weight() -> None:
    """The model loads first, then the optimizer: its state has nothing of the frozen parameter."""
    parameters = problems.parameters(problems.FEW)
    parameters[0].requires_grad_(False)
    first = LocalDeMo(torch.optim.AdamW(parameters, lr=0.01), **SETTINGS)
    train(first, range(3))
    state = first.state_dict()
    again = make()
    frozen = problems.all_parameters(again)[0]
    with torch.no_grad():
        frozen.add_(1.0)  # the weights of the checkpoint
    before = frozen.detach().clone()
    with pytest.warns(UserWarning, match="nothing of parameter 0, .* right for a parameter that was frozen"):
        again.load_state_dict(state)
    for group in again.param_groups:
        group["lr"] = 1e-6
    train(again, range(3))
    torch.testing.assert_close(frozen.detach(), before, rtol=0, atol=1e-4)


def test_state_dict_between_rounds_warns_once_outside_shared() -> None:
    optimizer = make()
    train(optimizer, range(1))
    with optimizer.shared():
        optimizer.state_dict()
    with pytest.warns(UserWarning, match="1 step after the last round"):
        optimizer.state_dict()
    optimizer.state_dict()


def test_shared_shows_the_global_weights_and_takes_them_back() -> None:
    optimizer = make()
    train(optimizer, range(3))
    after = problems.values(optimizer)
    train(optimizer, range(3, 4))
    local = problems.values(optimizer)
    with optimizer.shared():
        assert problems.same(problems.values(optimizer), after)
        with optimizer.shared():
            assert problems.same(problems.values(optimizer), after)
        for call in (optimizer.step, optimizer.extract, optimizer.rollback, optimizer.flush, optimizer.resync):
            with pytest.raises(RuntimeError, match=r"inside `with optimizer\.shared"):
                call()
        for duplicate in (copy.deepcopy, pickle.dumps):
            with pytest.raises(RuntimeError, match=r"copying or pickling came inside `with optimizer\.shared"):
                duplicate(optimizer)
    assert problems.same(problems.values(optimizer), local)
    assert not problems.same(local, after)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copy_goes_on_like_the_original(duplicate: Callable[[LocalDeMo], LocalDeMo]) -> None:
    optimizer = make(top_k=None, samples=8)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    train(optimizer, range(4))
    twin, before = duplicate(optimizer), problems.values(optimizer)
    marks = train(twin, range(4, 9))
    assert problems.same(problems.values(optimizer), before), "a copy steps itself"
    assert train(optimizer, range(4, 9)) == marks
    assert problems.same(problems.values(twin), problems.values(optimizer))
    assert twin.samples == 8


def test_states_that_do_not_fit_are_refused_and_change_nothing() -> None:
    optimizer = LocalDeMo(torch.optim.AdamW([Parameter(torch.zeros(32, 16))], lr=0.5), top_k=8, codec=Codec(chunk=16))
    other = LocalDeMo(torch.optim.AdamW([Parameter(torch.zeros(16, 32))], lr=0.1), top_k=8, codec=Codec(chunk=16))
    before = copy.deepcopy(optimizer.state_dict())
    plain = torch.optim.AdamW([Parameter(torch.zeros(32, 16))])
    for state in (other.state_dict(), {}, {"param_groups": before["param_groups"]}, plain.state_dict()):
        with pytest.raises(ValueError, match="state"):
            optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5


@torch.no_grad()
def _loaded() -> tuple[LocalDeMo, Parameter]:
    """An optimizer whose model had weights loaded after construction, before the first step."""
    parameter = Parameter(torch.zeros(4, 4))
    optimizer = LocalDeMo(torch.optim.SGD([parameter], lr=0.0), sync_every=1)
    parameter.fill_(7.0)
    parameter.grad = torch.zeros(4, 4)
    return optimizer, parameter


@pytest.mark.parametrize("call", ["step", "resync", "extract", "shared", "state_dict"])
def test_weights_loaded_before_the_first_step_stay(call: str) -> None:
    optimizer, parameter = _loaded()
    found = getattr(optimizer, call)()
    if call == "extract":
        optimizer.apply(optimizer.exchange(found))
    elif call == "shared":
        with found:
            assert torch.equal(parameter.detach(), torch.full((4, 4), 7.0))
    assert torch.equal(parameter.detach(), torch.full((4, 4), 7.0))
    assert torch.equal(optimizer.state_dict()["state"][0]["global"], parameter.detach())
    assert optimizer.fingerprint() == LocalDeMo(torch.optim.SGD([parameter], lr=0.0)).fingerprint()


# Failures, and numbers that are not finite


class _Nested(torch.optim.SGD):
    """Keeps its momentum in a list, as some optimizers do, and makes it at construction alone."""

    def __init__(self, parameters: list[Parameter], lr: float) -> None:
        super().__init__(parameters, lr)
        for parameter in parameters:
            self.state[parameter]["buffers"] = [torch.zeros_like(parameter)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for parameter in self.param_groups[0]["params"]:
            (momentum,) = self.state[parameter]["buffers"]
            parameter.data.add_(momentum.mul_(0.9).add_(parameter.grad), alpha=-0.01)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e33])
@pytest.mark.parametrize(
    "inner",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01), lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.01), lambda p: _Nested(p, lr=0.01),
    ],
    ids=["adamw", "sgd", "adagrad", "nested"],
)  # fmt: skip
def test_a_bad_gradient_costs_one_round_and_leaves_nothing_behind(inner: Any, bad: float) -> None:
    """Beside it is a huge gradient that is finite: in a state, nothing of either may stay."""

    def trained(exchange: Exchange) -> tuple[list[int], float]:
        parameters = problems.parameters([(20, 12), (5,)])
        optimizer = LocalDeMo(inner(parameters), sync_every=2, process_group=exchange, codec=Codec(chunk=16))
        skipped = []
        for step in range(16):
            problems.set_gradients(parameters, step, exchange.rank)
            if exchange.rank == 1 and step == 4:
                for parameter in parameters:
                    parameter.grad.view(-1)[:2] = torch.tensor([bad, 1e22])  # type: ignore[union-attr]
            optimizer.step()
            skipped += [optimizer.stats.skipped] if optimizer.local_steps == 0 else []
        largest = max(float(p.detach().abs().max()) for p in parameters)
        return [number for number, skip in enumerate(skipped) if skip], largest

    for skipped, largest in ranks.threads(trained, 2):
        assert skipped in ([2], [])  # AdamW makes a step of any finite gradient
        assert largest < 10


def test_grad_scaler_changes_nothing_of_local_demo() -> None:
    ends = []
    for enabled in (True, False):
        parameters = problems.parameters([(8, 4)])
        optimizer = LocalDeMo(torch.optim.SGD(parameters, lr=0.1), sync_every=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(parameters[0].square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.local_steps == 0
        ends.append(problems.values(optimizer))
    assert problems.same(*ends)
    assert not problems.same(ends[0], [p.detach() for p in problems.parameters([(8, 4)])])


def test_step_that_grad_scaler_found_infinite_counts_as_a_local_step() -> None:
    optimizer: Any = make()
    before = problems.values(optimizer)
    problems.set_gradients(problems.all_parameters(optimizer), 0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    optimizer.step()
    assert optimizer.local_steps == 1
    assert problems.same(problems.values(optimizer), before)


# Like any optimizer


def test_schedulers_set_the_inner_rates_also_after_a_state_was_loaded() -> None:
    optimizer = make()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(optimizer, range(1))
    schedule.step()
    assert optimizer.inner[0].param_groups[0]["lr"] == 0.005
    optimizer.inner[0].load_state_dict(optimizer.inner[0].state_dict())
    train(optimizer, range(1, 2))
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.inner[0].param_groups[0]["lr"] == 0.5


def test_bfloat16_parameters_have_float32_global_weights_and_error() -> None:
    parameters = problems.parameters([(32, 16)], dtype=torch.bfloat16)
    optimizer = LocalDeMo(torch.optim.SGD(parameters, lr=1e-3), sync_every=2, top_k=64, codec=Codec(chunk=16))
    train(optimizer, range(4))
    entry = optimizer.state_dict()["state"][0]
    assert entry["global"].dtype == entry["error"].dtype == torch.float32
    assert torch.equal(entry["global"].to(torch.bfloat16), parameters[0].detach())


@pytest.mark.parametrize("delay", [0, 1])
def test_frozen_parameters_cost_nothing_until_they_are_unfrozen(delay: int) -> None:
    """test_local_counting.py freezes and unfreezes some on two ranks."""
    quantized = Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    parameters = [*problems.parameters(problems.FEW), quantized]
    parameters[0].requires_grad_(False)
    optimizer = LocalDeMo(torch.optim.AdamW(parameters, lr=0.01), delay=delay, **SETTINGS)
    frozen, lengths = parameters[0].detach().clone(), []
    for step in range(11):  # unfreezes it with a round in flight
        parameters[0].requires_grad_(step >= 4)
        problems.set_gradients(parameters[:-1], step)
        optimizer.step()
        lengths.append(optimizer.replicator.message_bytes)
        assert (parameters[0] in optimizer.state) == (step >= 4)
        assert step > 3 or torch.equal(parameters[0], frozen)
    assert quantized not in optimizer.state
    assert lengths[0] == lengths[3] < lengths[4] == lengths[10]
    assert not torch.equal(parameters[0], frozen)


def test_group_can_be_added_after_a_round_and_a_refused_one_leaves_no_trace() -> None:
    optimizer = make(exact=True)
    train(optimizer, range(3))
    bad: list[Any] = [
        {"params": [Parameter(torch.zeros(3, dtype=torch.complex64))]},
        {"params": [Parameter(torch.zeros(3, dtype=torch.float64))]},  # not with exact=True
        {"params": [problems.all_parameters(optimizer)[0]]},
    ]
    for group in bad:
        with pytest.raises((TypeError, ValueError)):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == len(optimizer.inner[0].param_groups) == 1
    train(optimizer, range(3, 6))
    added = Parameter(torch.ones(6, 6))
    optimizer.add_param_group({"params": [added], "lr": 0.1})
    train(optimizer, range(6, 9))
    assert not torch.equal(added.detach(), torch.ones(6, 6))
    assert optimizer.inner[0].param_groups[1] is optimizer.param_groups[1]


@pytest.mark.parametrize(
    ("inner", "settings", "error", "said"),
    [
        (lambda _: None, {}, TypeError, "inner is a NoneType; give a torch optimizer"),
        (lambda _: [], {}, ValueError, "inner is an empty list"),
        # as transformers' Trainer calls what it is given as optimizer_cls_and_kwargs
        (lambda p: p, {}, TypeError, r"LocalDeMo wraps an optimizer.*optimizers=\(optimizer, None\)"),
        (lambda p: [{"params": p}], {}, TypeError, r"LocalDeMo wraps an optimizer.*optimizers=\(optimizer, None\)"),
        (DeMo, {}, TypeError, "which synchronizes the ranks itself"),
        (lambda p: LocalDeMo(torch.optim.SGD(p)), {}, TypeError, "which synchronizes the ranks itself"),
        (torch.optim.LBFGS, {}, TypeError, "LBFGS"),
        (ZERO, {}, TypeError, "inner is a ZeroRedundancyOptimizer, which synchronizes the ranks itself"),
        (torch.optim.SGD, {"sync_every": 0}, ValueError, "sync_every is 0"),
        (torch.optim.SGD, {"sync_every": 2.0}, TypeError, "sync_every is 2.0"),
        (torch.optim.SGD, {"error_decay": 1.1}, ValueError, "error_decay is 1.1"),
        (torch.optim.SGD, {"delay": 2}, ValueError, "delay is 2; give 0, or 1"),
        (
            torch.optim.SGD,
            {"route": "owner", "top_k": 9},
            ValueError,
            "answers with signs of all coefficients, and top_k is 9: leave it out, or use",
        ),
        (torch.optim.SGD, {"samples": 0}, ValueError, "samples is 0"),
        (torch.optim.SGD, {"samples": 2**32}, ValueError, "samples is 4294967296; give at most 4294967295"),
        (torch.optim.SGD, {"samples": 2, "top_k": 9}, ValueError, "samples weigh signs of all coefficients"),
        (torch.optim.SGD, {"values": "2-bit"}, ValueError, "sends the signs of all coefficients; values is '2-bit'"),
        (lambda p: [torch.optim.SGD(p), torch.optim.AdamW(p)], {}, ValueError, r"inner\[0\] and inner\[1\] both have"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_arguments_are_refused(inner: Any, settings: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        LocalDeMo(inner([Parameter(torch.zeros(4, 4))]), **settings)


def test_extract_by_hand_is_refused_with_a_round_in_flight() -> None:
    optimizer = make(SingleRank(), delay=1, sync_every=1)
    train(optimizer, range(1))
    with pytest.raises(RuntimeError, match=r"call flush\(\)"):
        optimizer.extract()
    optimizer.flush()
    optimizer.apply(optimizer.exchange(optimizer.extract()))


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_loading_replaces_the_whole_state_of_a_used_optimizer(kind: str) -> None:
    """Also of a parameter that was frozen when it was saved, and of the number of rounds."""
    a, b = problems.parameters([(17, 19), (20,)])
    b.requires_grad_(False)
    optimizer = problems.optimizer_of(kind, [a, b], process_group=SingleRank())

    def train(steps: range) -> None:
        for step in steps:
            problems.set_gradients([a, b], step)
            optimizer.step()

    train(range(4))
    saved, weights = copy.deepcopy(optimizer.state_dict()), [a.detach().clone(), b.detach().clone()]
    b.requires_grad_(True)
    train(range(4, 12))
    with torch.no_grad():
        a.copy_(weights[0])
        b.copy_(weights[1])
    with pytest.warns(UserWarning, match="starts at"):
        optimizer.load_state_dict(saved)
    assert int(optimizer.replicator.round_number) == (4 if kind == "DeMo" else 2)
    entry = optimizer.state[b]
    assert not entry["momentum" if kind == "DeMo" else "error"].any()
    twins = problems.parameters([(17, 19), (20,)])
    for twin, weight in zip(twins, weights, strict=True):
        twin.data.copy_(weight)
    fresh = problems.optimizer_of(kind, twins, process_group=SingleRank())
    with pytest.warns(UserWarning, match="starts at"):
        fresh.load_state_dict(copy.deepcopy(saved))
    train(range(20, 26))
    for step in range(20, 26):
        problems.set_gradients(twins, step)
        fresh.step()
    assert problems.same([a.detach(), b.detach()], [twin.detach() for twin in twins])


class _ByNumber(torch.optim.SGD):
    """Keeps momentum per half of a parameter, under the half's number, as HeavyBall does by view."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            for number, (part, gradient) in enumerate(zip(parameter.chunk(2), parameter.grad.chunk(2), strict=True)):
                entry = self.state[parameter].setdefault(number, {"momentum": torch.zeros_like(part)})
                entry["momentum"].mul_(0.9).add_(gradient)
                part.sub_(entry["momentum"], alpha=0.1)


def test_a_state_whose_keys_are_no_text_is_saved_and_loaded() -> None:
    ends = []
    for resumes in (False, True):
        parameters = problems.parameters([(16, 16), (20,)])
        optimizer = LocalDeMo(_ByNumber(parameters, lr=0.1), sync_every=2, process_group=SingleRank())
        for step in range(6):
            if resumes and step == 4:
                saved = problems.by_file(optimizer.state_dict())
                optimizer = LocalDeMo(_ByNumber(parameters, lr=0.1), sync_every=2, process_group=SingleRank())
                optimizer.load_state_dict(saved)
            problems.set_gradients(parameters, step)
            optimizer.step()
        ends.append([parameter.detach() for parameter in parameters])
    assert problems.same(*ends)
    with pytest.raises(TypeError, match="the state of parameter 0 holds 0, a dict, which cannot be consolidated"):
        optimizer.consolidate_state_dict()
