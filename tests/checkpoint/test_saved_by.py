"""A state says which rank saved it: loading another rank's, a mixture, or one that does not say so, warns."""

import copy
import warnings

import carriers
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import problems
import ranks
from demopt import DeMo
from demopt.state import unmarked


@pytest.mark.parametrize("kind", carriers.KINDS)
@ranks.each(2)
def test_loading_another_ranks_state_warns_and_names_the_remedy(rank, kind):
    optimizer = carriers.build(kind)
    problems.fingerprints(optimizer, range(5), rank)
    states = [None] * 2
    dist.all_gather_object(states, carriers.saved(optimizer))
    own, other = problems.by_file(states[rank]), problems.by_file(states[1 - rank])
    carriers.build(kind).load_state_dict(own)  # a warning would be an error
    with pytest.warns(UserWarning, match=f"the state does not say which rank saved it, and this is rank {rank} of 2"):
        carriers.build(kind).load_state_dict(unmarked(own))
    whose = f"the state was saved by rank {1 - rank} of 2, and this is rank {rank} of 2"
    with pytest.warns(UserWarning, match=f"{whose}.*consolidate_state_dict.*OptimizerState"):
        carriers.build(kind).load_state_dict(other)


def test_loading_a_state_of_more_ranks_warns_and_one_without_a_mark_among_one_does_not():
    (state, *_) = ranks.threads(lambda exchange: carriers.build("DeMo", process_group=exchange).state_dict(), 3)
    assert problems.warned(lambda: carriers.build("DeMo").load_state_dict(unmarked(state))) == []
    (told,) = problems.warned(lambda: carriers.build("DeMo").load_state_dict(state))
    assert "saved by rank 0 of 3, and this is rank 0 of 1" in told
    assert "demopt.reshard" in told


def _model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))


def _by_dcp(rank, world_size, kind, folder, flat, one_file_each):
    """torch's own functions, which save one value per key, for ranks of one checkpoint or of one each."""
    options, folder = StateDictOptions(flatten_optimizer_state_dict=flat), f"{folder}{rank if one_file_each else ''}"
    model = _model()
    optimizer = carriers.build(kind, parameters=list(model.parameters()))
    problems.fingerprints(optimizer, range(3), rank)  # of LocalDeMo, to the end of a round
    before = _own(optimizer)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    keys = state["optimizer"] if flat else state["optimizer"]["state"]["0.bias"]
    assert any(key.endswith("saved_by") for key in keys)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # with no_dist
        dcp.save(state, checkpoint_id=folder, no_dist=one_file_each)
        problems.fingerprints(optimizer, range(3, 5), rank)
        dcp.load(state, checkpoint_id=folder, no_dist=one_file_each)
    told = problems.warned(lambda: set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options))
    assert problems.same(_own(optimizer), before) == (not told)
    return told


def _own(optimizer):
    names = ("momentum", "error", "owner_error", "exp_avg")
    entries = [optimizer.state[parameter] for parameter in problems.all_parameters(optimizer)]
    return [entry[name].clone() for entry in entries for name in names if name in entry]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_loading_a_mixture_by_torchs_functions_warns(kind, flat, tmp_path):
    heard = ranks.run(_by_dcp, 3, kind, str(tmp_path / "checkpoint"), flat, False)
    told = [text for texts in heard for text in texts]
    assert len(told) >= 2, "at least two of three ranks got another's"
    assert all("demopt.checkpoint.OptimizerState" in text and "momenta or errors, is lost" in text for text in told)


@pytest.mark.parametrize(("kind", "flat"), [("DeMo", True), (carriers.OWNERS, False), (carriers.OWNERS, True)])
def test_state_round_trips_by_torchs_functions_with_one_checkpoint_per_rank(kind, flat, tmp_path):
    assert ranks.run(_by_dcp, 3, kind, str(tmp_path / "checkpoint"), flat, True) == [[]] * 3


@pytest.mark.filterwarnings("ignore:the state ")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", carriers.KINDS)
def test_damaged_entries_are_refused_in_words_and_nothing_changes(kind, frozen):
    new, number = carriers.build(kind), 2
    problems.fingerprints(new, range(3), 0)
    new.param_groups[0]["params"][number].requires_grad_(not frozen)
    problems.fingerprints(new, range(3, 4), 0)
    state, before = carriers.saved(new), _own(new)
    weights, group = new.fingerprint(), copy.deepcopy(new.param_groups[0]["lr"])
    inner = () if kind == "DeMo" else ("exp_avg", "exp_avg_sq", "step")
    of_another_rule = "exp_avg_sq" if kind == "DeMo" else "outer_exp_avg_sq"
    for name in state["state"][number].keys() - {"saved_by", "local", *inner} | {of_another_rule}:
        good = torch.as_tensor(state["state"][number].get(name, 0))
        wrong = torch.full_like(good.float(), torch.nan), good.to(torch.complex64), good.to("meta"), torch.zeros(3, 5)
        wrong += (good.float().to_sparse(),)
        wrong += () if name in ("global", "start") else (torch.full_like(good.float(), 1e36),)
        for value in ("text", None, 10**400, *wrong):
            damaged = copy.deepcopy(state)
            damaged["state"][number][name] = value
            damaged["param_groups"][0]["lr"] = 0.5
            with pytest.raises(ValueError, match="parameter 2"):
                new.load_state_dict(damaged)
    damaged = copy.deepcopy(state)
    damaged["state"][number]["saved_by"] = "text"
    new.load_state_dict(damaged)
    if "owner_error" in damaged["state"][number]:
        damaged["state"][number]["owner_start"] = torch.tensor(5)
        with pytest.raises(ValueError, match=r"parameter 2 has an owner's error of .* chunk 5 on, .* 5 chunks of 4"):
            new.load_state_dict(damaged)
    assert problems.same(_own(new), before)
    assert (new.fingerprint(), new.param_groups[0]["lr"]) == (weights, group)


@pytest.mark.parametrize("name", ["exp_avg_sq", "exp_avg_sq_weight"])
def test_second_moment_below_0_is_refused(name):
    optimizer = DeMo(problems.parameters([(4, 4)]), update="adamw")
    state = optimizer.state_dict()
    state["state"][0][name] -= 1.0
    with pytest.raises(ValueError, match=f"the {name} of parameter 0 in the state is not finite, or out of range"):
        optimizer.load_state_dict(state)


@ranks.each(1)
def test_loading_a_new_local_without_its_inner_states_warns(tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for steps in (3, 0):
        model = _model()
        optimizer = carriers.build("LocalDeMo", parameters=list(model.parameters()))
        problems.fingerprints(optimizer, range(steps))
        state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
        if steps:
            dcp.save(state, checkpoint_id=tmp_path)
    dcp.load(state, checkpoint_id=tmp_path)
    told = "has 7 of 10 entries that were saved.*Save demopt.checkpoint.OptimizerState"
    with pytest.warns(UserWarning, match=told):
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def test_state_dict_hooks_of_local_fire_and_may_replace_the_state():
    optimizer = carriers.build("LocalDeMo")
    seen = []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {k: v for k, v in state.items() if k != "extra"})
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after loading"))
    state = optimizer.state_dict()
    assert state["extra"] == 1
    optimizer.load_state_dict(state)
    assert seen == ["before saving", "after loading"]
    assert state["extra"] == 1
