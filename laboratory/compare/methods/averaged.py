"""torch's optimizers on averaged gradients, as DistributedDataParallel runs them, and makers of the same optimizers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import demopt
from laboratory.simulation.workers import Averaged, Optimizer

#: Makes the optimizers of a model; their rates are factors on a step's rate (`Rates`).
Maker = Callable[[nn.Module], list[Optimizer]]

BETAS = (0.9, 0.95)  # AdamW's, everywhere in the laboratory


def averaged(name: str) -> Callable[..., Averaged]:
    """Returns the method that steps an optimizer of `MAKERS` on the mean gradient."""
    return lambda workers, **settings: Averaged(workers, MAKERS[name](**settings)(workers.model))


def muon_maker(
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    beta2: float = BETAS[1],
) -> Maker:
    """Returns a maker of Muon for matrices inside the model, and AdamW for embedding (tied head) and vectors.

    They are those of `demopt.muon_adamw`. `beta2` is AdamW's.
    """
    betas = (BETAS[0], beta2)
    return lambda model: demopt.muon_adamw(model, 1.0, momentum=momentum, weight_decay=weight_decay, betas=betas)


def adamw_maker(weight_decay: float = 0.1) -> Maker:
    """Returns a maker of AdamW for all parameters."""
    return lambda model: [torch.optim.AdamW(model.parameters(), lr=1.0, betas=BETAS, weight_decay=weight_decay)]


#: By name, for the mean gradient in data-parallel training, or for a worker's own in local steps.
MAKERS: dict[str, Callable[..., Maker]] = {"muon": muon_maker, "adamw": adamw_maker}


def maker_of(name: str, settings: dict[str, Any]) -> Maker:
    """Returns the maker of this name, made with its own settings; removes these from a method's."""
    own = ("momentum", "weight_decay", "beta2")
    return MAKERS[name](**{each: settings.pop(each) for each in own if each in settings})
