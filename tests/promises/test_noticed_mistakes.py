"""Mistakes noticed: parameters that nothing, or something else, synchronises; local weights shown or lost; rates."""

import contextlib
import copy
import functools
import math
import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import demopt
import problems
import ranks
from demopt import DeMo, LocalDeMo
from demopt.exchange import liveness


def _told(function, *args):
    """The warnings of rank 0 of two ranks; only rank 0 may warn."""
    first, second = ranks.run(function, 2, *args)
    assert second == []
    return list(first)


def _assert_told(told, *says):
    """Exactly one warning, which says all of this; without `says`, no warning."""
    assert len(told) == bool(says), told
    for each in says:
        assert each in told[0]


ADAMW = torch.optim.AdamW
DEMO = functools.partial(problems.optimizer_of, "DeMo")
#: The optimizers of a model's matrices and biases.
BESIDE = {
    "AdamW for biases": lambda matrices, biases: [DEMO(matrices), ADAMW(biases)],
    "LocalDeMo, AdamW for biases": lambda matrices, biases: [LocalDeMo(ADAMW(matrices), sync_every=2), ADAMW(biases)],
    "frozen biases": lambda matrices, _: [DEMO(matrices)],
    "LocalDeMo around two": lambda *both: [LocalDeMo([*map(ADAMW, both)], sync_every=2)],
    "a model of AdamW's beside": lambda matrices, biases: [
        DEMO([*matrices, *biases]),
        ADAMW(demopt.unsync(nn.Linear(2, 2)).parameters()),
    ],
}
BIASES = ("parameter '0.bias' and 1 more of the model that went through unsync can train", "demopt.muon_groups")


@pytest.mark.parametrize("kind", BESIDE)
@ranks.each(2)
def test_parameters_of_an_unsynced_model_that_no_demo_has_are_noticed_once(rank, kind):
    torch.manual_seed(0)
    model = demopt.unsync(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)))
    matrices, biases = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    for parameter in biases:
        parameter.requires_grad_(kind != "frozen biases")
    optimizers, heard = BESIDE[kind](matrices, biases), []
    for step in range(3):
        problems.set_gradients(model.parameters(), step, rank)
        for optimizer in optimizers:
            heard += problems.warned(optimizer.step)
    _assert_told(heard, *(BIASES if rank == 0 and kind.endswith("AdamW for biases") else ()))


@ranks.each(2)
def test_optimizer_that_replaces_one_with_local_steps_says_how_to_send_them(rank):
    parameters, built = problems.parameters([(4, 4)]), []

    def build(of=parameters):
        built.append(LocalDeMo(ADAMW(of), sync_every=2))

    build()
    problems.fingerprints(built[0], range(2), rank)
    _assert_told(problems.warned(build))
    problems.fingerprints(built[1], range(2, 3), rank)
    _assert_told(problems.warned(lambda: build(problems.parameters([(4, 4)]))))
    _assert_told(problems.warned(build), *(["finish_round(last=True) on all ranks before this"] if rank == 0 else []))
    before = [p.detach().clone() for p in parameters]
    for parameter in parameters:  # as a learning-rate finder does
        parameter.detach().zero_()
    _assert_told(problems.warned(build))
    for parameter, value in zip(parameters, before, strict=True):
        parameter.detach().copy_(value)
    built[1].finish_round(last=True)
    _assert_told(problems.warned(build))


@ranks.each(2)
def test_weights_in_memory_that_spawned_ranks_may_share_are_noticed(rank):
    model = nn.Linear(4, 4).share_memory()
    optimizer = DEMO(model.parameters())
    problems.set_gradients(model.parameters(), 0, rank)
    _assert_told(
        problems.warned(optimizer.step), *(["in shared memory, as torch.multiprocessing.spawn"] if rank == 0 else [])
    )


