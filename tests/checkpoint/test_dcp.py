"""torch.distributed.checkpoint and OptimizerState: save, load, async_save; more or fewer ranks; FSDP2 in a node."""

from typing import Any

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


def _resumed(rank: int, world_size: int, kind: str, folder: str, late: bool) -> tuple[Any, Any, list[str]]:
    optimizer = carriers.build(kind)
    carriers.advance(optimizer, range(5), rank)
    state = {"optimizer": OptimizerState(optimizer), "epoch": 3}
    with optimizer.shared() if kind != "DeMo" else torch.no_grad():
        if late:
            writing = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
        else:
            dcp.save(state, checkpoint_id=folder)
    parameters = problems.all_parameters(optimizer)
    twins = [nn.Parameter(torch.zeros_like(p)) for p in parameters]
    with torch.no_grad():
        for twin, parameter in zip(twins, parameters, strict=True):
            twin.copy_(parameter)  # as a model's checkpoint would; local weights of LocalDeMo come with the state
    expected = carriers.end(optimizer, rank)  # while async_save writes
    if late:
        writing.result()
    new = carriers.build(kind, parameters=twins)
    target = {"optimizer": OptimizerState(new), "epoch": 0}
    dcp.load(target, checkpoint_id=folder, planner=LoadPlanner())
    assert target["epoch"] == 3
    keys = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return expected, carriers.end(new, rank), list(keys)


@pytest.mark.parametrize("kind", carriers.KINDS)
@pytest.mark.parametrize("late", [False, True], ids=["save", "async_save"])
def test_dcp_resumes_every_rank_bit_for_bit(kind: str, late: bool, tmp_path: Any) -> None:
    world_size = 3 if kind == carriers.OWNERS else 2
    results = ranks.run(_resumed, world_size, kind, str(tmp_path / "checkpoint"), late)
    for expected, resumed, keys in results:
        assert problems.same(expected[0], resumed[0])
        assert expected[1] == resumed[1]
        own, replicated = ("momentum", "velocity") if kind == "DeMo" else ("exp_avg", "global")
        for number in range(len(carriers.SHAPES)):
            found = [key for key in keys if key.endswith(f"state.{number}.{own}")]
            assert sorted(found) == [f"optimizer.rank{rank}.state.{number}.{own}" for rank in range(world_size)]
        assert [key for key in keys if key.endswith(f"state.0.{replicated}")] == [f"optimizer.state.0.{replicated}"]


def _without_planner(rank: int, world_size: int, kind: str, folder: str) -> Any:
    optimizer = carriers.build(kind)
    carriers.advance(optimizer, range(3), rank)
    dcp.save({"optimizer": OptimizerState(optimizer)}, checkpoint_id=folder)
    new = carriers.build(kind)
    dcp.load({"optimizer": OptimizerState(new)}, checkpoint_id=folder)
    return [
        torch.equal(a["momentum"], b["momentum"])
        for a, b in zip(optimizer.state.values(), new.state.values(), strict=True)
    ]


def test_dcp_without_the_planner_loads_demo_and_refuses_a_new_local(tmp_path: Any) -> None:
    assert ranks.run(_without_planner, 2, "DeMo", str(tmp_path / "demo")) == [[True] * 3] * 2
    for outcome in ranks.outcomes(_without_planner, 2, "LocalDeMo", str(tmp_path / "local")):
        assert isinstance(outcome.error, ValueError), outcome.trace
        assert "planner=demopt.checkpoint.LoadPlanner()" in str(outcome.error)


def _save(rank: int, world_size: int, kind: str, folder: str) -> Any:
    optimizer = carriers.build(kind)
    carriers.advance(optimizer, range(5), rank)
    with optimizer.shared() if kind != "DeMo" else torch.no_grad():
        dcp.save({"one": {"optimizer": OptimizerState(optimizer).state_dict()}}, checkpoint_id=folder)
    return carriers.saved(optimizer)


def _load(rank: int, world_size: int, kind: str, folder: str) -> Any:
    optimizer = carriers.build(kind)
    holder = OptimizerState(optimizer)
    state = {"one": {"optimizer": holder.state_dict()}}
    dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())
    told = problems.warned(lambda: holder.load_state_dict(state["one"]["optimizer"]))
    return carriers.saved(optimizer), told


