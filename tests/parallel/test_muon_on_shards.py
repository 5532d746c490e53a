"""Muon on matrices of which ranks of a node hold shards: each gathers them, and computes all of phi."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.nn import Parameter

import demopt
import problems
import ranks
from demopt import DeMo, LocalDeMo
from demopt.codec.hyperparameters import Codec
from demopt.optim.muon import BatchedMuon

#: Shards of 2 ranks: even, uneven, and none left for the second rank.
SHAPES = [(32, 16), (33, 7), (1, 16), (16, 33)]


def _one_step(rank: int, world_size: int, sizes: tuple[int, ...], cuts: dict[str, int]) -> list[Tensor]:
    """Full parameters after a step."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(cuts))
    placements: list[Placement] = [Shard(dimension) for dimension in cuts.values()]
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


def _training(rank: int, world_size: int, sharded: bool) -> tuple[list[Tensor], list[int]]:
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


def _chosen(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh["shard"])
    heard = []
    for inner in (torch.optim.Muon([model.weight]), demopt.muon_adamw(model, lr=0.1)):
        heard.append(problems.warned(lambda inner=inner: LocalDeMo(inner, process_group=mesh["replicate"])))
    return heard[0], heard[1]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_local_demo_says_what_torchs_muon_does_on_shards():
    for (told,), quiet in ranks.run(_chosen, 2):
        assert "torch.optim.Muon got sharded matrices" in told
        assert quiet == []
