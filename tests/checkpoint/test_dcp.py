"""States name the rank that saved them; torch.distributed.checkpoint by OptimizerState and by torch's own functions."""

import copy
import warnings
from unittest.mock import patch

import carriers
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import demopt
import problems
import ranks
from demopt.checkpoint import LoadPlanner, OptimizerState
from demopt.exchange import SingleRank
from demopt.exchange.dtensor import to_local
from demopt.state import unmarked


def _save(rank, world_size, kind, folder, late=False):
    """Saves two steps after a round; returns the state, and how the optimizer goes on while `async_save` writes."""
    optimizer = carriers.build(kind)
    problems.fingerprints(optimizer, range(5), rank)
    before = copy.deepcopy(carriers.saved(optimizer))
    with carriers.shown(optimizer):
        model = dict(enumerate(problems.values(optimizer)))
        whole = {"model": model, "one": {"optimizer": OptimizerState(optimizer).state_dict()}}
        if late:
            writing = dcp.async_save(whole, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
        else:
            dcp.save(whole, checkpoint_id=folder)
    expected = carriers.end(optimizer, rank)
    if late:
        writing.result()
    return before, expected


def _load(rank, world_size, kind, folder, planner):
    """The state that a new optimizer loads, how it goes on, and what it warns of."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in carriers.SHAPES]
    optimizer = carriers.build(kind, parameters=parameters)
    holder = OptimizerState(optimizer)
    whole = {"model": dict(enumerate(p.data for p in parameters)), "one": {"optimizer": holder.state_dict()}}
    dcp.load(whole, checkpoint_id=folder, planner=planner)
    told = problems.warned(lambda: holder.load_state_dict(whole["one"]["optimizer"]))
    state = copy.deepcopy(carriers.saved(optimizer))
    return state, carriers.end(optimizer, rank), told


@pytest.mark.parametrize(("kind", "late"), [("DeMo", False), ("LocalDeMo", True), (carriers.OWNERS, False)])
def test_dcp_and_its_own_planner_resume_every_rank_bit_for_bit(kind, late, tmp_path):
    folder = str(tmp_path / "checkpoint")
    saved, loaded = ranks.run(_save, 3, kind, folder, late), ranks.run(_load, 3, kind, folder, None)
    assert [(end, told) for _, end, told in loaded] == [(end, []) for _, end in saved]


@pytest.mark.parametrize("kind", carriers.KINDS)
@pytest.mark.parametrize(("before", "now"), [(2, 3), (3, 1)])
def test_dcp_loads_among_other_ranks_as_reshard_says(kind, before, now, tmp_path):
    folder = str(tmp_path / "checkpoint")
    states = [state for state, _ in ranks.run(_save, before, kind, folder)]
    if kind == carriers.OWNERS:
        assert all(carriers.owned(state) for state in states)
    expected = demopt.reshard(states, now)
    for rank, (state, _, told) in enumerate(ranks.run(_load, now, kind, folder, LoadPlanner())):
        assert [f"saved by {before} ranks, and there are {now} now" in text for text in told] == [True] * (rank == 0)
        carriers.assert_resharded(state, expected[rank])


def test_state_of_another_optimizer_is_refused():
    with pytest.raises(TypeError, match="is AdamW; give a DeMo or LocalDeMo"):
        OptimizerState(torch.optim.AdamW([nn.Parameter(torch.zeros(2))]))


@ranks.each(1)
def test_optimizer_state_inside_another_dict_is_refused_as_it_is_saved(tmp_path):
    state = {"one": {"optimizer": OptimizerState(carriers.build("DeMo"))}}
    with pytest.raises(dcp.api.CheckpointException, match="belongs into the outermost dict"):
        dcp.save(state, checkpoint_id=tmp_path / "checkpoint")


def test_dcp_among_fewer_ranks_without_the_planner_is_refused(tmp_path):
    folder = str(tmp_path / "checkpoint")
    ranks.run(_save, 2, "DeMo", folder)
    with pytest.raises(ValueError, match=r"2 ranks saved .* 1 now: give dcp\.load planner=demopt\.checkpoint\.LoadP"):
        ranks.run(_load, 1, "DeMo", folder, None)


@ranks.each(1)
def test_more_or_fewer_parameters_than_in_a_checkpoint_are_told_as_such(tmp_path):
    before, after = (OptimizerState(demopt.DeMo(problems.parameters([(4, 4)] * count))) for count in (1, 2))
    dcp.save({"optimizer": before}, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, this optimizer of \[2\]"):
        dcp.load({"optimizer": after}, checkpoint_id=tmp_path, planner=LoadPlanner(allow_partial_load=True))
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, this optimizer of \[1\]"):
        before.load_state_dict(after.state_dict())


# FSDP2 inside pairs of ranks, demopt between the pairs


def _sharded(rank, world_size, kind, folder, save, shards=2, by_file=False):
    """The unsent part of each parameter's shard, and the bits of the shards four steps later. 0 shards: no FSDP2.

    `by_file`: saves and loads by torch.save on each rank, not by DCP.
    """
    replicas = world_size // (shards or 1)
    mesh = init_device_mesh("cpu", (replicas, shards or 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8))
    if shards:
        fully_shard(model, mesh=mesh["shard"])
    parameters = list(model.parameters())
    optimizer = carriers.build(kind, parameters=parameters, process_group=mesh["replicate"])

    def train(steps):
        for step in steps:
            optimizer.zero_grad()
            model(problems.draw((5, 32), rank, step)).square().mean().backward()
            optimizer.step()

    if save:
        train(range(6))
    state = {"model": model.state_dict(), "optimizer": OptimizerState(optimizer)}
    if by_file:
        file, own = f"{folder}{rank}", [to_local(parameter.detach()) for parameter in parameters]
        if save:
            torch.save((own, optimizer.state_dict()), file)
        else:
            values, state = torch.load(file, weights_only=False)
            torch._foreach_copy_(own, values)
            optimizer.load_state_dict(state)
    elif save:
        dcp.save(state, checkpoint_id=folder)
    else:
        problems.warned(lambda: dcp.load(state, checkpoint_id=folder, planner=LoadPlanner()))
    unsent = [problems.unsent(optimizer.state[p], replicas) for p in parameters] if kind != "DeMo" else []
    train(range(6, 10))
    return unsent, problems.bits(to_local(parameter) for parameter in parameters)


def _whole(rank, world_size, folder):
    """The parameters that have no momentum, in a model without shards."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((16, 32), (16,), (8, 16), (8,))]
    optimizer = carriers.build("DeMo", parameters=parameters)
    dcp.load({"optimizer": OptimizerState(optimizer)}, checkpoint_id=folder, planner=LoadPlanner())
    return [number for number, momentum in enumerate(problems.momenta(optimizer)) if not momentum.any()]


def _by_an_earlier_commit(rank, world_size, folder):
    """Saves as an earlier commit, which wrote how shards are cut even for a single shard."""
    with patch("demopt.checkpoint.cut_of", return_value="Shard(0, 1) over 1"):
        _sharded(rank, world_size, "DeMo", folder, True, 1)


def _by_this_one(rank, world_size, folder):
    _sharded(rank, world_size, "DeMo", folder, True, 1)


@pytest.mark.parametrize("save", [_by_this_one, _by_an_earlier_commit])
def test_dcp_loads_what_fsdp_over_one_process_has_saved_into_a_model_without_it(save, tmp_path):
    ranks.run(save, 2, str(tmp_path / "checkpoint"))
    assert ranks.run(_whole, 2, str(tmp_path / "checkpoint")) == [[], []]


@pytest.mark.parametrize("kind", carriers.KINDS)
@pytest.mark.parametrize(("before", "now"), [(1, 0), (0, 1)])
@pytest.mark.parametrize("by_file", [False, True], ids=["by DCP", "by file"])
def test_training_resumes_with_or_without_fsdp_over_one_process_bit_for_bit(kind, before, now, by_file, tmp_path):
    saved = ranks.run(_sharded, 2, kind, str(tmp_path / "checkpoint"), True, before, by_file)
    loaded = ranks.run(_sharded, 2, kind, str(tmp_path / "checkpoint"), False, now, by_file)
    assert [bits for _, bits in saved] == [bits for _, bits in loaded]


@pytest.mark.parametrize("kind", carriers.KINDS)
def test_dcp_resumes_shards_inside_a_node_bit_for_bit(kind, tmp_path):
    saved, loaded = (ranks.run(_sharded, 4, kind, str(tmp_path / "checkpoint"), save) for save in (True, False))
    assert [bits for _, bits in saved] == [bits for _, bits in loaded]


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1)])
def test_dcp_says_that_another_number_of_shards_cannot_load(kind, before, now, tmp_path):
    folder = str(tmp_path / "checkpoint")
    ranks.run(_sharded, 2, kind, folder, True, before)
    told = [str(outcome.error) for outcome in ranks.outcomes(_sharded, 2, kind, folder, False, now)]
    assert all("the number of shards inside a node must be that of the checkpoint" in each for each in told), told