def test_step_of_an_inner_optimizer_alone_is_refused_and_moves_nothing():
    optimizer = problems.local(None, [(4, 4)], ADAMW, sync_every=2)
    for each in (optimizer, copy.deepcopy(optimizer)):
        (parameter,) = problems.all_parameters(each)
        problems.set_gradients([parameter], 0)
        says = r"step\(\) of the AdamW inside a LocalDeMo was called.*call step\(\)"
        with problems.unchanged(each), pytest.raises(RuntimeError, match=says):
            each.inner[0].step()
        before = parameter.detach().clone()
        each.step()
        assert each.local_steps == 1
        assert not torch.equal(parameter, before)


def test_inner_optimizer_steps_where_that_is_no_mistake():
    optimizer = problems.local(None, [(4, 4)], ADAMW, sync_every=2)
    (inner,) = optimizer.inner
    again = LocalDeMo(inner, sync_every=2)  # replaces the other
    problems.fingerprints(again, range(1))
    inner.param_groups[0]["lr"] = 0.0  # as torch does to create the state
    inner.step()
    inner.param_groups[0]["lr"] = 0.1
    del optimizer, again
    inner.step()


#: Settings of optimizers; the weight decay of LocalDeMo's AdamW moves all ranks alike without gradients.
METHODS = {"DeMo": {}, "LocalDeMo": {}, "LocalDeMo, delay": {"sync_every": 1, "delay": 1}}
LATE = "the same data, first with zero gradients"  # as after a first step with a loss of zero


@pytest.mark.parametrize(
    ("kind", "method", "at"),
    [
        *((kind, "DeMo", 0) for kind in ("ddp", "the same data")),
        *((LATE, method, 1) for method in METHODS),
        *((kind, "DeMo", None) for kind in ("ddp without its synchronisation", "no gradients")),
        *((kind, method, None) for kind in ("zero gradients", "NaN at first") for method in METHODS),
    ],
)
@ranks.each(2)
def test_synchronised_gradients_warn_rank_0_once_when_they_are_not_zero(rank, kind, method, at):
    torch.manual_seed(0)
    model = nn.Linear(9, 4)
    if kind.startswith("ddp"):
        model = DistributedDataParallel(model)
    optimizer = problems.optimizer_of(method.partition(",")[0], model.parameters(), **METHODS[method])
    says = "bit-identical gradients, so something already synchronizes them (Distr"
    for step in range(3):
        data = problems.draw((5, 9), 0 if kind.startswith("the same data") else rank, step)
        model.zero_grad()
        with model.no_sync() if kind == "ddp without its synchronisation" else contextlib.nullcontext():
            model(torch.zeros(5, 9) if kind == "zero gradients" else data).square().mean().backward()
        for parameter in model.parameters() if kind == "zero gradients" or (kind == LATE and step == 0) else ():
            parameter.grad = torch.zeros_like(parameter)
        if kind == "no gradients":
            model.zero_grad()
        if kind == "NaN at first" and step == 0:
            model.weight.grad.fill_(math.nan)
            model.bias.grad.fill_(math.nan)
        told = problems.warned(optimizer.step)
        told = [text for text in told if kind != "no gradients" or "has had a gradient" not in text]
        _assert_told(told, *([says] if (rank, step) == (0, at) else []))


@ranks.each(2)
def test_fsdp2_over_the_same_ranks_is_refused():
    model = fully_shard(nn.Linear(9, 4), mesh=init_device_mesh("cpu", (2,)))
    model(torch.ones(5, 9)).sum().backward()
    with pytest.raises(ValueError, match="FSDP2"):
        DEMO(model.parameters()).step()


#: The class of a model's two norms, and the one that a warning names, if there is a warning.
NORMS = {
    **dict.fromkeys(("unsync of a plain model", "muon_adamw", "muon_groups"), (nn.BatchNorm1d, "1")),
    "unsync": (nn.BatchNorm1d, "module.1"),
    "SyncBatchNorm": (nn.SyncBatchNorm, ""),
    "frozen": (lambda size: nn.BatchNorm1d(size).eval(), ""),
    "without statistics": (lambda size: nn.BatchNorm1d(size, track_running_stats=False), ""),
    "of layers": (nn.LayerNorm, ""),
}