@pytest.mark.parametrize("kind", carriers.KINDS)
@pytest.mark.parametrize(("before", "now"), [(2, 3), (3, 1), (4, 3)])
def test_dcp_loads_among_other_ranks_as_reshard_says(kind: str, before: int, now: int, tmp_path: Any) -> None:
    folder = str(tmp_path / "checkpoint")
    states = ranks.run(_save, before, kind, folder)
    if kind == carriers.OWNERS:
        assert all(carriers.owned(state) for state in states)
    expected = demopt.reshard(states, now)
    for rank, (state, told) in enumerate(ranks.run(_load, now, kind, folder)):
        assert [f"saved by {before} ranks, and there are {now} now" in text for text in told] == [True] * (rank == 0)
        carriers.assert_resharded(state, expected[rank])


def _sharded(rank: int, world_size: int, kind: str, folder: str) -> tuple[bool, list[str]]:
    """FSDP2 inside pairs, DeMo between the pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def model_and_optimizer() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8))
        fully_shard(model, mesh=mesh["shard"])
        return model, carriers.build(kind, parameters=list(model.parameters()), process_group=mesh["replicate"])

    def trained(model: nn.Module, optimizer: Any, steps: range) -> list[torch.Tensor]:
        for step in steps:
            optimizer.zero_grad()
            model(problems.draw((5, 32), rank, step)).square().mean().backward()
            optimizer.step()
        return [p.to_local().detach().clone() for p in model.parameters()]

    model, optimizer = model_and_optimizer()
    trained(model, optimizer, range(6))
    dcp.save({"model": model.state_dict(), "optimizer": OptimizerState(optimizer)}, checkpoint_id=folder)
    expected = trained(model, optimizer, range(6, 10))
    model, optimizer = model_and_optimizer()
    state = {"model": model.state_dict(), "optimizer": OptimizerState(optimizer)}
    dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())
    keys = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return problems.same(trained(model, optimizer, range(6, 10)), expected), list(keys)


@pytest.mark.parametrize("kind", carriers.KINDS)
def test_dcp_resumes_shards_inside_a_node_bit_for_bit(kind: str, tmp_path: Any) -> None:
    for same, keys in ranks.run(_sharded, 4, kind, str(tmp_path / "checkpoint")):
        assert same
        name = {"DeMo": "momentum", carriers.OWNERS: "owner_error"}.get(kind, "error")
        found = {key for key in keys if key.endswith(f".{name}")}
        places = [f"optimizer.rank{r}.shard{s}.state" for r in (0, 1) for s in (0, 1)]
        assert all(any(key.startswith(place) for key in found) for place in places)
        if kind != "DeMo":
            assert "optimizer.rank1.state.0.exp_avg" in keys


def _unsent_of_shards(rank: int, world_size: int, folder: str, save: bool) -> list[torch.Tensor]:
    """Of each parameter's shard, this rank's error with the owner's; pairs of ranks are replicas."""
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8))
    fully_shard(model, mesh=mesh["shard"])
    parameters = list(model.parameters())
    optimizer = carriers.build(carriers.OWNERS, parameters=parameters, process_group=mesh["replicate"])
    state = {"optimizer": OptimizerState(optimizer)}
    if save:
        for step in range(3):
            model(problems.draw((5, 32), rank, step)).square().mean().backward()
            optimizer.step()
        dcp.save(state, checkpoint_id=folder)
    else:
        problems.warned(lambda: dcp.load(state, checkpoint_id=folder, planner=LoadPlanner()))
    return [problems.unsent(optimizer.state[parameter], world_size // 2) for parameter in parameters]


@pytest.mark.parametrize("now", [1, 3])
def test_dcp_keeps_owners_errors_of_shards_among_other_replicas(now: int, tmp_path: Any) -> None:
    before = ranks.run(_unsent_of_shards, 4, str(tmp_path / "checkpoint"), True)
    after = ranks.run(_unsent_of_shards, 2 * now, str(tmp_path / "checkpoint"), False)
    for shard in (0, 1):
        for number in range(4):
            old = torch.stack([unsent[number] for unsent in before[shard::2]]).mean(0)
            new = torch.stack([unsent[number] for unsent in after[shard::2]]).mean(0)
            torch.testing.assert_close(new, old, rtol=0, atol=1e-6)
            assert float(old.abs().max()) > 0
