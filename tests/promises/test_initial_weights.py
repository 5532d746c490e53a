"""Ranks begin with rank 0's weights, and are told if theirs differ; another order of parameters on one is refused."""

import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import problems
import ranks
from demopt import DeMo, FolderExchange, SettingsError
from demopt.replicator.session import check_order
from demopt.runs.store import ObjectStore

#: The ranks that the warning names, the rank whose weights differ, and how they differ.
CASES = {
    "a frozen parameter": ("rank 1", 1, lambda p: p[2].add_(1.0)),
    "one bit": ("rank 1", 1, lambda p: p[0].view(torch.int16)[3, 3].bitwise_xor_(1)),
    "minus zero": ("rank 2", 2, lambda p: p[0].view(-1)[:1].copysign_(-torch.ones(1))),
    "rank 0 alone": ("rank 1, 2", 0, lambda p: p[0].mul_(2.0)),
}


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
@pytest.mark.parametrize("case", CASES)
@ranks.each(3)
def test_initial_weights_come_from_rank_0_with_a_warning(rank, case, kind):
    parameters = problems.parameters([*problems.FEW, (0,)], torch.bfloat16)
    parameters[2].requires_grad_(False)
    parameters[0].data.view(-1)[0] = 0.0
    parameters[1] = nn.Parameter(parameters[1].detach().t().contiguous().t())  # not contiguous
    named, odd, differ = CASES[case]
    if rank == odd:
        differ([parameter.data for parameter in parameters])
    optimizer = problems.optimizer_of(kind, parameters, **({} if kind == "DeMo" else {"sync_every": 1}))
    start = problems.bits(parameters)
    optimizer.param_groups[0]["lr"] = 0.0
    told = problems.warned(lambda: problems.fingerprints(optimizer, range(1), rank))
    assert [f"of {named} differ from rank 0's" in text for text in told] == [True] * (rank == 0), "once in all"
    first = problems.bits(parameters)
    assert rank or first == start
    optimizer.param_groups[0]["lr"] = 0.1
    return first, problems.train(optimizer, range(1, 3), rank), problems.bits(parameters)


@pytest.mark.parametrize("more", [{}, {"delay": 1}, {"state_device": "cpu"}, None], ids=str)
@pytest.mark.parametrize("differs", ["weights", "frozen", "gradients"])
@ranks.each(2)
def test_warning_that_is_an_error_is_one_on_all_ranks_which_may_then_go_on_alike(rank, more, differs):
    """Rank 0 tells the others. In these processes all warnings are errors."""
    parameters, same = problems.parameters(problems.FEW), differs == "gradients"
    parameters[2].requires_grad_(False)
    if not same:
        parameters[2 if differs == "frozen" else 0].data.add_(rank)
    optimizer = DeMo(parameters) if more is None else problems.optimizer_of("LocalDeMo", parameters, **more)

    def train(steps, seed):
        problems.train(optimizer, steps, seed)
        if more is not None:
            optimizer.flush()

    with pytest.raises(UserWarning, match="bit-identical gradients" if same else "of rank 1 differ from rank 0's"):
        train(range(4), 0 if same else rank)
    train(range(4, 8), rank)
    return optimizer.fingerprint(), problems.bits(parameters[2:3])


@pytest.mark.filterwarnings("ignore:initial parameters")
@pytest.mark.parametrize("by", ["step", "local_step and finish_round", "messages"])
@ranks.alike(2)
def test_initial_frozen_weights_of_local_demo_are_those_of_rank_0_however_it_steps(exchange, by):
    parameters = problems.parameters(problems.FEW)
    parameters[2].requires_grad_(False).fill_(float(exchange.rank))
    optimizer = problems.optimizer_of("LocalDeMo", parameters, process_group=exchange, sync_every=1)
    problems.set_gradients(parameters[:2], exchange.rank)
    if by == "step":
        optimizer.step()
    elif optimizer.local_step() is None and by == "messages":
        optimizer.apply(optimizer.exchange(optimizer.extract()))
    else:
        optimizer.finish_round()
    return problems.bits(parameters)


@pytest.mark.filterwarnings("ignore:initial parameters")
@ranks.alike(2)
def test_added_parameters_with_other_values_become_those_of_rank_0(exchange):
    optimizer = problems.demo(exchange)
    problems.train(optimizer, range(1), exchange.rank)
    optimizer.add_param_group({"params": [nn.Parameter(torch.full((3,), float(exchange.rank)))]})
    return problems.train(optimizer, range(1, 3), exchange.rank)


def model_of(seed=0):
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8).requires_grad_(False))


plain, named = nn.Module.parameters, nn.Module.named_parameters


def wrapped(model):
    prefix = "module._orig_mod._fsdp_wrapped_module."
    return [(prefix + name.replace(".", "._checkpoint_wrapped_module.", 1), p) for name, p in named(model)]


def swapped(given, first=0, second=4):
    """The parameters with two of them swapped, by default the weights of two matrices."""
    given = [*given]
    given[first], given[second] = given[second], given[first]
    return given


def trained_in_part():
    model = model_of()
    with torch.no_grad():
        model[0][1].weight.mul_(1.5)  # rank 0 has ones here, which this rank has elsewhere
        model[1][0].weight.copy_(model[2][0].weight)  # a copy: the original is in its place
    return plain(model)


def told(kind, lists):
    """Each rank's error in its first step, as text, or "" without one; an error leaves the weights unchanged."""

    def work(exchange):
        optimizer = problems.optimizer_of(kind, lists[exchange.rank], process_group=exchange)
        return str(problems.refusal(optimizer, rank=exchange.rank) or "")

    return ranks.threads(work, 2)