def _batch_norm(rank, world_size, how):
    """The warnings of construction; three steps cause none."""
    torch.manual_seed(0)
    norm, made = NORMS[how][0], []
    model = nn.Sequential(nn.Linear(6, 4), norm(4), norm(4), nn.Linear(4, 2))

    def build():
        wrapped = DistributedDataParallel(model) if how == "unsync" else model
        if how in ("unsync", "unsync of a plain model"):
            demopt.unsync(wrapped)
        if how == "muon_groups":
            made.append(DeMo(demopt.muon_groups(wrapped, lr=0.1)))
        else:
            made.append(LocalDeMo(demopt.muon_adamw(wrapped, lr=0.1), sync_every=2))

    heard = problems.warned(build)
    assert problems.warned(lambda: problems.fingerprints(made[0], range(3), rank)) == []
    return heard


@pytest.mark.parametrize("how", NORMS)
def test_batch_norm_warns_once_where_the_model_is_given(how):
    named = NORMS[how][1]
    whose = "whose running statistics every rank takes from its own", "demopt.broadcast_buffers(model)"
    _assert_told(_told(_batch_norm, how), *((f"BatchNorm1d ({named}, 2 in all)", *whose) if named else ()))
    assert ranks.run(_batch_norm, 1, how) == [[]]


class Layers(nn.Module):  # torch.compile leaves out the forward of nn.Sequential
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, inputs):
        return self.second(self.first(inputs).tanh())


def _evaluated(rank, world_size, how, at):
    """The warnings of two evaluations after `at` steps of a LocalDeMo with a round every 2."""
    torch.manual_seed(0)
    model = Layers()
    if how in ("DDP", "module of DDP"):
        model = demopt.unsync(DistributedDataParallel(model))
    elif how == "compiled":
        model = torch.compile(model, backend="eager", fullgraph=True)
    elif how == "trains in eval()":
        model.eval()
    if how == "DeMo":
        optimizer = DEMO(demopt.unsync(model).parameters())
    else:
        optimizer = LocalDeMo(demopt.muon_adamw(model, lr=0.02), sync_every=2)
    for step in range(at):
        optimizer.zero_grad()
        model(problems.draw((3 + step, 6), rank, step)).square().mean().backward()
        optimizer.step()
    changes = {"module of DDP": lambda model: model.module, "a copy": copy.deepcopy, "pickled": problems.by_pickle}
    shown = changes.get(how, lambda model: model)(model)

    def evaluate():
        for _ in range(2):
            shown.eval()
            with optimizer.shared() if how == "shared" else torch.no_grad():
                shown(problems.draw((3, 6), rank))
            shown.train()
            shown(problems.draw((3, 6), rank))

    return problems.warned(evaluate)


EVALUATED = (
    "the model ran in eval() 1 step after the last round, with the local weights of rank 0", "with optimizer.shared():"
)  # fmt: skip


@pytest.mark.parametrize("how", ["plain", "DDP", "module of DDP", "compiled"])
def test_evaluation_between_rounds_outside_of_shared_warns_once(how):
    _assert_told(_told(_evaluated, how, 3), *EVALUATED)


@pytest.mark.parametrize("how", ["shared", "a copy", "pickled", "trains in eval()", "DeMo"])
def test_evaluation_that_is_no_mistake_warns_of_nothing(how):
    """Neither does an evaluation right after a round, or with a single rank."""
    assert _told(_evaluated, how, 3) == _told(_evaluated, "plain", 4) == ranks.run(_evaluated, 1, "plain", 3)[0] == []


@ranks.each(2)
def test_rank_0s_model_has_one_hook_however_often_its_ranks_change(rank):
    """torchft has another group in every quorum."""
    model = Layers()
    optimizer = LocalDeMo(demopt.muon_adamw(model, lr=0.02), sync_every=2)
    for step in range(3):
        problems.set_gradients(model.parameters(), step, rank)
        optimizer.step()
        optimizer.regroup(None)
    assert len(model._forward_pre_hooks) == (rank == 0)


