"""torch's optimizers on averaged gradients, as DistributedDataParallel runs them, and makers of the same optimizers."""

from collections.abc import Callable

import torch
from torch import nn

import demopt
from laboratory.simulation.workers import Averaged, Optimizer, SimulatedWorkers

#: Makes the optimizers of a model; their rates are factors on a step's rate (`Rates`).
Maker = Callable[[nn.Module], list[Optimizer]]

BETAS = (0.9, 0.95)  # AdamW's, everywhere in the laboratory


def adamw(workers: SimulatedWorkers, weight_decay: float = 0.1) -> Averaged:
    """AdamW."""
    return Averaged(workers, adamw_maker(weight_decay)(workers.model))


def sgd(workers: SimulatedWorkers, momentum: float = 0.9, weight_decay: float = 0.0) -> Averaged:
    """SGD with momentum."""
    return Averaged(
        workers, [torch.optim.SGD(workers.parameters, lr=1.0, momentum=momentum, weight_decay=weight_decay)]
    )


def muon(
    workers: SimulatedWorkers, momentum: float = 0.95, weight_decay: float = 0.1, others_share: float = 1.0
) -> Averaged:
    """Muon for matrices inside the model; AdamW for embedding (tied head) and vectors."""
    return Averaged(workers, muon_maker(momentum, weight_decay, others_share)(workers.model))


def muon_maker(momentum: float, weight_decay: float = 0.1, others_share: float = 1.0) -> Maker:
    """Returns a maker of Muon and AdamW: the same ones for the mean gradient and for a worker's.

    Muon's scale "match_rms_adamw" makes one learning rate fit both; `others_share` is AdamW's share of it.

    Examples:
        >>> [type(each).__name__ for each in muon_maker(0.95)(nn.Linear(2, 2))]
        ['Float32Muon', 'AdamW']
    """

    def make(model: nn.Module) -> list[Optimizer]:
        muon = demopt.muon_adamw(model, lr=1.0, momentum=momentum, weight_decay=weight_decay)[0]
        matrices = {id(parameter) for parameter in muon.param_groups[0]["params"]}
        others = [p for p in model.parameters() if p.requires_grad and id(p) not in matrices]
        if not others:
            return [muon]
        return [muon, torch.optim.AdamW(others, lr=others_share, betas=BETAS, weight_decay=weight_decay)]

    return make


def adamw_maker(weight_decay: float) -> Maker:
    """Returns a maker of AdamW for all parameters.

    Examples:
        >>> [type(each).__name__ for each in adamw_maker(0.1)(nn.Linear(2, 2))]
        ['AdamW']
    """
    return lambda model: [torch.optim.AdamW(model.parameters(), lr=1.0, betas=BETAS, weight_decay=weight_decay)]
