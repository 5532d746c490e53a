"""Models whose parameters an optimizer trains, where they are at hand: mistakes with them that show nowhere else.

`unsync`, `muon_adamw` and `muon_groups` get a model, and `remember` it; an optimizer looks at those that have its
parameters in its first step (`look_at_models`), and warns of

- parameters that train, but that no DeMo or LocalDeMo has;
- buffers that training changes, and that nothing synchronises;
- a model in eval() that runs with the local weights of LocalDeMo.
"""

import threading
import weakref
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from demopt.exchange.process_group import resolve
from demopt.validation import warn

_all: "WeakSet[Any]" = WeakSet()  # all DeMo and LocalDeMo
_change = threading.Lock()  # ranks may be threads
_models: "WeakKeyDictionary[nn.Module, str]" = WeakKeyDictionary()  # and the function that got it
_told: WeakSet[nn.Module] = WeakSet()  # normalisations whose buffers were warned of


def remember(model: nn.Module, function: str) -> None:
    """Takes note of a model that `function` got; warns of buffers that training changes."""
    _models[model] = function
    exchange = resolve(None)
    if exchange.world_size > 1 and exchange.speaks:
        _warn_of_statistics(model)


def note_optimizer(optimizer: Any) -> None:
    """Takes note of a DeMo or LocalDeMo, whose parameters are kept equal."""
    with _change:
        _all.add(optimizer)


def _optimizers() -> list[Any]:
    with _change:
        return list(_all)


def look_at_models(optimizer: Any) -> None:
    """The checks of an optimizer's first step, by the rank that speaks."""
    session = optimizer.replicator.session
    if session.exchange.world_size == 1 or not session.exchange.speaks:
        return
    kept = {id(p) for each in _optimizers() for group in each.param_groups for p in group["params"]}
    told = False
    for model in _models_of(optimizer):
        _warn_of_statistics(model)
        told = told or _warn_of_parameters(model, kept)
        if model.training and hasattr(optimizer, "mistakes"):  # else it trains in eval()
            inside = [each.module for each in model.modules() if isinstance(each, DistributedDataParallel)]
            for module in (model, *inside):
                module.register_forward_pre_hook(_LocalWeightsSeen(optimizer))


def _models_of(optimizer: Any) -> Iterator[nn.Module]:
    """Yields the models that have one of the optimizer's parameters."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in list(_models):
        if any(id(p) in mine for p in model.parameters()):
            yield model


def _warn_of_statistics(model: nn.Module) -> None:
    """Warns once of running statistics that each rank updates from its own data.

    SyncBatchNorm averages them over the ranks itself; frozen ones do not change.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and not isinstance(module, nn.SyncBatchNorm)
        if module.running_mean is not None and module.training and module not in _told
    }
    if found:
        _told.update(found.values())
        kind = type(next(iter(found.values()))).__name__
        warn(
            f"the model has {kind} ({next(iter(found)) or 'itself'}, {len(found)} in all), whose running statistics "
            "every rank takes from its own data: call demopt.broadcast_buffers(model) on all ranks before evaluating "
            "or saving, or use SyncBatchNorm, GroupNorm or LayerNorm"
        )


def _warn_of_parameters(model: nn.Module, kept: set[int]) -> bool:
    """Warns if the model trains parameters that no DeMo or LocalDeMo has; returns whether it does.

    Another optimizer may train them, such as AdamW for biases beside DeMo for matrices. Then ranks drift apart, and no
    fingerprint covers it.
    """
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in kept]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        warn(
            f"parameter {left[0]!r}{more} of the model that went through {_models[model]} can train, but no DeMo or "
            "LocalDeMo has it: if another optimizer trains it, ranks drift apart. Give it to this optimizer, too "
            "(demopt.muon_groups makes groups for all), or freeze it with requires_grad_(False)"
        )
    return bool(left)


class _LocalWeightsSeen:
    """A forward pre-hook that warns, once, if a model in eval() runs with the local weights of one rank."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer: Any = weakref.ref(optimizer)

    def __call__(self, model: nn.Module, *_: Any) -> None:
        if model.training or torch.compiler.is_compiling():  # graphs stay whole
            return
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.mistakes.look_at_evaluation()

    # Copies, such as the average of an EMA, are not this optimizer's; and whoever loads a pickled model may not have
    # demopt. So a copy has a hook that returns its inputs: dict.get, of a module that it does not know.
    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ({}, "get")
