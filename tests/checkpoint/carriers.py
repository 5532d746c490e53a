"""Optimizers of one rank for tests of checkpoints: built, trained a little, saved, loaded, and trained on."""

import contextlib
import warnings
from typing import Any

import torch
from torch.nn import Parameter

import problems
from demopt import DeMo, LocalDeMo

SHAPES = [(32, 16), (17, 19), (20,)]
OWNERS = "LocalDeMo with owners"  # owners keep errors of their own
KINDS = ["DeMo", "LocalDeMo", OWNERS]


def build(kind: str, shapes: Any = SHAPES, parameters: list[Parameter] | None = None, **more: Any) -> Any:
    """An optimizer over fresh parameters; LocalDeMo has a round every 3 steps."""
    parameters = parameters or problems.parameters(shapes)
    if kind == "DeMo":
        return DeMo(parameters, **{**problems.SMALL, "update": "nesterov", **more})
    inner = problems.ADAMW(parameters)
    more = {"sync_every": 3, "outer_momentum": 0.5, **more}
    if kind == OWNERS:  # small chunks: every rank owns some, and most parameters have several owners
        return LocalDeMo(inner, chunk=4, **{"route": "owner", **more})
    return LocalDeMo(inner, top_k=24, chunk=16, **more)


def trained(kind: str, exchange: Any, steps: int = 5, **more: Any) -> Any:
    """An optimizer that has trained; after five steps a LocalDeMo is between two rounds."""
    optimizer = build(kind, process_group=exchange, **more)
    problems.fingerprints(optimizer, range(steps), exchange.rank)
    return optimizer


def shown(optimizer: Any) -> Any:
    """The context in which the model has the global weights; there, saving between two rounds does not warn."""
    return optimizer.shared() if isinstance(optimizer, LocalDeMo) else contextlib.nullcontext()


def end(optimizer: Any, rank: int) -> tuple[list[int], int]:
    """Fingerprints of four more steps, and of the local parameters at the end."""
    return problems.fingerprints(optimizer, range(5, 9), rank), problems.bits(problems.values(optimizer))


def saved(optimizer: Any) -> dict[str, Any]:
    with shown(optimizer):
        return optimizer.state_dict()


def consolidate(optimizer: Any, to: int = 0) -> None:
    warnings.filterwarnings("ignore", message=r"rank \d received .* bytes of states")  # until the end of the test
    with shown(optimizer):
        optimizer.consolidate_state_dict(to=to)


def assert_resharded(state: dict[str, Any], wanted: dict[str, Any]) -> None:
    """A state is `wanted`, from `reshard`; a new owner's error is zero: `reshard` adds it to the ranks' errors."""
    for number, entry in wanted["state"].items():
        found = dict(state["state"][number])
        if "owner_error" not in entry:
            assert not found.pop("owner_error", torch.zeros(1)).any()
            found.pop("owner_start", None)
        assert set(found) == set(entry)
        for name, value in entry.items():
            ours, theirs = torch.as_tensor(found[name]), torch.as_tensor(value)
            assert torch.equal(*((each[:4] for each in (ours, theirs)) if name == "saved_by" else (ours, theirs))), name


def owned(state: dict[str, Any]) -> bool:
    return any(bool(entry["owner_error"].any()) for entry in state["state"].values() if "owner_error" in entry)
