"""Hyper-parameters: unknown and impossible ones are refused by name; changes in param_groups and schedules work."""

import copy
from dataclasses import fields
from fractions import Fraction
from functools import partial

import pytest
import torch
from torch.nn import Parameter, UninitializedParameter
from torch.optim import lr_scheduler
from torch.testing._internal.two_tensor import TwoTensor

import demopt
import problems
from demopt import DeMo, LocalDeMo
from demopt.codec.hyperparameters import NAMES, Codec


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("chunk", 8), ("transform", "identity"), ("chunking", "divisor")),  # momenta depend on these
        *(("top_k", 0), ("lr", -1.0), ("momentum_decay", 1.0), ("update", "adam"), ("exact", 0)),
        *((name, {name: value}) for name, value in (("top_k", 0), ("topk", 3))),  # of an added group
        ("complex", {"params": [Parameter(torch.zeros(3, dtype=torch.cfloat))]}),
        ("float8", {"params": [Parameter(torch.zeros(3, dtype=torch.float8_e5m2))]}),
        ("lazy module", {"params": [UninitializedParameter()]}),
    ],
)
def test_impossible_change_or_group_is_refused_before_sending_and_leaves_no_trace(name, value):
    recorder = problems.Recorder()
    optimizer, twin = problems.demo(recorder), problems.demo()
    problems.train(optimizer, range(1))
    before, change = dict(optimizer.param_groups[0]), optimizer.step
    if isinstance(value, dict):
        change = partial(optimizer.add_param_group, {"params": [Parameter(torch.zeros(3))], **value})
    else:
        optimizer.param_groups[0][name] = value
    with problems.unchanged(optimizer, recorder), pytest.raises((ValueError, TypeError), match=name):
        change()
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0] |= before
    problems.train(twin, range(1))
    assert problems.same_history(problems.train(optimizer, range(1, 3)), problems.train(twin, range(1, 3)))