@ranks.each(2)
def test_torchscript_takes_the_model_inside_shared_and_outside_rank_0_says_so(rank):
    """For a copy, too."""
    torch.manual_seed(0)
    model, inputs = Layers(), problems.draw((3, 6))
    optimizer = LocalDeMo(demopt.muon_adamw(model, lr=0.02), sync_every=2)
    problems.set_gradients(model.parameters(), 0, rank)
    optimizer.step()
    refused = pytest.raises(AttributeError, match=r"call it inside `with optimizer\.shared\(\):`")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script.*")
        with optimizer.shared():
            for made in (model, copy.deepcopy(model)):
                assert torch.equal(torch.jit.script(made)(inputs), made(inputs))
        for made in (model, copy.deepcopy(model)):
            with refused if rank == 0 else contextlib.nullcontext():
                torch.jit.script(made)


@ranks.each(2)
def test_scripted_model_trains_and_is_not_watched(rank):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script.*")
        torch.manual_seed(0)
        model = torch.jit.script(nn.Linear(4, 4))
    optimizer = demopt.LocalDeMo(demopt.muon_adamw(model, lr=0.1), sync_every=1)
    model(torch.full((1, 4), rank + 1.0)).sum().backward()
    optimizer.step()
    return optimizer.fingerprint()


@pytest.mark.parametrize("together", [True, False])
@ranks.each(2)
def test_two_local_demo_that_take_steps_with_common_parameters_say_so(rank, together):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="state_device") as _failed:  # a notebook keeps it, and with it the optimizer
        demopt.LocalDeMo(torch.optim.SGD(model.parameters(), lr=0.1), state_device="cuda")
    first, second = (demopt.LocalDeMo(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=1) for _ in range(2))
    inputs = torch.full((1, 4), rank + 1.0)

    def steps():
        for optimizer in [first, second] * 2 if together else [first, first, second, second]:
            model.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()

    told = problems.warned(steps)  # also that weights were changed outside the optimizer
    assert any("Give common parameters to one LocalDeMo" in text for text in told) == (together and rank == 0)


@pytest.mark.parametrize(
    ("order", "lose"), [("optimizer, model", [0, 1]), ("model, optimizer", []), ("model, optimizer, DDP", [1])]
)
@ranks.each(2)
def test_ranks_that_lose_steps_because_the_optimizer_was_loaded_too_early_say_so(rank, order, lose):
    optimizer, again = (problems.local(None, [(4, 4)], problems.ADAMW, sync_every=2) for _ in range(2))
    problems.fingerprints(optimizer, range(3), rank)
    with optimizer.shared():
        weights, state = problems.values(optimizer), problems.by_file(optimizer.state_dict())
    for part in order.split(", "):
        if part == "optimizer":
            again.load_state_dict(state)
        elif part == "DDP":
            DistributedDataParallel(nn.ParameterList(problems.all_parameters(again)))
        else:
            with torch.no_grad():
                problems.all_parameters(again)[0].copy_(weights[0])
    told = problems.warned(lambda: problems.fingerprints(again, [3], rank))
    says = "its steps since the last round are lost. Load the model, wrap it in Dis"
    _assert_told(told, *([says] if rank in lose else []))


def _decayed(step):
    return 0.02 * (1 - step / 40)


#: The rates that groups are built with; those that a script sets at a step; the step with the hint, and the hint.
BELOW = "the learning rate of inner group 0 is 0.002; it was built with 0.02"
ALONE = "the learning rate of param_groups[0], and those of the other 1 are as at first"
PAIR = [0.02, 0.02]
RATES = {
    "AdamW's": (PAIR, lambda _: [0.002] * 2, 3, BELOW),
    "AdamW's, after a warm-up": (PAIR, lambda step: [0.002 * min(1.0, (step + 1) / 4)] * 2, 6, BELOW),
    "AdamW's, late in a run": (PAIR, lambda _: [0.002] * 2, None, ""),
    "half": (PAIR, lambda _: [0.01] * 2, None, ""),
    "its own, after a warm-up": (PAIR, lambda step: [0.02 * min(1.0, (step + 1) / 10)] * 2, None, ""),
    "its own, decayed": (PAIR, lambda step: [0.02 * 0.5**step] * 2, None, ""),
    "a scheduler": (PAIR, lambda _: [], None, ""),
    "nothing": (PAIR, lambda _: [], None, ""),
    "a small one where none was given": ([None], lambda _: [1e-5], None, ""),
    "decayed in the first of two alone": ([0.02, 0.01], lambda step: [_decayed(step)], 20, ALONE),
    "decayed in both": ([0.02, 0.01], lambda step: [_decayed(step)] * 2, None, ""),
    "decayed in the second": ([0.02, 0.01], lambda step: [0.02, _decayed(step)], None, ""),
    "decayed in the first, and the other does not train yet": ([0.02, 0.0], lambda s: [_decayed(s)], None, ""),
    "decayed in the only one": ([0.02], lambda step: [_decayed(step)], None, ""),
    "in one optimizer, decayed in the first group": ([0.02, 0.01], lambda step: [_decayed(step)], None, ""),
    "in one optimizer, a part of it in the first group": (PAIR, lambda _: [0.001, 0.01], None, ""),
    "in one optimizer, AdamW's": (PAIR, lambda _: [0.002] * 2, 3, BELOW),
}


