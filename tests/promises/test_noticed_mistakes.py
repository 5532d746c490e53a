"""Mistakes that are noticed.

Parameters that no DeMo has, and steps of an inner optimizer alone, after which ranks would drift unseen; and gradients
that something else already synchronises, DDP or FSDP2 over the same ranks.
"""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import demopt
import problems
import ranks
from demopt import DeMo, LocalDeMo


def _optimizers(kind: str, matrices: list[nn.Parameter], others: list[nn.Parameter]) -> list[Any]:
    """The optimizers of a model; "AdamW for biases" has the others in one of its own."""
    if kind == "AdamW for biases":
        return [DeMo(matrices, **problems.SMALL), torch.optim.AdamW(others)]
    if kind == "LocalDeMo, AdamW for biases":
        return [LocalDeMo(torch.optim.AdamW(matrices), sync_every=2), torch.optim.AdamW(others)]
    if kind == "frozen biases":
        for parameter in others:
            parameter.requires_grad_(False)
        return [DeMo(matrices, **problems.SMALL)]
    if kind == "a model of AdamW's beside":
        apart = demopt.unsync(nn.Linear(2, 2))
        adamw: Any = torch.optim.AdamW(apart.parameters())
        adamw.model = apart  # which lives as long
        return [DeMo([*matrices, *others], **problems.SMALL), adamw]
    inner = [torch.optim.AdamW(each) for each in (matrices, others)]
    return [LocalDeMo(inner, sync_every=2)]


def _heard(rank: int, world_size: int, kind: str) -> list[str]:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(problems.draw(parameter.shape, number))
    demopt.unsync(model)
    parameters = [[p for p in model.parameters() if p.dim() == dim] for dim in (2, 1)]
    optimizers, heard = _optimizers(kind, *parameters), []
    for step in range(3):
        problems.set_gradients(model.parameters(), step, rank)
        for optimizer in optimizers:
            heard += problems.warned(optimizer.step)
    return heard


@pytest.mark.parametrize("kind", ["AdamW for biases", "LocalDeMo, AdamW for biases"])
def test_parameters_of_an_unsynced_model_that_no_demo_has_are_noticed_once(kind: str) -> None:
    ((told,), other) = ranks.run(_heard, 2, kind)
    assert "parameter '0.bias' and 1 more of the model that went through unsync can train" in told
    assert "demopt.muon_groups" in told
    assert other == [], "rank 0 alone warns"


@pytest.mark.parametrize("kind", ["frozen biases", "LocalDeMo around two", "a model of AdamW's beside"])
def test_models_whose_parameters_are_all_kept_equal_do_not_warn(kind: str) -> None:
    assert ranks.run(_heard, 2, kind) == [[], []]


def _wrapped() -> tuple[torch.optim.Optimizer, LocalDeMo]:
    parameters = problems.parameters([(4, 4)])
    inner = torch.optim.AdamW(parameters, lr=0.1)
    return inner, LocalDeMo(inner, sync_every=2)


def test_step_of_an_inner_optimizer_alone_is_refused_and_moves_nothing() -> None:
    _, optimizer = _wrapped()
    for each in (optimizer, copy.deepcopy(optimizer)):
        parameter = problems.all_parameters(each)[0]
        before = parameter.detach().clone()
        problems.set_gradients([parameter], 0)
        says = r"step\(\) of the AdamW inside a LocalDeMo was called.*call step\(\) of"
        with pytest.raises(RuntimeError, match=says):
            each.inner[0].step()
        assert torch.equal(parameter, before)
        each.step()
        assert each.local_steps == 1
        assert not torch.equal(parameter, before)


def test_inner_optimizer_steps_where_that_is_no_mistake() -> None:
    inner, optimizer = _wrapped()
    again = LocalDeMo(inner, sync_every=2)  # replaces the other
    problems.set_gradients(problems.all_parameters(again), 0)
    again.step()
    inner.param_groups[0]["lr"] = 0.0  # as torch does to create the state
    inner.step()
    inner.param_groups[0]["lr"] = 0.1
    del optimizer, again
    inner.step()


# Gradients that are synchronised already


def _backward(model: nn.Module, data: torch.Tensor) -> None:
    model.zero_grad()
    model(data).square().mean().backward()


def _optimizer(model: nn.Module, method: str) -> torch.optim.Optimizer:
    if method == "demo":
        return DeMo(model.parameters(), **problems.SMALL)
    inner = torch.optim.AdamW(model.parameters(), weight_decay=0.1)  # moves all ranks alike without gradients
    return LocalDeMo(inner, sync_every=1 + (method == "local"), chunk=16, top_k=24, delay=int(method != "local"))


def _steps(rank: int, world_size: int, kind: str, method: str) -> list[list[str]]:
    """The warnings of each of three steps."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(9, 4)
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
    model = nn.Linear(8, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = DeMo(model.parameters(), **problems.SMALL)
    _backward(model, problems.draw((5, 8), rank))
    return problems.warned(optimizer.step)


def test_fsdp2_over_the_same_ranks_is_refused() -> None:
    for outcome in ranks.outcomes(_fsdp, 2):
        assert isinstance(outcome.error, ValueError), outcome.value
        assert "FSDP2" in str(outcome.error)
