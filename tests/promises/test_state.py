"""All state is in `optimizer.state` from construction; a run that was saved, copied or pickled goes on bit for bit."""

import copy
import functools
import pickle
from collections import defaultdict
from dataclasses import asdict, make_dataclass

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter

import problems
import ranks
from demopt import DeMo, LocalDeMo, reshard
from demopt.exchange import SingleRank


def by_state_dict(old, carried=lambda state: state):
    """A new optimizer over a copy of the old one's parameters, with its state loaded."""
    new = DeMo(problems.twins(old), **problems.SMALL)
    new.load_state_dict(carried(old.state_dict()))
    return new


by_file = functools.partial(by_state_dict, carried=problems.by_file)
LOCAL = {"global", "error", "outer_velocity", "round", "local_steps", "transform", "saved_by"}


def test_state_keys_exist_from_construction():
    """Also for parameters without elements."""
    local = problems.local(shapes=problems.SHAPES, outer_momentum=0.5)
    for optimizer, keys in (problems.demo(shapes=problems.SHAPES), {"momentum", "step", "saved_by"}), (local, LOCAL):
        for steps in (0, 2):
            problems.train(optimizer, range(steps))
            assert set(optimizer.state) == set(problems.all_parameters(optimizer))
            assert all(set(entry) == keys for entry in optimizer.state.values())


def test_backward_through_a_graph_from_before_a_step_is_refused():
    """As with torch's optimizers; kernels write to parameters without torch's knowledge."""
    parameter = Parameter(torch.ones(64, 64))
    optimizer = DeMo([parameter], lr=0.1, process_group=SingleRank())
    loss = parameter.square().sum()
    parameter.grad = torch.ones(64, 64)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


OTHER = {"transform": "identity", "chunk": 8, "top_k": 5, "update": "sgd", "chunking": "divisor"}


@pytest.mark.parametrize("carrier", [by_state_dict, by_file, copy.deepcopy, problems.by_pickle])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("done", "settings"), [(0, {}), (3, {}), (3, OTHER), (3, {"update": "adamw"})])
def test_state_resumes_bit_for_bit(carrier, dtype, done, settings):
    """As everywhere in torch, the state's settings replace those of the constructor."""
    optimizer = problems.demo(dtype=dtype, **settings)
    problems.train(optimizer, range(done))
    resumed = carrier(optimizer)
    kept = [value for entry in resumed.state.values() for value in entry.values()]
    assert {value.dtype for value in kept if value.is_floating_point()} == {torch.float32}
    assert resumed.param_groups[0]["chunk"] == optimizer.param_groups[0]["chunk"]
    expected = problems.train(optimizer, range(done, done + 3))
    assert problems.same_history(problems.train(resumed, range(done, done + 3)), expected)
    assert {int(resumed.state[p]["step"]) for p in problems.all_parameters(resumed)} == {done + 3}


@pytest.mark.parametrize("carrier", [None, by_file, copy.deepcopy])
def test_files_of_an_optimizer_hold_momentum_once(carrier):
    """Pickling an optimizer needs help: views pickle their whole storage."""
    optimizer = problems.demo(shapes=[(64, 64)] * 20)
    optimizer = carrier(optimizer) if carrier is not None else optimizer
    held = sum(each.nbytes for each in (*problems.momenta(optimizer), *problems.all_parameters(optimizer)))
    assert max(len(problems.saved(optimizer)), len(pickle.dumps(optimizer))) < 1.1 * held + 20_000


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        *((problems.demo, {"update": update}) for update in ("signum", "adamw")),
        *((problems.local, more) for more in ({}, {"route": "owner"}, {"top_k": 24, "outer_momentum": 0.5})),
    ],
)
@ranks.alike(2)
def test_each_tensor_of_a_state_costs_what_it_holds(exchange, make, settings):
    """A view would bring its whole storage along: with 40 parameters, 40 times as much."""
    optimizer = make(exchange, [(32, 32)] * 40, **settings)
    problems.train(optimizer, range(2), exchange.rank)
    state = optimizer.state_dict()
    tensors = [value for entry in state["state"].values() for value in entry.values() if torch.is_tensor(value)]
    held = sum(tensor.nbytes for tensor in tensors)
    assert held >= 40 * 32 * 32 * 4
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == held
    snapshot = make_dataclass("Snapshot", ["state"])  # as pytorch/examples' minGPT-ddp saves
    for write in (problems.saved, pickle.dumps):
        whole = write(asdict(snapshot(state)))  # asdict copies each tensor by itself
        assert len(whole) < 1.1 * held + 1000 * len(tensors), write
        parts = [write(copy.deepcopy(tensor)) for tensor in tensors]
        assert sum(map(len, parts)) < 1.1 * held + 2000 * len(tensors), write
    places = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(places) == len(tensors), "safetensors refuses tensors that share memory"


