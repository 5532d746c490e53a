"""Gradients that something else already synchronises, DDP or FSDP2 over the same ranks, are noticed."""

import contextlib

import pytest
import torch
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


def _steps(rank: int, world_size: int, kind: str, method: str) -> list[list[str]]:
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
        heard.append(problems.warned(optimizer.step))
    return heard


LATE = "the same data, first with zero gradients"  # as after a first step with a loss of zero


@pytest.mark.parametrize(
    ("kind", "method", "at"),
    [
        *(("ddp", "demo", 0), ("the same data", "demo", 0)),
        *((LATE, method, 1) for method in ("demo", "local", "local with delay")),
        *(("ddp without its synchronisation", "demo", None), ("no gradients", "demo", None)),
        *(("zero gradients", method, None) for method in ("demo", "local", "local with delay")),
    ],
)
def test_synchronised_gradients_warn_once_when_they_are_not_zero(kind: str, method: str, at: int | None) -> None:
    first, second = ranks.run(_steps, 2, kind, method)
    assert [len(texts) for texts in first] == [int(step == at) for step in range(3)]
    assert at is None or "bit-identical gradients, so something already synchronizes them (Distr" in first[at][0]
    assert second == [[], [], []], "rank 0 alone warns"


def _fsdp(rank: int, world_size: int) -> list[str]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = DeMo(model.parameters(), **problems.SMALL)
    _backward(model, problems.draw((5, 8), rank))
    return problems.warned(optimizer.step)


def test_fsdp2_over_the_same_ranks_is_refused() -> None:
    for outcome in ranks.outcomes(_fsdp, 2):
        assert isinstance(outcome.error, ValueError), outcome.value
        assert "FSDP2" in str(outcome.error)
