"""torch's optimizers on averaged gradients, as DistributedDataParallel runs them, makers of the same optimizers, and a
probe: the same on gradients of which only some are averaged.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import demopt
from laboratory.simulation.workers import (
    Averaged,
    Cost,
    Method,
    Optimizer,
    Rates,
    SimulatedWorkers,
    copy_weights,
    put_gradients,
    trained,
)

#: Makes the optimizers of a model; their rates are factors on a step's rate (`Rates`).
Maker = Callable[[nn.Module], list[Optimizer]]

BETAS = (0.9, 0.95)  # AdamW's, everywhere in the laboratory


def averaged(name: str) -> Callable[..., Averaged]:
    """Returns the method that steps an optimizer of `MAKERS` on the mean gradient."""
    return lambda workers, **settings: Averaged(workers, MAKERS[name](**settings)(workers.model))


def muon_maker(
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    nesterov: bool = True,
    beta2: float = BETAS[1],
) -> Maker:
    """Returns a maker of Muon for matrices inside the model, and AdamW for embedding (tied head) and vectors.

    They are those of `demopt.muon_adamw`. `beta2` is AdamW's.

    Examples:
        >>> [type(each).__name__ for each in muon_maker(0.95)(nn.Linear(2, 2))]
        ['BatchedMuon', 'AdamW']
    """

    def make(model: nn.Module) -> list[Optimizer]:
        found = demopt.muon_adamw(model, 1.0, momentum=momentum, weight_decay=weight_decay, betas=(BETAS[0], beta2))
        found[0].param_groups[0]["nesterov"] = nesterov
        return found

    return make


def adamw_maker(weight_decay: float = 0.1) -> Maker:
    """Returns a maker of AdamW for all parameters.

    Examples:
        >>> [type(each).__name__ for each in adamw_maker()(nn.Linear(2, 2))]
        ['AdamW']
    """
    return lambda model: [torch.optim.AdamW(model.parameters(), lr=1.0, betas=BETAS, weight_decay=weight_decay)]


#: The optimizers: of the mean gradient in data-parallel training, or of a worker's in local steps.
MAKERS: dict[str, Callable[..., Maker]] = {"muon": muon_maker, "adamw": adamw_maker}


class LocalSteps(Method):
    """H local steps of Muon and AdamW, then the float32 mean of all weights: which part of a model loses by them?

    A probe, not a method for a network: the gradients of the parameters that `averaged` names ("matrices", Muon's;
    "others", AdamW's; or "none") are averaged at every step, as in DDP. Gradients are clipped as they are used.

    Examples:
        >>> probe = LocalSteps(SimulatedWorkers(nn.Linear(2, 2), 2), every=2, averaged="others")
        >>> [probe.averages(parameter) for parameter in probe.model_of(0).parameters()]  # weight, bias
        [False, True]
    """

    bytes_rule = "none counted"
    clips_workers = False

    def __init__(self, workers: SimulatedWorkers, every: int = 1, averaged: str = "none", **settings: Any) -> None:
        super().__init__(workers)
        self.every, self.averaged, self.taken = every, averaged, 0
        self._models = [copy.deepcopy(workers.model) for _ in range(workers.world_size)]
        self.optimizers = [each for model in self._models for each in muon_maker(**settings)(model)]
        self._rates = Rates(self.optimizers)
        self._matrices = {id(weight) for muon in self.optimizers[::2] for weight in muon.param_groups[0]["params"]}

    def averages(self, parameter: nn.Parameter) -> bool:
        """Returns whether this parameter's gradients are averaged at every step."""
        return self.averaged == ("matrices" if id(parameter) in self._matrices else "others")

    def begin(self, lr: float) -> None:
        self._rates.set(lr)

    def model_of(self, rank: int) -> nn.Module:
        return self._models[rank]

    def take(self, rank: int) -> None:
        """Leaves the gradients where they are."""

    @torch.no_grad()
    def finish(self) -> Cost:
        weights = [trained(model) for model in self._models]
        own = [[weight.grad for weight in worker if weight.grad is not None] for worker in weights]
        mean = [torch.stack(each).mean(0) for each in zip(*own, strict=True)]
        put_gradients(weights[0], mean, self.workers.clip)
        for worker, gradients in zip(weights, own, strict=True):
            put_gradients(worker, gradients, self.workers.clip)
            for weight, averaged in zip(worker, mean, strict=True):
                weight.grad = averaged if self.averages(weight) else weight.grad
        for optimizer in self.optimizers:
            optimizer.step()
        self.taken += 1
        if self.taken % self.every == 0 or self.last:
            for each in zip(*weights, strict=True):
                copy_weights([torch.stack(each).mean(0)] * len(each), each)
        return Cost()

    def prepare_evaluation(self) -> Cost:
        copy_weights(self._models[0].parameters(), self.workers.model.parameters())
        return Cost()