def test_deepcopy_with_model_trains_the_copied_model():
    model = torch.nn.Linear(5, 3)
    twin_model, twin = copy.deepcopy((model, DeMo(model.parameters(), lr=0.1)))
    assert [id(p) for p in problems.all_parameters(twin)] == [id(p) for p in twin_model.parameters()]
    assert set(twin.state) == set(twin_model.parameters())
    before = twin_model.weight.detach().clone()
    problems.train(twin, range(1))
    assert not torch.equal(twin_model.weight, before)


def _around(inner, frozen=True):
    """A LocalDeMo of two parameters, and the second parameter, which may be frozen."""
    first, last = problems.parameters([(8, 8), (4,)])
    last.requires_grad_(not frozen)
    return LocalDeMo(inner([first, last]), process_group=SingleRank()), last


def test_inner_state_of_a_frozen_parameter_loads_also_where_that_trains():
    """Adagrad creates its state at construction, whether parameters train or not."""
    (before, saved), (after, loaded) = _around(torch.optim.Adagrad), _around(torch.optim.Adagrad)
    before.inner[0].state[saved]["sum"].fill_(3.0)
    after.load_state_dict(reshard([before.state_dict()], 1)[0])
    assert after.state[loaded]["sum"].eq(3.0).all()
    with pytest.warns(UserWarning, match="the state has nothing of parameter 1"):
        _around(torch.optim.Adagrad, frozen=False)[0].load_state_dict(before.state_dict())
    with pytest.raises(ValueError, match="was saved by another optimizer, a LocalDeMo"):
        DeMo(problems.parameters([(8, 8), (4,)])).load_state_dict(before.state_dict())


def test_own_state_loads_after_a_parameter_was_frozen_and_a_state_without_it_came():
    later, last = _around(problems.SGD, frozen=False)
    last.requires_grad_(False)
    later.load_state_dict(_around(problems.SGD)[0].state_dict())
    later.load_state_dict(later.state_dict())
    _around(problems.SGD)[0].load_state_dict(later.state_dict())


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (problems.demo(shapes=[(32, 16), (40,)]), r"parameter 1.*\[20\].*another"),
        (torch.optim.SGD(problems.parameters([(32, 16), (20,)]), momentum=0.9), "momentum"),
        (problems.demo(shapes=[(32, 16)]), r"parameter groups of \[1\] parameters, this optimizer of \[2\]"),
        (torch.nn.Linear(1, 1), "the state has weight, bias, and no param_groups; give"),
    ],
)
def test_load_state_dict_refuses_another_model(other, says):
    optimizer = problems.demo(shapes=[(32, 16), (20,)])
    problems.train(optimizer, range(1))
    with problems.unchanged(optimizer), pytest.raises(ValueError, match=says):
        optimizer.load_state_dict(other.state_dict())
    assert int(optimizer.replicator.round_number) == 1


@pytest.mark.parametrize("carried", [lambda state: state, lambda state: reshard([state], 1)[0]])
def test_state_of_local_that_has_lost_its_weights_is_refused(carried):
    """With SGD inside, nothing is left of it but an error that has the shape of a momentum."""
    local, demo = problems.local(shapes=[(32, 16)]), problems.demo(shapes=[(32, 16)])
    state = local.state_dict()
    for name in ("global", "local_steps", "transform"):
        del state["state"][0][name]
    for optimizer in (local, demo):
        with problems.unchanged(optimizer), pytest.raises(ValueError, match="another optimizer"):
            optimizer.load_state_dict(carried(state))