@pytest.mark.parametrize("kind", RATES)
def test_rate_of_a_script_far_below_the_given_one_or_in_the_first_group_alone_causes_one_hint(kind):
    given, written, at, says = RATES[kind]
    rates = [{} if rate is None else {"lr": rate} for rate in given]
    pairs = zip(problems.parameters([(4, 4), (4,)]), rates, strict=False)
    groups = [{"params": [parameter], **rate} for parameter, rate in pairs]
    optimizers = [groups] if kind.startswith("in one") else [[group] for group in groups]
    optimizer = LocalDeMo([*map(torch.optim.SGD, optimizers)], sync_every=1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.1) if kind == "a scheduler" else None
    if kind.endswith("late in a run"):
        optimizer.load_state_dict(problems.by_file(optimizer.state_dict()))
    for step in range(23):
        for group, rate in zip(optimizer.param_groups, written(step), strict=False):
            group["lr"] = rate
        told = problems.warned(lambda step=step: problems.fingerprints(optimizer, [step]))
        _assert_told(told, *([says] if step == at else []))
        if schedule is not None:
            schedule.step()


@pytest.mark.parametrize("build", [DeMo, lambda parameters: LocalDeMo(torch.optim.SGD(parameters))])
def test_optimizer_built_before_to_empty_or_with_a_group_of_the_meta_device_says_so(build):
    optimizer = build(nn.Linear(2, 2, device="meta").parameters())
    with pytest.raises(ValueError, match="on the meta device: build it after"):
        optimizer.step()
    optimizer = build(nn.Linear(2, 2).parameters())
    problems.fingerprints(optimizer, range(2))
    with pytest.raises(ValueError, match="some parameters are on the meta device: give them"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, device="meta"))]})
    assert len(optimizer.param_groups) == 1
    problems.fingerprints(optimizer, range(2, 4))
    with pytest.raises(ValueError, match="some parameters are on the meta device"):
        build([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))])


@pytest.mark.parametrize("call", ["consolidate_state_dict()", "resync()", "broadcast_buffers()"])
@ranks.each(2)
def test_call_of_all_ranks_under_rank_0_names_itself_and_sends_nothing(rank, call):
    liveness.ANSWER_SECONDS = 60.0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
    optimizer = LocalDeMo(torch.optim.AdamW(model.parameters(), lr=0.1), sync_every=1)
    model.register_buffer("mean", torch.zeros(3))
    calls = {
        "consolidate_state_dict()": optimizer.consolidate_state_dict,
        "resync()": optimizer.resync,
        "broadcast_buffers()": lambda: demopt.broadcast_buffers(model),
    }
    problems.set_gradients(model.parameters(), 0, rank)
    optimizer.step()
    calls[call]()  # on all ranks it does its work
    problems.set_gradients(model.parameters(), 1, rank)
    if rank == 0:
        told = rf"(?s)^rank 0( \(host .*\))? called {re.escape(call)}, and rank 1 .*of 2 went on without.*"
        with pytest.raises(demopt.ExchangeError, match=rf"{told}call it on all ranks, not under `if rank == 0:`$"):
            calls[call]()
    optimizer.step()  # nothing was sent: it can go on, as the others do