def _cut(rank, world_size, kind, folder, cuts, save):
    """Saves a matrix in four shards, or loads it into shards of the same shapes."""
    sizes = (1, 2, 2) if len(cuts) == 2 else (1, 4)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "a", "b")[: len(sizes)])
    inside = mesh["a", "b"] if len(cuts) == 2 else mesh["a"]
    parameter = nn.Parameter(distribute_tensor(problems.draw((16, 16), 0), inside, cuts))
    optimizer = carriers.build(kind, parameters=[parameter], process_group=mesh["replicate"])
    parameter.grad = distribute_tensor(problems.draw((16, 16), 1), inside, cuts)
    optimizer.step()
    state = {"optimizer": OptimizerState(optimizer)}
    if save:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_dcp_refuses_as_many_shards_of_the_same_shapes_that_are_cut_otherwise(kind, tmp_path):
    saved, other = [Shard(0)], [_StridedShard(0, split_factor=2), Shard(0)]  # FSDP2; FSDP2 over tensor parallelism
    ranks.run(_cut, 4, kind, str(tmp_path / "a"), saved, True)
    ranks.run(_cut, 4, kind, str(tmp_path / "a"), saved, False)
    told = [str(outcome.error) for outcome in ranks.outcomes(_cut, 4, kind, str(tmp_path / "a"), other, False)]
    assert all("the checkpoint's shards are Shard(0, 1) over 4, those here StridedShard(0, 2)" in each for each in told)


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
@ranks.each(2)
def test_shards_refuse_a_state_of_whole_parameters_and_nothing_changes(kind):
    parameters = [*nn.Linear(32, 16).parameters()]
    state = carriers.build(kind, parameters=parameters, process_group=SingleRank()).own_state_dict()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(32, 16)
    fully_shard(model, mesh=mesh["shard"])
    optimizer = carriers.build(kind, parameters=[*model.parameters()], process_group=mesh["replicate"])
    before = str(carriers.saved(optimizer))
    with pytest.raises(ValueError, match=r"parameter 0.*shape"):
        optimizer.load_state_dict(state)
    assert before == str(carriers.saved(optimizer))