def test_state_whose_settings_do_not_go_with_the_parameters_is_refused_and_changes_nothing():
    narrow, wide = (DeMo([Parameter(torch.ones(8, 8, dtype=dtype))]) for dtype in (torch.float32, torch.float64))
    narrow.param_groups[0] |= {"exact": True, "initial_lr": 0.5}
    problems.fingerprints(narrow, range(1))
    problems.fingerprints(wide, range(2))
    groups = copy.deepcopy(wide.state_dict()["param_groups"])
    with problems.unchanged(wide), pytest.raises(ValueError, match="exact"):
        wide.load_state_dict(narrow.state_dict())
    assert wide.state_dict()["param_groups"] == groups
    problems.fingerprints(wide, range(2, 3))


@pytest.mark.parametrize("make", [problems.demo, problems.local])
@pytest.mark.parametrize("fill", [float("nan"), 1.0])
def test_saving_raises_between_extract_and_apply(fill, make):
    optimizer = make(SingleRank())
    for parameter in problems.all_parameters(optimizer):
        parameter.grad = torch.full_like(parameter, fill)
    message = optimizer.extract()
    for save in (optimizer.state_dict, lambda: pickle.dumps(optimizer), lambda: copy.deepcopy(optimizer)):
        with pytest.raises(RuntimeError, match="extract and apply"):
            save()
    optimizer.apply(optimizer.exchange(message))
    optimizer.state_dict()


@ranks.each(2)
def test_optimizer_copies_keep_the_process_group_unless_it_was_given_and_cannot_be_pickled(rank):
    optimizer = problems.demo(fingerprint_every=1)  # ranks that differ would raise an error
    problems.train(optimizer, range(2), rank)
    for each in (optimizer, copy.deepcopy(optimizer), problems.by_pickle(optimizer)):
        problems.train(each, range(2, 5), rank)
        assert each.replicator.session.exchange.world_size == 2
    with pytest.raises(ValueError, match="an optimizer with a process_group cannot be pickled"):
        problems.by_pickle(problems.demo(exchange=SingleRank()))


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("flat", [False, True])
def test_torch_checkpoint_state_dicts_run_no_step(steps, flat):
    """They create missing state by a step of the optimizer, which changes momenta, and hangs if one rank saves."""
    options, recorder = StateDictOptions(flatten_optimizer_state_dict=flat), problems.Recorder()
    model = torch.nn.Sequential(torch.nn.Linear(17, 20), torch.nn.Linear(20, 2, bias=False)).bfloat16()
    model.append(torch.nn.Linear(3, 3, bias=False).requires_grad_(False))
    other = copy.deepcopy(model)
    optimizer, loaded = (DeMo(each.parameters(), process_group=recorder, **problems.SMALL) for each in (model, other))
    problems.train(optimizer, range(steps))
    with problems.unchanged(optimizer, recorder):
        state = get_optimizer_state_dict(model, optimizer, options=options)
        other.load_state_dict(model.state_dict())
        set_optimizer_state_dict(other, loaded, state, options=options)
        loaded.load_state_dict(loaded.state_dict())
    expected = problems.train(optimizer, range(steps, steps + 2))
    assert problems.same_history(problems.train(loaded, range(steps, steps + 2)), expected)


#: Changes of a state by a script.
CHANGES = {
    "assign": lambda optimizer, _: setattr(optimizer, "state", defaultdict(dict)),
    "idiom": lambda optimizer, _: optimizer.__setstate__({"state": defaultdict(dict)}),
    "clear": lambda optimizer, _: optimizer.state.clear(),
    "del": lambda optimizer, parameter: optimizer.state.__delitem__(parameter),
    "pop": lambda optimizer, parameter: optimizer.state.pop(parameter, None),
    "setdefault": lambda optimizer, parameter: optimizer.state[parameter].setdefault("mine", 1),
    "entry": lambda optimizer, parameter: optimizer.state[parameter].update(exp_avg=torch.ones(2)),
    "value": lambda optimizer, parameter: optimizer.state[parameter].__setitem__("exp_avg", torch.ones(2)),
    "of another": lambda optimizer, _: optimizer.state[torch.ones(2)].__setitem__("exp_avg", torch.ones(2)),
}