SCHEDULERS = {
    "warm-up from zero": lambda o: lr_scheduler.LambdaLR(o, lambda step: step / 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=6, cycle_momentum=False),
    "a chain": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, gamma=0.9)], milestones=[2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_lr_schedulers_set_the_rate_of_each_step(name):
    scheduled, by_hand, rates = problems.demo(), problems.demo(), []
    scheduler = SCHEDULERS[name](scheduled)
    for step in range(5):
        rates.append(scheduled.param_groups[0]["lr"])
        by_hand.param_groups[0]["lr"] = rates[-1]
        assert problems.same_history(problems.train(scheduled, [step]), problems.train(by_hand, [step]))
        problems.warned(scheduler.step)  # torch's own warnings
    assert len(set(rates)) > 1


def test_schedulers_that_cycle_momentum_change_that_of_an_inner_optimizer_and_find_none_in_demo():
    optimizer = problems.local(inner=partial(problems.SGD, momentum=0.9), error_decay=0.5)
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    assert optimizer.inner[0].param_groups[0]["momentum"] == 0.95
    assert {"momentum_decay": 0.5, "lr": 1.0}.items() <= optimizer.replicator.groups[0].items()
    with pytest.raises(ValueError, match="momentum"):
        lr_scheduler.OneCycleLR(problems.demo(), max_lr=0.1, total_steps=6)


def test_numbers_of_numpy_count_as_numbers_and_are_saved_as_plain_ones():
    numpy = pytest.importorskip("numpy")
    whole, real = numpy.int64, numpy.float32
    given = {"lr": real(0.25), "top_k": whole(24), "fingerprint_every": whole(2), "codec": Codec(chunk=whole(16))}
    optimizer = DeMo(problems.parameters(problems.FEW), **given)
    problems.train(optimizer, range(1))
    assert problems.by_file(optimizer.state_dict())["param_groups"][0]["lr"] == 0.25
    optimizer.param_groups[0]["lr"] = numpy.array(0.125)
    problems.train(optimizer, range(1, 2))
    assert problems.by_file(optimizer.state_dict())["param_groups"][0]["lr"] == 0.125
    both = numpy.float64(0.5), numpy.float64(0.75)
    adamw = LocalDeMo(torch.optim.AdamW(problems.parameters(problems.FEW), lr=numpy.array(0.5), betas=both))
    assert problems.by_file(adamw.state_dict())["param_groups"][0]["betas"] == (0.5, 0.75)
    local = problems.local(sync_every=whole(1), delay=whole(1), samples=whole(3), outer_lr=real(0.5))
    problems.train(local, range(1))
    assert (local.sync_every, local.samples) == (1, 3)
    local.param_groups[0]["lr"] = numpy.float64(0.5)
    local.flush()
    assert problems.by_file(local.state_dict())["param_groups"][0]["lr"] == 0.5


@pytest.mark.parametrize("route", ["gather", "auto"])
def test_messages_longer_than_a_header_can_state_are_refused_at_construction(route):
    """Signs of 40 billion coefficients; on "meta", where they take no memory."""
    parameter = Parameter(torch.empty(200_000, 200_000, device="meta"))
    with pytest.raises(ValueError, match=r"a message would have 5,0.* bytes, and its header counts up to 4,294,967"):
        LocalDeMo(torch.optim.SGD([parameter], lr=0.1), route=route, process_group=problems.OneOf(0, 4))


_demo = partial(DeMo, [Parameter(torch.zeros(4, 4))])


def _group(**settings):
    return DeMo([{"params": [Parameter(torch.zeros(4, 4))], **settings}])


def _added(**settings):
    _demo().add_param_group({"params": [Parameter(torch.zeros(4, 4))], **settings})


def _local(**settings):
    return LocalDeMo(torch.optim.SGD([Parameter(torch.zeros(4, 4))], lr=0.1), **settings)


OF_GROUP, OF_ALL = "a parameter group of DeMo has no ", ("process_group", "kernels", "fingerprint_every")


@pytest.mark.parametrize(
    ("make", "name", "says"),
    [
        *((make, "topk", "no argument 'topk'; did you mean 'top_k'") for make in (_demo, _local)),
        (_demo, "chunks", "did you mean 'chunk'"),
        (_demo, "route", "DeMo has no argument 'route'; it always has gather"),
        (_local, "alpha", "LocalDeMo has no argument 'alpha'; all that was sent"),
        (_demo, "betas", r"DeMo has no argument 'betas'; .*update=demopt.AdamW\(beta2"),
        (_demo, "fused", "DeMo has no argument 'fused'; leave it out"),
        *(
            (_local, name, f"LocalDeMo has no argument '{name}'; give it to the inner")
            for name in ("betas", "fused", "lr")
        ),
        *((make, "topk", rf"{OF_GROUP}'topk'; did you mean 'top_k'\?") for make in (_group, _added)),
        *((make, name, f"{OF_GROUP}'{name}'; known are lr, m") for make, name in ((_group, "zzz"), (_added, "codec"))),
        *((_group, name, f"{OF_GROUP}'{name}', which holds for all: give it to DeMo") for name in OF_ALL),
        (_demo, "codec", "codec is 1; give a demopt.Codec"),
    ],
)
def test_unknown_argument_is_refused_by_name_with_the_one_meant(make, name, says):
    with pytest.raises(TypeError, match=says):
        make(**{name: 1})


@pytest.mark.parametrize("make", [_demo, _local])
def test_implementations_that_a_framework_turns_off_are_no_arguments(make):
    make(fused=False, foreach=None)


def test_settings_of_the_codec_are_given_by_name_or_as_a_codec_also_to_a_group():
    names = {"chunk": 2, "values": "2-bit"}
    given = {"codec": demopt.Codec(**names), "top_k": 3}
    made = [_demo(**names, top_k=3), _demo(**given), _group(**given)]
    settings = [{name: value for name, value in each.param_groups[0].items() if name != "params"} for each in made]
    assert settings == [{**settings[0], **names, "top_k": 3, "transform": "dct"}] * 3
    assert "codec" not in settings[0]


#: A setting that every group has, an impossible value of it, and a part of the error.
BAD = [
    ("lr", -0.1, r"-0\.1"),
    ("lr", float("nan"), "nan"),
    *(("lr", value, "give a number") for value in (torch.ones(2), True, b"1")),
    *(("momentum_decay", value, rf"is {value}; it must lie in \[0, 1\)$") for value in (1.0, 1.5, -1.0)),
    ("alpha", 0.0, r"0\.0"),
    ("alpha", Fraction(10**400), "must lie in"),
    ("weight_decay", -1.0, r"-1\.0"),
    ("top_k", 0, "0"),
    ("top_k", True, "True"),
    ("top_k", 4097, "a 64 x 64 chunk has 4096 coefficients"),
    ("chunk", 5, "top_k is 32, but a 5 x 5 chunk has 25 coefficients"),
    ("chunk", 64.0, r"64\.0"),
    ("chunk", None, "None"),
    ("transform", "hadamard", "'dct', 'identity'"),
    ("update", "adam", "'sgd', 'nesterov', 'signum'"),
    ("reduction", "sum", "'senders', 'mean'"),
    ("values", "float8", "'float64', 'float32', '2-bit', 'sign'"),
    ("gradient_scale", "sum", "'ema', 'lr'$"),
    ("chunking", "exact", "'padded', 'divisor'"),
    ("maximize", "yes", "yes"),
    ("reduction", "sender", r"reduction is .*; choose one of .*; did you mean 'senders'\?$"),
    ("update", "Lyon(beta1=0.9)", r"update is .*; choose one of .*; did you mean 'lion'\?$"),
]
OF_LOCAL = ("values", "2bit", "2-bit"), ("route", "Gathr", "gather"), ("kernels", "trch", "torch")


@pytest.mark.parametrize(
    ("makes", "name", "value", "says"),
    [
        *(((_demo, _group, _added), *bad) for bad in BAD),
        *(((_demo,), "process_group", what, "process_group is .*; give a Pro") for what in ("gloo", 2, [])),
        *(((_local,), name, bad, f"; choose one of .*; did you mean '{meant}'") for name, bad, meant in OF_LOCAL),
        ((_local,), "route", None, "route is None"),
    ],
)
def test_impossible_value_is_refused_by_name(makes, name, value, says):
    for make in makes:
        with pytest.raises((ValueError, TypeError), match=name) as caught:
            make(**{name: value})
        assert caught.match(says)


def _changed(**settings):
    optimizer = _demo()
    optimizer.param_groups[0].update(settings)
    optimizer.step()


def test_arrays_are_refused_as_settings_by_name():
    numpy = pytest.importorskip("numpy")
    arrays = torch.tensor([1, 2]), torch.tensor(1, device="meta"), numpy.array([1, 2]), numpy.array(["sign", "2-bit"])
    of_codec = [entry.name for entry in fields(Codec)]
    for array in arrays:
        cases = [(make, name) for make in (_demo, _group, _added, _changed) for name in NAMES]
        for make, name in [*cases, *((_local, name) for name in (*of_codec, "top_k", "delay", "route"))]:
            with pytest.raises((TypeError, ValueError), match=f"{name} is "):
                make(**{name: array})


@pytest.mark.parametrize("given", [torch.nn.Linear(2, 2), torch.nn.Sequential(), None, 3])
def test_demo_says_that_it_wants_parameters_where_a_model_came(given):
    with pytest.raises(TypeError, match=rf"params is a {type(given).__name__}; give parameters, such as model\.param"):
        DeMo(given)
    assert len(DeMo(torch.nn.ParameterList([torch.zeros(2)])).param_groups[0]["params"]) == 1  # torch's take it, too


@pytest.mark.parametrize(
    ("method", "value", "says"),
    [
        *(("resync", value, "src is .*; give a whole number") for value in ("a", None, 0.5)),
        ("consolidate_state_dict", "a", "to is 'a'; give a whole number"),
        *(("apply", value, "messages is a .*; give the tensor") for value in (5, b"", [])),
        *(("load_state_dict", value, "this is no optimizer's state") for value in (5, [], None)),
        *(("load_state_dict", {"state": odd}, "this is no optimizer's state") for odd in ([1], {0: 1})),
        *(
            ("load_state_dict", {"param_groups": odd}, "this is no optimizer's state")
            for odd in (3, [1], [{"params": 3}], [{"params": [[]]}])
        ),
        *(("regroup", value, "process_group is .*; give a ProcessGroup") for value in (5, "gloo")),
        *(("add_param_group", value, "param_group is .*; give a dict with params") for value in (5, {}, None)),
    ],
)
def test_methods_refuse_an_argument_of_another_type_by_name(method, value, says):
    for make in (_demo, _local):
        optimizer = make()
        if method == "apply":
            optimizer.extract()
        with pytest.raises(TypeError, match=says):
            getattr(optimizer, method)(value)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_parameter_listed_twice_or_with_elements_that_share_memory_is_refused():
    """torch only warns, or fails in a step; two momenta for one parameter fit in no state."""
    parameter, expanded = Parameter(torch.zeros(3)), Parameter(torch.zeros(1).expand(3))
    for given, told in (([parameter, parameter], "is twice in a parameter group"), ([expanded], "share memory")):
        for make in (DeMo, lambda given: LocalDeMo(torch.optim.SGD(given))):
            with pytest.raises(ValueError, match=rf"a parameter of shape \[3\] {told}"):
                make(given)
            with pytest.raises(TypeError, match=r"is torch.sparse_coo; DeMo trains real floats"):
                make([Parameter(torch.zeros(3).to_sparse())])
            with pytest.raises(TypeError, match="is a TwoTensor, which is made of other tensors: on a CPU"):
                make([Parameter(TwoTensor(torch.zeros(3), torch.zeros(3)))])
    with pytest.raises(ValueError, match="more than one parameter group"):
        DeMo([{"params": [parameter]}, {"params": [parameter]}])
    DeMo([Parameter(torch.empty(8, 0, 2, 2).to(memory_format=torch.channels_last))])  # no elements, and strides of 0


BUFFER = torch.zeros(12)
VIEWS = {
    "one in another": (BUFFER[:8], BUFFER[4:6]),
    "bytes": (BUFFER[:4], BUFFER.view(torch.bfloat16)[7:9]),
    "all, twice": (BUFFER, BUFFER.view(3, 4)),
    "a row and a column": (BUFFER.view(3, 4)[:, 1], BUFFER.view(3, 4)[2]),
    "far apart in the order": (BUFFER[:9], BUFFER[1:2], torch.zeros(4), BUFFER[8:10]),
}


@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS.keys())
def test_parameters_that_share_memory_are_refused_in_one_group_in_two_and_in_two_optimizers(views):
    """Each would move the other; one's message would apply to both; and shared() would give back the wrong one."""
    parameters = [*map(Parameter, views)]
    sgd, told = torch.optim.SGD, "share memory, as views of one buffer do"
    for make in (DeMo, lambda given: LocalDeMo(sgd(given))):
        with pytest.raises(ValueError, match=told):
            make(parameters)
        with pytest.raises(ValueError, match=told):
            make([{"params": [each]} for each in parameters])
    with pytest.raises(ValueError, match=told):
        LocalDeMo([sgd([each]) for each in parameters])
    for optimizer in (DeMo(parameters[:1]), LocalDeMo(sgd(parameters[:1]))):
        with pytest.raises(ValueError, match=told):
            optimizer.add_param_group({"params": parameters[1:]})
        assert len(optimizer.param_groups) == 1


