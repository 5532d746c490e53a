"""torch.distributed.checkpoint and OptimizerState: save, load, async_save; more or fewer ranks; FSDP2 in a node."""

import copy

import carriers
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import demopt
import problems
import ranks
from demopt.checkpoint import LoadPlanner, OptimizerState
from demopt.exchange import SingleRank


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


def test_dcp_among_fewer_ranks_without_the_planner_is_refused(tmp_path):
    folder = str(tmp_path / "checkpoint")
    ranks.run(_save, 2, "DeMo", folder)
    with pytest.raises(ValueError, match=r"2 ranks saved .* 1 now: give dcp\.load planner=demopt\.checkpoint\.LoadP"):
        ranks.run(_load, 1, "DeMo", folder, None)


# FSDP2 inside pairs of ranks, demopt between the pairs


def _sharded(rank, world_size, kind, folder, save):
    """The unsent part of each parameter's shard, and the shards four steps later."""
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8))
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
    if save:
        dcp.save(state, checkpoint_id=folder)
    else:
        problems.warned(lambda: dcp.load(state, checkpoint_id=folder, planner=LoadPlanner()))
    unsent = [problems.unsent(optimizer.state[p], world_size // 2) for p in parameters] if kind != "DeMo" else []
    train(range(6, 10))
    return unsent, [parameter.to_local().detach() for parameter in parameters]


@pytest.mark.parametrize("kind", carriers.KINDS)
def test_dcp_resumes_shards_inside_a_node_bit_for_bit(kind, tmp_path):
    saved, loaded = (ranks.run(_sharded, 4, kind, str(tmp_path / "checkpoint"), save) for save in (True, False))
    for (_, expected), (_, resumed) in zip(saved, loaded, strict=True):
        assert problems.same(resumed, expected)


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
