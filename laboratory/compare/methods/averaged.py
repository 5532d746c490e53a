"""torch's optimizers on averaged gradients, as DistributedDataParallel runs them, and makers of the same optimizers."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

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
    nesterov: bool = True,
    beta2: float = BETAS[1],
) -> Maker:
    """Returns a maker of Muon for matrices inside the model, and AdamW for embedding (tied head) and vectors.

    They are those of `demopt.muon_adamw`. `beta2` is AdamW's.

    Examples:
        >>> [type(each).__name__ for each in muon_maker(0.95)(nn.Linear(2, 2))]
        ['Float32Muon', 'AdamW']
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


def sgd_maker(momentum: float = 0.9, weight_decay: float = 0.0) -> Maker:
    """Returns a maker of SGD with momentum."""
    return lambda model: [torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum, weight_decay=weight_decay)]


def adafactor_maker(weight_decay: float = 0.1) -> Maker:
    """Returns a maker of Adafactor, whose rate is relative to a parameter's size."""
    return lambda model: [torch.optim.Adafactor(model.parameters(), lr=1.0, weight_decay=weight_decay)]


def lion_maker(weight_decay: float = 0.1) -> Maker:
    """Returns a maker of Lion."""
    return lambda model: [Lion(model.parameters(), weight_decay)]


class Lion(torch.optim.Optimizer):
    """x <- (1 - lr wd) x - lr sign(.9 m + .1 g); m <- .99 m + .01 g. Source: arXiv 2302.06675, algorithm 2.

    Examples:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> layer.weight.grad, before = torch.ones(1, 1), layer.weight.item()
        >>> Lion(layer.parameters(), weight_decay=0.0).step()
        >>> round(before - layer.weight.item(), 4)
        1.0
    """

    def __init__(self, parameters: Iterable[Tensor], weight_decay: float) -> None:
        super().__init__(parameters, {"lr": 1.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Takes a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(momentum.lerp(gradient, 0.1).sign_(), alpha=group["lr"])
                momentum.lerp_(gradient, 0.01)


#: The optimizers: of the mean gradient in data-parallel training, or of a worker's in local steps.
MAKERS: dict[str, Callable[..., Maker]] = {
    "muon": muon_maker, "adamw": adamw_maker, "sgd": sgd_maker, "lion": lion_maker, "adafactor": adafactor_maker,
}  # fmt: skip
