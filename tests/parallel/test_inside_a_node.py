"""Ranks of a node that hold copies of a parameter, or shards of a matrix, of which Muon gathers all."""

import copy
import math
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Parameter

import demopt
import problems
import ranks
from demopt import DeMo, DriftError, LocalDeMo
from demopt.codec.hyperparameters import Codec
from demopt.exchange.dtensor import shard_of
from demopt.optim.muon import BatchedMuon

NAMES = ("replicate", "inside")


def block():
    """A norm whose input is cut along the sequence, and an MLP whose features are cut."""
    torch.manual_seed(0)
    layers = {"norm": nn.LayerNorm(16), "up": nn.Linear(16, 32), "relu": nn.ReLU(), "down": nn.Linear(32, 16)}
    return nn.Sequential(OrderedDict(layers))


def sequence_parallel(mesh):
    """The block over the ranks of one dimension of a mesh: `norm` is replicated, and its gradients are Partial."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(block(), mesh, plan)


def backward(model, rank, step):
    """Each rank has its own part of a sequence."""
    model.zero_grad()
    out = model(problems.draw((2, 6, 16), rank, step))
    (out - problems.draw((2, 6, 16), rank, step, 1)).square().mean().backward()


def _drift_inside(rank, world_size, kind, where):
    """A copy changes on rank 3 after step 3: the step of the error, its text, and all parameters after a resync."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    model = sequence_parallel(mesh["inside"]) if where == "tensor parallel" else block()
    group = mesh["replicate"] if where == "tensor parallel" else mesh
    optimizer = problems.optimizer_of(kind, model.parameters(), process_group=group, fingerprint_every=2)
    said, at = "", -1
    for step in range(12):
        backward(model, rank, step)
        if step == 3 and rank == 3:
            with torch.no_grad():
                held = optimizer.param_groups[0]["params"][0] if kind == "DeMo" else optimizer.replicator.parameters[0]
                (held.to_local() if isinstance(held, DTensor) else held)[5] += 1e-6
        try:
            optimizer.step()
        except DriftError as error:
            said, at = str(error), step
            break
    optimizer.resync()
    for step in range(4):
        backward(model, rank, step)
        optimizer.step()
    return at, said, [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


@pytest.mark.parametrize("where", ["tensor parallel", "two levels"])
@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_drift_inside_a_node_is_named_there_and_resync_ends_it(kind, where):
    results = ranks.run(_drift_inside, 4, kind, where)
    assert [at for at, _, _ in results] == [4 if kind == "DeMo" else 5] * 4
    for _, said, _ in results[2:]:
        assert "param_groups[0]['params'][0] (shape [16]) differs between ranks 0 and 1 of those in a node" in said
    for _, said, _ in results[:2]:
        assert "rank 1 differ from those of rank 0" in said
    for _, _, after in results:
        assert problems.same(after, results[0][2])


def test_shard_of_counts_cuts_of_fsdp2_over_tensor_parallelism():
    """On the third of 2 x 2 ranks."""
    mesh = SimpleNamespace(size=(2, 2).__getitem__, get_local_rank=(1, 0).__getitem__)
    placements = (_StridedShard(0, split_factor=2), Shard(0))  # is_shard() is False for the first
    assert shard_of(SimpleNamespace(device_mesh=mesh, placements=placements)) == (2, 4)


#: Shards of 2 ranks: even, uneven, and none left for the second rank.
SHAPES = [(32, 16), (33, 7), (1, 16), (16, 33)]


def _one_step(rank, world_size, sizes, cuts):
    """Full parameters after a step."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(cuts))
    placements = [Shard(dimension) for dimension in cuts.values()]
    parameters = []
    for number, shape in enumerate(SHAPES):
        parameters.append(Parameter(distribute_tensor(problems.draw(shape, number), mesh, placements)))
        parameters[-1].grad = distribute_tensor(problems.draw(shape, 7, number), mesh, placements)
    BatchedMuon(parameters, lr=0.5).step()
    return [parameter.detach().full_tensor() for parameter in parameters]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize(
    ("sizes", "cuts"),
    [((2,), {"shard": 0}), ((2,), {"tensor": 1}), ((2, 2), {"a": 0, "b": 1}), ((2, 2), {"a": 0, "b": 0})],
    ids=["FSDP2", "columns", "rows and columns", "rows twice"],
)
def test_muon_on_shards_equals_that_of_the_whole_matrix(sizes, cuts):
    whole = ranks.run(_one_step, 1, (1,), {"one": 0})[0]
    for parameters in ranks.run(_one_step, math.prod(sizes), sizes, cuts):
        assert problems.same(parameters, whole)


def _training(rank, world_size, sharded):
    """Six steps of a model whose shards end where chunks end; on 2 x 2 ranks, or on 2 with whole matrices."""
    shapes = [(64, 32), (32, 64), (32,), (32, 32)]
    mesh = init_device_mesh("cpu", (2, 2) if sharded else (2, 1), mesh_dim_names=("replicate", "shard"))
    placements = [Shard(0)]
    parameters = [Parameter(problems.draw(shape, index)) for index, shape in enumerate(shapes)]
    if sharded:
        parameters = [Parameter(distribute_tensor(each.detach(), mesh["shard"], placements)) for each in parameters]
    matrices, others = ([each for each in parameters if each.dim() == dim] for dim in (2, 1))
    if sharded:
        with pytest.raises(ValueError, match="take LocalDeMo around"):
            DeMo(matrices, update="muon", process_group=mesh["replicate"])
    inner = [BatchedMuon(matrices), torch.optim.AdamW(others, lr=0.01)]
    optimizer = LocalDeMo(inner, sync_every=2, process_group=mesh["replicate"], codec=Codec(chunk=16))
    sent = []
    for step in range(6):
        for index, parameter in enumerate(parameters):
            gradient = problems.draw(shapes[index], 9, step, mesh.get_local_rank("replicate"), index)
            parameter.grad = distribute_tensor(gradient, mesh["shard"], placements) if sharded else gradient
        optimizer.step()
        sent.append(optimizer.stats.sent_bytes)
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters], sent


def test_muon_on_shards_trains_as_without_them_bit_for_bit_and_demos_refuses_them():
    whole, shards = ranks.run(_training, 2, False), ranks.run(_training, 4, True)
    for parameters, sent in shards:
        assert problems.same(parameters, whole[0][0])
        assert max(sent) < 0.6 * max(whole[0][1]) + 64  # half of the coefficients, and a header


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@ranks.each(2)
def test_local_demo_says_what_torchs_muon_does_on_shards():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh["shard"])
    with pytest.warns(UserWarning, match="torch.optim.Muon got sharded matrices"):
        LocalDeMo(torch.optim.Muon([model.weight]), process_group=mesh["replicate"])
    LocalDeMo(demopt.muon_adamw(model, lr=0.1), process_group=mesh["replicate"])  # a warning would be an error


@ranks.each(2)
def test_loaded_state_of_shards_may_be_loaded_again():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(8, 8), mesh=mesh["shard"])
    optimizer = LocalDeMo(torch.optim.AdamW(model.parameters()), 1, process_group=mesh["replicate"])
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    moments = saved["state"][0]["exp_avg"].to_local()
    kept = moments.clone()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert torch.equal(moments, kept)
