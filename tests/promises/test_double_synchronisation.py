"""Gradients that something else already synchronises, DDP or FSDP2 over the same ranks, are noticed."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import problems
import ranks
from demopt import DeMo, LocalDeMo


def _backward(model: torch.nn.Module, data: torch.Tensor) -> None:
    model.zero_grad()
    model(data).square().mean().backward()


def _optimizer(model: torch.nn.Module, method: str) -> torch.optim.Optimizer:
    if method == "demo":
        return DeMo(model.parameters(), **problems.SMALL)
    inner = torch.optim.AdamW(model.parameters(), weight_decay=0.1)  # moves all ranks alike without gradients
    return LocalDeMo(inner, sync_every=1 + (method == "local"), chunk=16, top_k=24, delay=int(method != "local"))


def _steps(rank: int, world_size: int, kind: str, method: str = "demo") -> list[list[str]]:
    """The warnings of each of three steps."""
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Linear(9, 4)
    if kind in ("ddp", "ddp without its synchronisation"):
        model = DistributedDataParallel(model)
    optimizer = _optimizer(model, method)
    heard = []
    for step in range(3):
        seed = 0 if kind.startswith("the same data") else rank
        data = torch.zeros(5, 9) if kind == "zero gradients" else problems.draw((5, 9), seed, step)
        quiet = model.no_sync() if kind == "ddp without its synchronisation" else contextlib.nullcontext()
        with quiet:
            _backward(model, data)
        if kind == "zero gradients" or (kind == "the same data, first with zero gradients" and step == 0):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        if kind == "no gradients":
            model.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        heard.append([str(warning.message) for warning in caught])
    return heard


@pytest.mark.parametrize("kind", ["ddp", "the same data"])
def test_synchronised_gradients_warn_once(kind: str) -> None:
    first, second = ranks.run(_steps, 2, kind)
    assert [len(texts) for texts in first] == [1, 0, 0]
    assert "DistributedDataParallel" in first[0][0]
    assert "identical" in first[0][0]
    assert second == [[], [], []], "rank 0 alone warns"


@pytest.mark.parametrize(
    "kind", ["the plain model", "ddp without its synchronisation", "zero gradients", "no gradients"]
)
def test_unsynchronised_gradients_do_not_warn(kind: str) -> None:
    assert ranks.run(_steps, 2, kind) == [[[], [], []]] * 2


METHODS = ["demo", "local", "local with delay"]


@pytest.mark.parametrize("method", METHODS)
def test_synchronised_gradients_warn_when_they_are_no_longer_zero(method: str) -> None:
    """A first step with a loss of zero hides them."""
    first, second = ranks.run(_steps, 2, "the same data, first with zero gradients", method)
    assert [len(texts) for texts in first] == [0, 1, 0]
    assert "bit-identical gradients" in first[1][0]
    assert second == [[], [], []], "rank 0 alone warns"


@pytest.mark.parametrize("method", METHODS)
def test_zero_gradients_do_not_warn(method: str) -> None:
    assert ranks.run(_steps, 2, "zero gradients", method) == [[[], [], []]] * 2


def test_single_rank_does_not_warn() -> None:
    assert ranks.run(_steps, 1, "the plain model") == [[[], [], []]]


def _fsdp(rank: int, world_size: int) -> list[str]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = DeMo(model.parameters(), **problems.SMALL)
    _backward(model, problems.draw((5, 8), rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(warning.message) for warning in caught]


def test_fsdp2_over_the_same_ranks_is_refused() -> None:
    first, second = ranks.outcomes(_fsdp, 2)
    for outcome in (first,) if first.error is None else (first, second):  # rank 0 alone warns
        said = str(outcome.error) if outcome.error is not None else " ".join(outcome.value)
        assert "FSDP2" in said, outcome.trace or outcome.value
        assert outcome.error is None or isinstance(outcome.error, ValueError)


def _hybrid(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """FSDP2 within pairs of ranks, DeMo between the pairs: fingerprints are those of shards."""
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    fully_shard(model, mesh=mesh["shard"])
    optimizer = DeMo(model.parameters(), **problems.SMALL, process_group=mesh["replicate"])
    fingerprints = []
    for step in range(3):
        _backward(model, problems.draw((5, 8), rank, step))
        optimizer.step()
        fingerprints.append(optimizer.fingerprint())
    return fingerprints, dist.get_process_group_ranks(mesh["replicate"].get_group())


def test_fsdp2_within_nodes_and_demo_between_works() -> None:
    results = ranks.run(_hybrid, 4)
    assert [members for _, members in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert results[0][0] == results[2][0]
    assert results[1][0] == results[3][0]
    assert results[0][0] != results[1][0], "shards are different parts"
