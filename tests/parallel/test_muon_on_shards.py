"""Muon on matrices of which ranks of a node hold shards, or copies: each gathers U and computes all of phi."""

from typing import Any

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
from demopt import DeMo, LocalDeMo, Muon
from demopt.codec.hyperparameters import Codec
from demopt.optim.muon import BatchedMuon

#: Shards of 2 ranks: even, uneven, and none left for the second rank; the last is a batch of matrices.
SHAPES = [(32, 16), (33, 7), (1, 16), (16, 33), (3, 8, 16)]
WHOLE: dict[str, Any] = {"momentum_decay": 0.0, "top_k": 256, "chunk": 16, "values": "float64", "reduction": "mean"}


def _one_step(rank: int, world_size: int, sizes: tuple[int, ...], cuts: dict[str, int]) -> list[Tensor]:
    """Full parameters after a step in which everything is sent, so that U is the mean gradient."""
    mesh = init_device_mesh("cpu", (*sizes,), mesh_dim_names=("replicate", *cuts))
    inside = mesh[tuple(cuts)]
    placements: list[Placement] = [Shard(dimension) for dimension in cuts.values()]
    parameters, replica = {}, mesh.get_local_rank("replicate")
    for number in (2, 4, 3, 1, 0):
        whole = problems.draw(SHAPES[number], number, dtype=torch.float64)
        parameters[number] = Parameter(distribute_tensor(whole, inside, placements))
        gradient = problems.draw(SHAPES[number], 7, number, replica, dtype=torch.float64)
        parameters[number].grad = distribute_tensor(gradient, inside, placements)
    settings = {**WHOLE, "lr": 0.5, "update": "muon", "weight_decay": 0.1}
    DeMo(parameters.values(), process_group=mesh["replicate"], **settings).step()
    return [parameters[number].detach().full_tensor() for number in range(len(SHAPES))]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sizes", "cuts"),
    [((2, 2), {"shard": 0}), ((2, 2), {"tensor": 1}), ((1, 2, 2), {"a": 0, "b": 1}), ((1, 2, 2), {"a": 0, "b": 0})],
    ids=["FSDP2", "columns", "rows and columns", "rows twice"],
)
def test_muon_on_shards_equals_that_of_the_whole_matrix(sizes: tuple[int, ...], cuts: dict[str, int]) -> None:
    results = ranks.run(_one_step, 4, sizes, cuts)
    for number, shape in enumerate(SHAPES):
        gradients = [problems.draw(shape, 7, number, each, dtype=torch.float64) for each in range(sizes[0])]
        U = torch.stack(gradients).mean(0)
        direction = torch.stack([Muon()(each, each, {}) for each in U]) if U.dim() == 3 else Muon()(U, U, {})
        wanted = problems.draw(shape, number, dtype=torch.float64) * (1 - 0.5 * 0.1) - 0.5 * direction
        for parameters in results:
            torch.testing.assert_close(parameters[number], wanted, rtol=1e-9, atol=1e-9)
            assert torch.equal(parameters[number], results[0][number])


def _training(rank: int, world_size: int, kind: str, sharded: bool) -> tuple[list[Tensor], list[int]]:
    """Six steps of a model whose shards end where chunks end; on 2 x 2 ranks, or on 2 with whole matrices."""
    shapes = [(64, 32), (32, 64), (32,), (32, 32)]
    mesh = init_device_mesh("cpu", (2, 2) if sharded else (2, 1), mesh_dim_names=("replicate", "shard"))
    placements = [Shard(0)]
    parameters = [Parameter(problems.draw(shape, index)) for index, shape in enumerate(shapes)]
    if sharded:
        parameters = [Parameter(distribute_tensor(each.detach(), mesh["shard"], placements)) for each in parameters]
    matrices, others = ([each for each in parameters if each.dim() == dim] for dim in (2, 1))
    optimizer: Any
    if kind == "DeMo":
        groups = [{"params": matrices, "update": "muon"}, {"params": others, "update": "adamw"}]
        optimizer = DeMo(groups, process_group=mesh["replicate"], **problems.SMALL)
    else:
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


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_muon_on_shards_trains_as_without_them_bit_for_bit(kind: str) -> None:
    whole, shards = ranks.run(_training, 2, kind, False), ranks.run(_training, 4, kind, True)
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
def test_local_demo_says_what_torchs_muon_does_on_shards() -> None:
    for (told,), quiet in ranks.run(_chosen, 2):
        assert "torch.optim.Muon got sharded matrices" in told
        assert quiet == []