BY_NAME = "rank 1 has parameter 0 '1.0.weight' where rank 0 has it at place 4: give the param"
BY_VALUES = "rank 1 has parameter .* where rank 0 has it at place"
#: How rank 0 gives its parameters, those of rank 1, and the error of both.
PAIRS = {
    "names, other weights": (named, lambda: swapped(named(model_of(1))), BY_NAME),
    "names with wrappers": (named, lambda: swapped(wrapped(model_of())), BY_NAME),
    "matrices": (plain, lambda: swapped(plain(model_of())), BY_VALUES),
    "a norm's ones and zeros": (plain, lambda: swapped(plain(model_of()), 2, 3), BY_VALUES),
    "frozen matrices": (plain, lambda: swapped(plain(model_of()), 12, 14), BY_VALUES),
    "wrappers alone": (named, lambda: wrapped(model_of()), ""),
    "names of one rank alone": (named, lambda: plain(model_of()), ""),
    "another seed": (plain, lambda: plain(model_of(1)), ""),
    "partly other weights": (plain, trained_in_part, ""),
}


@pytest.mark.filterwarnings("ignore:initial parameters .* of rank 1 differ")
@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
@pytest.mark.parametrize("pair", PAIRS)
def test_another_order_is_refused_and_other_names_or_weights_are_not_on_either_rank(pair, kind):
    give, other, said = PAIRS[pair]
    found = told(kind, (give(model_of()), other()))
    if said:
        assert all(re.match(said, each) for each in found)
    else:
        assert found == told(kind, (other(), give(model_of()))) == ["", ""]


@pytest.mark.parametrize(
    ("theirs", "mine", "is_refused"),
    [
        ([5, 7], [7, 9], True),
        (["a", "b"], ["b", "c"], True),
        ([~5, 7], [7, ~5], True),
        ([~5, 7], [9, ~5], False),  # ~: all elements are equal, as those of another bias may be
    ],
)
def test_mark_at_another_place_is_refused_if_it_can_only_be_the_same_parameter(theirs, mine, is_refused):
    with pytest.raises(SettingsError, match="has it at place") if is_refused else nullcontext():
        check_order("rank 1 has", "rank 0", theirs, mine)


def with_frozen(*tensors):
    return [*plain(model_of()), *(nn.Parameter(each, requires_grad=False) for each in tensors)]


@pytest.mark.filterwarnings("ignore:initial parameters .* of rank 1 differ")
@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_frozen_parameters_of_any_dtype_become_those_of_rank_0(kind, dtype):
    first, second = (with_frozen((torch.arange(12).view(3, 4) % modulus).to(dtype).conj()) for modulus in (2, 3))
    assert told(kind, [first, second]) == ["", ""]
    assert torch.equal(*(each[-1].resolve_conj().view(torch.uint8) for each in (first, second)))


class Quantized(torch.Tensor):
    """A weight that is made of other tensors and supports no operation; torchao's support few."""

    @staticmethod
    def __new__(cls, levels, scales):
        found = torch.Tensor._make_wrapper_subclass(cls, levels.shape, dtype=torch.float32)
        found.levels, found.scales = levels, scales
        return found

    def __tensor_flatten__(self):
        return ["levels", "scales"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function is torch.ops.aten.detach.default
        return cls(args[0].levels, args[0].scales)


@pytest.mark.filterwarnings("ignore:initial parameters .* of rank 1 differ")
@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_frozen_quantized_weights_become_those_of_rank_0_in_all_their_parts(kind):
    first, second = (with_frozen(Quantized(torch.arange(6) % modulus, torch.ones(1) * modulus)) for modulus in (2, 3))
    assert told(kind, [first, second]) == ["", ""]
    assert torch.equal(first[-1].levels, second[-1].levels)
    assert second[-1].scales == 2


@pytest.mark.parametrize("shapes", [[(3, 5)], [(3, 4), (2,)], []], ids=str)
def test_frozen_parameters_that_only_one_rank_has_are_named(shapes):
    found = told("LocalDeMo", [with_frozen(torch.ones(3, 4)), with_frozen(*map(torch.ones, shapes))])
    assert all("rank 1 has frozen parameter" in each for each in found)


@pytest.mark.parametrize("who", [0, 1])
@ranks.alike(2)
def test_parameters_that_a_rank_reorders_between_two_rounds_are_refused(exchange, who):
    optimizer = DeMo(problems.parameters([(8, 8), (8,), (8, 8)]), process_group=exchange)
    problems.train(optimizer, range(2), exchange.rank)
    if exchange.rank == who:
        optimizer.param_groups[0]["params"] = swapped(optimizer.param_groups[0]["params"], 0, 2)
    error = str(problems.refusal(optimizer, 2, exchange.rank))
    assert error.startswith("rank 1 has parameter 0 where rank 0 has it at place 2: give the parameters")


@pytest.mark.parametrize("given", [plain, named])
def test_worker_of_a_folder_with_another_order_does_not_join(given):
    store = ObjectStore()

    def worker(of):
        run = FolderExchange(store, late=0.0, patience=0.0)
        optimizer = problems.optimizer_of("LocalDeMo", of, process_group=run)
        optimizer.join()
        return optimizer.fingerprint()

    first = worker(given(model_of()))
    model, other = model_of(), model_of()
    with pytest.raises(SettingsError, match=r"-[0-9a-f]{8} has parameter 0.* where the run in .* has it at place 4"):
        worker(swapped(given(other)))
    assert problems.same([*model.parameters()], [*other.parameters()])
    assert worker(plain(model_of(3))) == first
