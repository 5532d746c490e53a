"""Ranks of a node that hold copies of a parameter: tensor parallelism with SequenceParallel, and two-level meshes."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import problems
import ranks
from demopt import DriftError
from demopt.exchange.dtensor import shard_of

NAMES = ("replicate", "inside")


def block() -> nn.Module:
    """A norm whose input is cut along the sequence, and an MLP whose features are cut."""
    torch.manual_seed(0)
    layers = {"norm": nn.LayerNorm(16), "up": nn.Linear(16, 32), "relu": nn.ReLU(), "down": nn.Linear(32, 16)}
    return nn.Sequential(OrderedDict(layers))


def sequence_parallel(mesh: DeviceMesh) -> nn.Module:
    """The block over the ranks of one dimension of a mesh: `norm` is replicated, and its gradients are Partial."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(block(), mesh, plan)


def backward(model: nn.Module, rank: int, step: int) -> None:
    """Each rank has its own part of a sequence."""
    model.zero_grad()
    out = model(problems.draw((2, 6, 16), rank, step))
    (out - problems.draw((2, 6, 16), rank, step, 1)).square().mean().backward()


def _drift_inside(rank: int, world_size: int, kind: str, where: str) -> tuple[int, str, list[Tensor]]:
    """One element of a copy changes on rank 3 after the third step; fingerprints are compared every second round.

    Returns the step and the text of the error, and the whole parameters; of a replicated one, this rank's copy.
    """
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
