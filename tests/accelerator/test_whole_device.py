"""The rest of the library on an accelerator: memory layouts, buffers, checkpoints, folders, memory, graph capture."""

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import toy
from test_same_bits import Small, equal, fill, local, tensors, train
from torch import nn

import demopt
import ranks
from demopt.checkpoint import LoadPlanner, OptimizerState
from demopt.codec import decompress
from demopt.codec.compress import Workspace, compress, settle
from demopt.codec.decompress import ShardedMatrices
from demopt.exchange import Exchange, SingleRank
from demopt.runs.store import ObjectStore
from demopt.runs.weights import weights_digest
from demopt.wire.bits import joined


def _convolutions(exchange: Exchange, device: str, optimizer: str) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(24, 16, 3, 3, generator=draw), torch.randn(16, 24, 3, 3, generator=draw)]
    last = [nn.Parameter(weight.to(memory_format=torch.channels_last).to(device)) for weight in weights]
    assert last[0].stride() == weights[0].to(memory_format=torch.channels_last).stride()
    if optimizer == "DeMo":
        made: Any = demopt.DeMo(last, chunk=16, top_k=24, kernels="torch", process_group=exchange)
    else:
        inner = torch.optim.SGD(last, lr=0.1)
        made = demopt.LocalDeMo(inner, chunk=16, sync_every=1, kernels="torch", process_group=exchange)
    draw.manual_seed(1 + exchange.rank)
    for _ in range(4):
        for parameter in last:
            gradient = torch.randn(parameter.shape, generator=draw).to(memory_format=torch.channels_last)
            parameter.grad = gradient.to(device)
        made.step()
    return [parameter.detach().cpu() for parameter in last]


def _channels_last(rank: int, world_size: int, optimizer: str) -> bool:
    toy.register()
    return all(map(equal, *(ranks.threads(_convolutions, 2, device, optimizer) for device in ("cpu", "toy"))))


@pytest.mark.parametrize("optimizer", ["DeMo", "LocalDeMo"])
def test_channels_last_parameters_have_the_bits_of_the_cpu(on_toy: Any, optimizer: str) -> None:
    assert on_toy(_channels_last, 1, optimizer) == [True]


def _buffers(rank: int, world_size: int) -> list[list[float]]:
    toy.register()
    model = nn.BatchNorm1d(3).to("toy")
    model.running_mean.fill_(float(rank + 1))
    demopt.broadcast_buffers(model, src=1)
    return [model.running_mean.cpu().tolist(), [float(model.num_batches_tracked)]]


def test_buffers_of_an_accelerator_are_broadcast(on_toy: Any) -> None:
    assert on_toy(_buffers, 2) == 2 * [[[2.0, 2.0, 2.0], [0.0]]]


def _through_dcp(rank: int, world_size: int, case: str, folder: str) -> None:
    toy.register()
    warnings.simplefilter("ignore")  # of saving between rounds, to compare
    for source, target in (("toy", "cpu"), ("cpu", "toy")):
        model, optimizer = train(SingleRank(), source, case, steps=4)
        twin, again = train(SingleRank(), target, case, steps=0)
        with optimizer.shared() if case != "DeMo" else torch.no_grad():
            dcp.save({"optimizer": OptimizerState(optimizer)}, checkpoint_id=f"{folder}/{source}")
            twin.load_state_dict(model.state_dict())
        dcp.load({"optimizer": OptimizerState(again)}, checkpoint_id=f"{folder}/{source}", planner=LoadPlanner())
        for each, its in ((model, optimizer), (twin, again)):
            fill(each, 0, 4)
            its.step()
        assert equal(tensors(model, optimizer), tensors(twin, again)), (source, target)


@pytest.mark.parametrize("case", ["DeMo", "LocalDeMo"])
def test_dcp_moves_a_state_between_accelerator_and_cpu(on_toy: Any, case: str, tmp_path: Any) -> None:
    on_toy(_through_dcp, 1, case, str(tmp_path))


