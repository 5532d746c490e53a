"""Muon's update where ranks of a node hold parts of a matrix, or all of it: they share the work, and get the same.

Forbidden: a matrix that is orthogonalised part by part, ranks that wait for each other, work that every rank does.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.nn import Parameter

import problems
import ranks
from demopt import DeMo, Muon
from demopt.core import update
from demopt.exchange import Exchange
from demopt.optim import matrices
from demopt.optim.sharing import Cut, Part, shared_out

#: Cuts of 2 ranks: even, uneven, and with nothing left for the second rank; the last is a batch of matrices.
SHAPES = [(32, 16), (33, 7), (1, 16), (16, 33), (3, 8, 16)]
WHOLE: dict[str, Any] = {"momentum": 0.0, "top_k": 256, "chunk": 16, "values": "float64", "reduction": "mean"}


class Count:
    """How many matrices this rank has orthogonalised."""

    def __init__(self) -> None:
        self.calls, self._orthogonal = 0, update.orthogonal
        update.orthogonal = self  # type: ignore[assignment]

    def __call__(self, matrix: Tensor) -> Tensor:
        self.calls += 1
        return self._orthogonal(matrix)

    def close(self) -> None:
        update.orthogonal = self._orthogonal


@pytest.mark.parametrize("dimension", [0, 1])
def test_shared_out_gives_each_rank_its_part_of_the_whole(dimension: int) -> None:
    wholes = [problems.draw((5, 4), 1), problems.draw((4, 5), 2), problems.draw((1, 1), 3), problems.draw((6, 6), 4)]
    lengths = {1: (1, 0, 0), 4: (2, 2, 0), 5: (2, 2, 1), 6: (2, 2, 2)}

    def share(exchange: Exchange) -> tuple[list[Tensor], int]:
        seen = []

        def phi(whole: Tensor) -> Tensor:
            seen.append(whole)
            return whole @ whole.T @ whole

        cuts = [Cut(dimension, lengths[whole.shape[dimension]]) for whole in wholes]
        mine = [cut.part(whole, exchange.rank).contiguous() for cut, whole in zip(cuts, wholes, strict=True)]
        parts = [Part(part, (cut,), whole.numel()) for part, cut, whole in zip(mine, cuts, wholes, strict=True)]
        return [part.clone() for part in shared_out(phi, parts, (exchange,))], len(seen)

    results = ranks.threads(share, 3)
    assert sorted(count for _, count in results) == [1, 1, 2]
    for number, whole in enumerate(wholes):
        got = torch.cat([parts[number] for parts, _ in results], dim=dimension)
        assert torch.equal(got, whole @ whole.T @ whole)


def _one_step(
    rank: int, world_size: int, sizes: tuple[int, ...], cuts: dict[str, int], at_once: int
) -> tuple[list[Tensor], int]:
    """Full parameters after a step where everything is sent, so that U is the mean gradient; and the calls."""
    matrices._BATCH_ELEMENTS = at_once
    names = ("replicate", *cuts)
    mesh = init_device_mesh("cpu", (*sizes,), mesh_dim_names=names)
    inside = mesh[tuple(cuts)]
    placements: list[Placement] = [Shard(dimension) for dimension in cuts.values()]
    parameters = []
    for number, shape in enumerate(SHAPES):
        whole = problems.draw(shape, number, dtype=torch.float64)
        parameters.append(Parameter(distribute_tensor(whole, inside, placements)))
    optimizer = DeMo(parameters, lr=0.5, update="muon", weight_decay=0.1, **WHOLE, process_group=mesh["replicate"])
    for number, parameter in enumerate(parameters):
        gradient = problems.draw(SHAPES[number], 7, number, mesh.get_local_rank("replicate"), dtype=torch.float64)
        parameter.grad = distribute_tensor(gradient, inside, placements)
    count = Count()
    optimizer.step()
    count.close()
    return [parameter.detach().full_tensor() for parameter in parameters], count.calls  # type: ignore[attr-defined]


@pytest.mark.parametrize("at_once", [1, 1 << 24], ids=["many batches", "one batch"])
@pytest.mark.parametrize(
    ("sizes", "cuts"),
    [((2, 2), {"shard": 0}), ((2, 2), {"tensor": 1}), ((1, 2, 2), {"a": 0, "b": 1}), ((1, 2, 2), {"a": 0, "b": 0})],
    ids=["FSDP2", "columns", "rows and columns", "rows twice"],
)
def test_muon_on_shards_is_that_of_the_whole_matrix(sizes: tuple[int, ...], cuts: dict[str, int], at_once: int) -> None:
    results = ranks.run(_one_step, 4, sizes, cuts, at_once)
    for number, shape in enumerate(SHAPES):
        gradients = [problems.draw(shape, 7, number, each, dtype=torch.float64) for each in range(sizes[0])]
        U = torch.stack(gradients).mean(0)
        direction = torch.stack([Muon()(each, each, {}) for each in U]) if U.dim() == 3 else Muon()(U, U, {})
        wanted = problems.draw(shape, number, dtype=torch.float64) * (1 - 0.5 * 0.1) - 0.5 * direction
        for parameters, _ in results:
            torch.testing.assert_close(parameters[number], wanted, rtol=1e-9, atol=1e-9)
            assert torch.equal(parameters[number], results[0][0][number])
    ranks_of_a_node = results[: 4 // sizes[0]]
    assert sum(calls for _, calls in ranks_of_a_node) == 4 + 3, "each matrix went to one of them"


def _training(rank: int, world_size: int, sharded: bool) -> tuple[list[Tensor], list[int]]:
    """Six steps of a model whose shards end where chunks end; on 2 x 2 ranks, or on 2 with whole matrices."""
    shapes = [(64, 32), (32, 64), (32,), (32, 32)]
    mesh = init_device_mesh("cpu", (2, 2) if sharded else (2, 1), mesh_dim_names=("replicate", "shard"))
    placements = [Shard(0)]
    parameters = [Parameter(problems.draw(shape, index)) for index, shape in enumerate(shapes)]
    if sharded:
        parameters = [Parameter(distribute_tensor(each.detach(), mesh["shard"], placements)) for each in parameters]
    groups = [
        {"params": [each for each in parameters if each.dim() == 2], "update": "muon"},
        {"params": [each for each in parameters if each.dim() == 1], "update": "adamw"},
    ]
    optimizer, sent = DeMo(groups, **problems.SMALL, process_group=mesh["replicate"]), []
    for step in range(6):
        for index, parameter in enumerate(parameters):
            gradient = problems.draw(shapes[index], 9, step, mesh.get_local_rank("replicate"), index)
            parameter.grad = distribute_tensor(gradient, mesh["shard"], placements) if sharded else gradient
        optimizer.step()
        sent.append(optimizer.stats.sent_bytes)
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters], sent


def test_muon_on_shards_trains_as_without_them_bit_for_bit() -> None:
    whole, shards = ranks.run(_training, 2, False), ranks.run(_training, 4, True)
    for parameters, sent in shards:
        assert problems.same(parameters, whole[0][0])
        assert max(sent) < 0.6 * max(whole[0][1]) + 64  # half of the coefficients, and a header


def _two_levels(rank: int, world_size: int, levels: int) -> tuple[list[Tensor], int]:
    """Two nodes of two ranks, which have the same gradients; or two ranks that have those of a node."""
    mesh = init_device_mesh("cpu", (2, 2) if levels == 2 else (2,), mesh_dim_names=("nodes", "inside")[:levels])
    parameters = problems.parameters(SHAPES)
    optimizer = DeMo(parameters, **{**problems.SMALL, "top_k": 8}, update="muon", process_group=mesh)
    count = Count()
    for step in range(3):
        problems.set_gradients(parameters, step, mesh.get_local_rank(0))
        optimizer.step()
    count.close()
    return [parameter.detach() for parameter in parameters], count.calls


def test_ranks_of_a_node_share_muons_work_and_get_the_same_bits() -> None:
    nodes, alone = ranks.run(_two_levels, 4, 2), ranks.run(_two_levels, 2, 1)
    for parameters, _ in nodes:
        assert problems.same(parameters, alone[0][0])
    calls = [calls for _, calls in nodes]
    assert calls[0] + calls[1] == calls[2] + calls[3] == alone[0][1] == 3 * (4 + 3)
    assert min(calls) > 0


def test_muon_takes_three_dimensions_as_a_batch_of_matrices() -> None:
    (experts,) = problems.parameters([(3, 8, 16)], torch.float64)
    start = experts.detach().clone()
    optimizer = DeMo([experts], lr=0.5, update="muon", **WHOLE)
    experts.grad = problems.draw((3, 8, 16), 5, dtype=torch.float64)
    optimizer.step()
    for number in range(3):
        matrix = experts.grad[number]
        torch.testing.assert_close(experts.detach()[number], start[number] - 0.5 * Muon()(matrix, matrix, {}))