@pytest.mark.parametrize("drops", ["assign", "idiom", "clear", "del"])
def test_momentum_that_a_script_drops_starts_at_zero_and_later_states_are_whole(drops):
    dropped = problems.demo()
    problems.fingerprints(dropped, range(3))
    fresh = DeMo(problems.twins(dropped), **problems.SMALL)
    for parameter in problems.all_parameters(dropped):
        CHANGES[drops](dropped, parameter)
    assert problems.fingerprints(dropped, range(3, 5)) == problems.fingerprints(fresh, range(3, 5))
    problems.demo().load_state_dict(dropped.state_dict())
    number = int(dropped.replicator.round_number)
    del dropped.state[problems.all_parameters(dropped)[0]]
    problems.fingerprints(dropped, range(1))
    assert int(dropped.replicator.round_number) == number + 1, "the other parameters have kept it"


def test_momentum_that_a_script_replaces_is_taken():
    one, other = problems.demo(), problems.demo()
    for each in (one, other):
        problems.fingerprints(each, range(3))
    for parameter, entry in [*one.state.items()]:
        one.state[parameter] = {"momentum": entry["momentum"] * 0.5}
    for entry in other.state.values():
        entry["momentum"] *= 0.5
    assert problems.same_history(*(problems.train(each, range(3, 6)) for each in (one, other)))
    one.state[problems.all_parameters(one)[0]]["momentum"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"'momentum' in the state of parameter \d has shape \[3\]; give \["):
        problems.fingerprints(one, range(1))


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_local_state_that_would_be_lost_are_refused(change):
    """That state is put together from parts."""
    local = problems.local()
    problems.fingerprints(local, range(1))
    parameter = problems.all_parameters(local)[0]
    with pytest.raises(RuntimeError, match=r"cannot be replaced.*inner\[0\].state.clear"):
        CHANGES[change](local, parameter)
    name = next(name for name in local.state[parameter] if name.startswith(("exp_avg", "momentum", "error")))
    local.state[parameter] = dict(local.state[parameter])  # as Lightning does
    local.state[parameter][name] *= 0.5  # in place
    for shown in (local.state, local.state[parameter]):
        for own in (copy.copy(shown), shown.copy(), copy.deepcopy(shown), problems.by_file(shown)):
            own.clear()  # the copy is the script's
    assert name in local.state[parameter]


@pytest.mark.parametrize("make", [problems.demo, problems.local])
@ranks.alike(2)
def test_consolidated_states_and_sync_every_are_the_optimizers_also_through_a_wrapper_as_of_lightning(exchange, make):
    optimizer = make(exchange)
    forward = {"__init__": lambda _: None, "__getattr__": lambda _, name: getattr(optimizer, name)}
    wrapper = type("Wrapper", (type(optimizer),), forward)()
    problems.fingerprints(optimizer, range(2), exchange.rank)
    wrapper.consolidate_state_dict()
    assert ("ranks" in optimizer.state_dict()) == (exchange.rank == 0)
    if make is problems.local:
        wrapper.sync_every = 4
        assert optimizer.sync_every == 4


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_learning_rate_that_is_a_tensor_is_not_that_of_the_loaded_state(kind):
    parameters, rate = problems.parameters([(4, 4)]), torch.tensor(0.1)
    inner = parameters if kind == "DeMo" else torch.optim.AdamW(parameters, lr=rate)
    optimizer = DeMo(inner, lr=rate) if kind == "DeMo" else LocalDeMo(inner)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"].fill_(0.5)
    assert float(saved["param_groups"][0]["lr"]) == pytest.approx(0.1)