def _folder(rank: int, world_size: int) -> None:
    toy.register()
    store, digests = ObjectStore(), {}
    for device in ("toy", "cpu"):
        torch.manual_seed(0)
        model = Small().to(device)
        optimizer = local(model, demopt.FolderExchange(store, patience=0.0))
        optimizer.join()
        if device == "toy":
            for step in range(4):
                fill(model, 0, step)
                optimizer.step()
            optimizer.replicator.session.exchange.settle()
        digests[device] = weights_digest(optimizer.replicator)
    assert digests["toy"] == digests["cpu"]


def test_a_cpu_joins_the_run_in_a_folder_of_an_accelerator_with_its_bits(on_toy: Any) -> None:
    on_toy(_folder, 1)


def _uncapturable(rank: int, world_size: int, case: str) -> dict[str, int]:
    """Counts what a graph capture refuses in the codec: waits, and copies to or from the host."""
    toy.register()
    _, optimizer = train(SingleRank(), "toy", case)
    replicator = optimizer.replicator
    gradients = [torch.ones_like(parameter) for parameter in replicator.parameters]
    sharded = ShardedMatrices([], [group.settings for group in replicator.plan().chunk_groups])
    for _ in range(2):  # tables are made in the first
        with toy.counting() as found:
            groups = replicator.plan().chunk_groups
            body = torch.cat(joined([compress(group, gradients, 1.0, Workspace()) for group in groups]))
            route = replicator.plan().route
            decoded, _ = route.layout.decode(body.unsqueeze(0), route.devices)
            for group, received in zip(groups, decoded, strict=True):
                decompress.decompress(group, received, 1, Workspace(), sharded)
                settle(group, received)
    assert found["launches"] > 20
    return {name: times for name, times in found.items() if name in ("syncs", "to device", "to host", "nonzero")}


@pytest.mark.parametrize("case", ["DeMo", "LocalDeMo", "LocalDeMo, top-k"])
def test_nothing_in_extract_and_apply_forbids_graph_capture(on_toy: Any, case: str) -> None:
    assert on_toy(_uncapturable, 1, case) == [{}]


def _memory(rank: int, world_size: int, kind: str) -> tuple[float, float]:
    """The bytes beyond parameters, gradients and state, at rest and at most in a step, per byte of parameters."""
    toy.register()
    before, _ = toy.memory()  # of other tests in this process
    params = [nn.Parameter(torch.zeros(1024, 1024, device="toy")) for _ in range(4)]
    if kind.startswith("DeMo"):
        groups = [{"params": params, "update": "muon" if "muon" in kind else "signum"}]
        optimizer: Any = demopt.DeMo(groups, process_group=SingleRank())
    else:
        inner = torch.optim.SGD(params, lr=0.1)
        route = "owner" if "owner" in kind else "gather"
        optimizer = demopt.LocalDeMo(inner, sync_every=1, route=route, process_group=SingleRank())
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    weights = 4 * (1 << 20) * 4
    # parameters, gradients, momentum; also the global weights, and the owner's errors
    known = before + weights * {"DeMo": 3, "DeMo, muon": 3, "LocalDeMo": 4, "LocalDeMo, owner": 5}[kind]
    with mock.patch.object(decompress, "_BATCH_ELEMENTS", 1 << 20):  # a matrix
        for _ in range(3):
            toy.memory()
            optimizer.step()
    held, peak = toy.memory()
    return (held - known - TABLES) / weights, (peak - known - TABLES) / weights


TABLES = 9 << 19  # bytes of the codec's own tables, for any model


@pytest.mark.parametrize("kind", ["DeMo", "DeMo, muon", "LocalDeMo", "LocalDeMo, owner"])
def test_extra_memory_stays_in_bounds(on_toy: Any, kind: str) -> None:
    """At rest the places of lines; in a step two tensors of a block, one of its directions, and small ones.

    An owner has in their place the sums of its share, and their magnitudes.
    """
    ((at_rest, at_most),) = on_toy(_memory, 1, kind)
    assert at_rest <= 0.05
    assert at_most <= (4 if "owner" in kind else 3.5)
