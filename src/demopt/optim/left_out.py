"""Parameters of a model that went through `unsync`, which train but which no DeMo or LocalDeMo has.

Another optimizer may train them, such as AdamW for biases beside DeMo for matrices. Nothing keeps them the same on all
ranks then, and no fingerprint covers them.
"""

from weakref import WeakSet

import torch
from torch import nn

from demopt.validation import warn

_models: WeakSet[nn.Module] = WeakSet()
_optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()


def watch_model(model: nn.Module) -> None:
    """Notes a model whose gradients nothing synchronizes."""
    _models.add(model)


def watch_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Notes an optimizer that keeps its parameters the same on all ranks."""
    _optimizers.add(optimizer)


def warn_if_left_out(optimizer: torch.optim.Optimizer) -> None:
    """Warns if a noted model trains parameters of this optimizer, and others that no noted optimizer has."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in list(_models):
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not any(id(p) in mine for p in trained.values()):
            continue
        kept = {id(p) for each in list(_optimizers) for group in each.param_groups for p in group["params"]}
        left = [name for name, p in trained.items() if id(p) not in kept]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            warn(
                f"parameter {left[0]!r}{more} of the model that went through unsync can train, but no DeMo or "
                "LocalDeMo has it: if another optimizer trains it, ranks drift apart. Give it to this optimizer, too "
                "(demopt.muon_groups makes groups for all), or freeze it with requires_grad_(False)"
            )
            return
