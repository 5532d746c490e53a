"""Optimizers of one rank for tests of checkpoints: built, trained a little, saved, loaded, and trained on."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import problems
from demopt import DeMo, LocalDeMo

SHAPES = [(32, 16), (17, 19), (20,)]
KINDS = ["DeMo", "LocalDeMo"]


def build(kind: str, shapes: Any = SHAPES, parameters: list[Parameter] | None = None, **more: Any) -> Any:
    """An optimizer over fresh parameters; LocalDeMo has a round every 3 steps."""
    parameters = parameters or problems.parameters(shapes)
    if kind == "DeMo":
        return DeMo(parameters, **{**problems.SMALL, "update": "nesterov", **more})
    inner = torch.optim.AdamW(parameters, lr=0.01)
    return LocalDeMo(inner, sync_every=3, top_k=24, chunk=16, outer_momentum=0.5, **more)


def advance(optimizer: Any, steps: range, rank: int) -> None:
    parameters = problems.all_parameters(optimizer)
    for step in steps:
        problems.set_gradients(parameters, step, rank)
        optimizer.step()


def loaded(old: Any, kind: str, load: Callable[[Any], None], **more: Any) -> Any:
    """A fresh optimizer over copies of the parameters (of LocalDeMo: of the global ones), into which `load` loads."""
    if kind == "LocalDeMo":
        with old.shared():
            twins = [Parameter(p.detach().clone()) for p in problems.all_parameters(old)]
    else:
        twins = [Parameter(p.detach().clone()) for p in problems.all_parameters(old)]
    new = build(kind, parameters=twins, **more)
    load(new)
    return new


def end(optimizer: Any, rank: int) -> tuple[list[Tensor], int]:
    """Parameters and fingerprint after four more steps."""
    advance(optimizer, range(5, 9), rank)
    return [p.detach().clone() for p in problems.all_parameters(optimizer)], optimizer.fingerprint()


def saved(optimizer: Any) -> dict[str, Any]:
    """The state dict; of LocalDeMo between two rounds, without its warning."""
    if isinstance(optimizer, LocalDeMo):
        with optimizer.shared():
            return optimizer.state_dict()
    return optimizer.state_dict()


def consolidate(optimizer: Any, to: int = 0) -> None:
    with optimizer.shared() if isinstance(optimizer, LocalDeMo) else contextlib.nullcontext():
        optimizer.consolidate_state_dict(to=to)


def warned(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]