@ranks.each(2)
def test_resync_of_the_model_of_one_rank_alone_changes_nothing(rank):
    liveness.ANSWER_SECONDS = 60.0
    model = nn.Linear(6, 4)
    optimizer = LocalDeMo(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=2)
    for step in range(3):
        problems.set_gradients(model.parameters(), step, rank)
        optimizer.step()
    if rank == 0:
        local = problems.bits(model.parameters())
        with pytest.raises(demopt.ExchangeError, match=r"called resync\(\), and rank 1 "):
            optimizer.resync(model=True)
        assert (optimizer.local_steps, problems.bits(model.parameters())) == (1, local)
    problems.set_gradients(model.parameters(), 3, rank)
    optimizer.step()
    found: list = [None, None]
    torch.distributed.all_gather_object(found, optimizer.fingerprint())
    assert found[0] == found[1]


@ranks.each(2)
def test_regroup_of_one_rank_alone_is_told_before_it_sends_anything(rank):
    liveness.ANSWER_SECONDS = 60.0
    optimizer = problems.demo(None)
    problems.fingerprints(optimizer, range(2), rank)
    if rank == 0:
        session = optimizer.replicator.session
        optimizer.regroup(None)
        told = r"rank 0 .*called step\(\) for the first time, or after regroup\(\), and rank 1 .*of 2 went on without"
        with pytest.raises(demopt.ExchangeError, match=told):
            problems.fingerprints(optimizer, [2], rank)
        optimizer.replicator.session = session
    problems.fingerprints(optimizer, range(2, 4), rank)


@pytest.mark.filterwarnings("ignore:the state was saved 2 steps after the last round")
@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo", "owner"])
@ranks.alike(2)
def test_rounds_of_two_equal_optimizers_are_not_averaged_with_each_other(exchange, kind):
    """Rank 1 leaves out a step of the first of them."""
    more = {"process_group": exchange} | ({"route": "owner", "top_k": None} if kind == "owner" else {})
    twins = [problems.optimizer_of(kind, problems.parameters([(40, 8)]), **more) for _ in range(2)]
    for step in range(4):
        for number, optimizer in enumerate(twins):
            problems.set_gradients(problems.all_parameters(optimizer), step, exchange.rank, seed=number)
            optimizer.step()
    optimizer = twins[exchange.rank]
    if kind != "DeMo":
        problems.fingerprints(optimizer, [4], exchange.rank)  # a local step
    error = str(problems.refusal(optimizer, 5, exchange.rank))
    assert "the ranks are at rounds of 2 optimizers: some rank has left out a step" in error


@ranks.alike(2)
def test_rank_that_left_out_a_step_and_is_in_a_collective_of_its_script_is_told(exchange):
    optimizer = problems.optimizer_of("DeMo", problems.parameters([(4, 4)]), process_group=exchange)
    problems.fingerprints(optimizer, [0], exchange.rank)
    if exchange.rank == 0:
        error = str(problems.refusal(optimizer, 1, exchange.rank))
        assert "message of rank 1: begins with" in error
        assert "or the rank left out a step, and is in another collective" in error
    else:
        exchange.all_gather(torch.zeros(optimizer.stats.sent_bytes, dtype=torch.uint8))


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_parameters_replaced_in_mid_training_are_told_after_many_rounds_and_a_long_idle_or_frozen_phase_is_not(kind):
    model = nn.Linear(4, 2)
    optimizer = problems.optimizer_of(kind, model.parameters())

    def train(rounds, idle=False):
        for _ in range(rounds * optimizer.sync_every):
            optimizer.zero_grad()
            if not idle:
                model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(2)
        train(99, idle=True)
        train(1)
        model.requires_grad_(False)
        train(101, idle=True)
        model.requires_grad_(True)
        model.weight, model.bias = (nn.Parameter(each.detach().clone()) for each in (model.weight, model.bias))
        train(99)
    with pytest.warns(UserWarning, match="in the last 100 rounds. Were they replaced"):
        train(1)