def test_views_of_one_buffer_without_a_common_element_frozen_ones_and_those_tied_by_their_data_train():
    columns = BUFFER.clone().view(3, 4)
    frozen = Parameter(columns, requires_grad=False)
    tied = [Parameter(columns[:, :2]), Parameter(columns[:, :2])]
    parameters = [frozen, *tied, Parameter(columns[:, 2:4]), Parameter(columns[:, 4:])]
    for device in ("cpu", "meta"):
        with torch.device(device):  # the default for all that a program makes from here on
            assert len(DeMo(parameters).param_groups[0]["params"]) == 5
            assert len(LocalDeMo(torch.optim.SGD(parameters)).param_groups[0]["params"]) == 5


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_groups_that_a_script_replaces_train_as_if_it_had_changed_them(kind):
    """Lightning's BaseFinetuning replaces them when it resumes."""
    changed, replaced = (problems.optimizer_of(kind, problems.parameters([(4, 4)])) for _ in range(2))
    for optimizer in (changed, replaced):
        problems.train(optimizer, range(3))
    changed.param_groups[0]["lr"] = 0.2
    changed.add_param_group({"params": problems.parameters([(3,)]), "lr": 0.3})
    first, second = changed.param_groups
    replaced.param_groups = [{**first, "params": replaced.param_groups[0]["params"]}, copy.deepcopy(second)]
    if kind == "DeMo":
        replaced = copy.deepcopy(replaced)
    for optimizer in (changed, replaced):
        problems.train(optimizer, range(3, 8))
    assert problems.saved(replaced.state_dict()) == problems.saved(changed.state_dict())
    assert len(replaced.state_dict()["state"]) == 2
    loaded = problems.optimizer_of(kind, problems.parameters([(4, 4)]))
    problems.train(loaded, range(2))
    loaded.param_groups = [{**first, "params": loaded.param_groups[0]["params"]}, copy.deepcopy(second)]
    loaded.load_state_dict(changed.state_dict())
    assert problems.saved(loaded.state_dict()) == problems.saved(changed.state_dict())

    def repeat():
        replaced.param_groups = [{**group, "params": 2 * group["params"]} for group in replaced.param_groups]
        replaced.step()

    with pytest.raises(ValueError, match="is twice in a parameter group"):
        repeat()