def test_dcp_keeps_owners_errors_of_shards_among_fewer_replicas(tmp_path):
    folder = str(tmp_path / "checkpoint")
    before, after = (ranks.run(_sharded, number, carriers.OWNERS, folder, number == 4) for number in (4, 2))
    for shard in (0, 1):
        for number in range(4):
            old = torch.stack([unsent[number] for unsent, _ in before[shard::2]]).mean(0)
            torch.testing.assert_close(after[shard][0][number], old, rtol=0, atol=1e-6)
            assert float(old.abs().max()) > 0


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
    """Saves and loads by torch's functions, one value per key: all ranks in one checkpoint, or one for each."""
    options, folder = StateDictOptions(flatten_optimizer_state_dict=flat), f"{folder}{rank if one_file_each else ''}"
    model = _model()
    optimizer = carriers.build(kind, parameters=list(model.parameters()))
    problems.fingerprints(optimizer, range(3), rank)  # LocalDeMo: to the end of a round
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


@pytest.mark.filterwarnings("ignore:the state ", "ignore:.*nested tensors is in prototype", "ignore:.*quantize_per")
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
        wrong += (good.float().to_sparse(), good.to(torch.float8_e5m2) if good.dim() else torch.tensor(0.5))
        wrong += (
            torch.nested.nested_tensor([good, good]),
            torch.quantize_per_tensor(good.float(), 1.0, 0, torch.qint8),
        )
        wrong += (torch.full_like(good.float(), 1e30 if name in ("global", "start") else 1e36),)
        for value in ("text", None, 10**400, *wrong):
            damaged = copy.deepcopy(state)
            damaged["state"][number][name] = value
            damaged["param_groups"][0]["lr"] = 0.5
            with pytest.raises(ValueError, match="parameter 2"):
                new.load_state_dict(damaged)
    for name in () if kind == "DeMo" else ("global", "error", "round", "local_steps"):
        damaged = copy.deepcopy(state)
        del damaged["state"][number][name]
        with pytest.raises(ValueError, match="parameter 2"):
            new.load_state_dict(damaged)
    mark = state["state"][number]["saved_by"]
    for value in (
        "text",
        torch.nested.nested_tensor([mark]),
        torch.quantize_per_tensor(mark.float(), 1, 0, torch.qint8),
    ):
        damaged = copy.deepcopy(state)
        damaged["state"][number]["saved_by"] = value
        new.load_state_dict(damaged)
    if "owner_error" in damaged["state"][number]:
        damaged["state"][number]["owner_start"] = torch.tensor(5)
        with pytest.raises(ValueError, match=r"parameter 2 has an owner's error of .* chunk 5 on, .* 5 chunks of 4"):
            new.load_state_dict(damaged)
    assert problems.same(_own(new), before)
    assert (new.fingerprint(), new.param_groups[0]["lr"]) == (weights, group)


@pytest.mark.parametrize("name", ["exp_avg_sq", "exp_avg_sq_weight"])
def test_second_moment_below_0_is_refused(name):
    optimizer = problems.demo(shapes=[(4, 4)], update="adamw")
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
