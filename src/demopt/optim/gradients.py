"""Checks of parameters and gradients before they are used."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demopt.core.chunk import to_local
from demopt.core.update import rule_of

_LIMIT = 1e30  # sums over a chunk, and the momentum, then stay below float32's 3e38


@dataclass(frozen=True)
class Scaling:
    """What torch.amp.GradScaler leaves on an optimizer: its scale, and whether it found an infinity.

    Examples:
        >>> Scaling(grad_scale=torch.tensor(4.0)).factor
        0.25
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> "Scaling":
        """Returns what is there now."""
        return Scaling(getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None))

    @staticmethod
    def forget(optimizer: torch.optim.Optimizer) -> None:
        """After a step that failed: GradScaler takes away what it left only after one that did not."""
        for name in ("grad_scale", "found_inf"):
            optimizer.__dict__.pop(name, None)

    @property
    def factor(self) -> float:
        """The factor that unscales gradients."""
        return 1.0 if self.grad_scale is None else 1.0 / float(self.grad_scale)

    @property
    def found_infinite(self) -> bool:
        """Whether GradScaler found an infinite gradient."""
        return self.found_inf is not None and bool(self.found_inf)


def lay_out_gradients(parameters: Iterable[Tensor]) -> None:
    """Gives each DTensor's gradient the placements of its parameter, where backward left others.

    Under tensor parallelism with SequenceParallel the gradients of a norm are Partial: each rank has summed over its
    part of the sequence alone. The ranks of the node add them up here, so all of them call this together.

    Examples:
        >>> lay_out_gradients([torch.nn.Parameter(torch.zeros(2))])
    """
    for parameter in parameters:
        gradient: Any = parameter.grad
        placements = getattr(gradient, "placements", None)
        wanted = getattr(parameter, "placements", placements)
        if placements != wanted:
            parameter.grad = gradient.redistribute(placements=wanted)


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Returns the gradients of the parameters that have one; of a DTensor, this process's part.

    Examples:
        >>> parameter = torch.nn.Parameter(torch.zeros(2))
        >>> parameter.grad = torch.ones(2)
        >>> gradients_of([parameter, torch.nn.Parameter(torch.zeros(3))])
        [tensor([1., 1.])]
    """
    return [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def usable_gradients(parameters: Collection[Tensor], groups: list[dict[str, Any]]) -> list[Tensor]:
    """Lays out the gradients and returns them; TypeError if one cannot be used; `groups` are for naming it.

    Examples:
        >>> usable_gradients([torch.nn.Parameter(torch.zeros(2))], [])
        []
    """
    lay_out_gradients(parameters)
    gradients = gradients_of(parameters)
    if not all(gradient.layout == torch.strided and gradient.is_floating_point() for gradient in gradients):
        _refuse_gradients(set(map(id, parameters)), groups)
    return gradients


def _refuse_gradients(parameters: set[int], groups: list[dict[str, Any]]) -> None:
    for number, group in enumerate(groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in parameters or parameter.grad is None:
                continue
            gradient = to_local(parameter.grad)
            where = f"the gradient of param_groups[{number}]['params'][{index}], shape {list(parameter.shape)},"
            if gradient.layout != torch.strided:
                raise TypeError(f"{where} is sparse; DeMo needs dense gradients, e.g. nn.Embedding(..., sparse=False)")
            if not gradient.is_floating_point():
                raise TypeError(f"{where} is {gradient.dtype}; DeMo needs real floating-point gradients")


def fill_gradients(parameters: Iterable[Tensor]) -> None:
    """Creates missing gradients as zeros, so that all ranks have equally many.

    Examples:
        >>> parameter = torch.nn.Parameter(torch.ones(2))
        >>> fill_gradients([parameter])
        >>> parameter.grad
        tensor([0., 0.])
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def all_usable(gradients: list[Tensor]) -> bool:
    """Whether no gradient holds NaN, Inf, or a number so large (1e30) that its transform could overflow.

    Examples:
        >>> all_usable([torch.zeros(2), torch.tensor([1.0, float("nan")])])
        False
    """
    # The smallest or largest element is NaN or too large exactly if some element is; finding both takes one pass.
    ends: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            low, high = gradient.detach().aminmax()
            ends.setdefault(gradient.device, []).extend([low.double(), high.double()])
    # One result per device, because reading each makes the host wait.
    return all(bool((torch.stack(found).abs() < _LIMIT).all()) for found in ends.values())


def check_parameters(parameters: Collection[Tensor]) -> None:
    """Raises TypeError if a parameter of a group cannot be trained, ValueError if one is there twice.

    Examples:
        >>> check_parameters([torch.zeros(2, dtype=torch.complex64)])
        Traceback (most recent call last):
        TypeError: a parameter of shape [2] is torch.complex64; DeMo trains real floating-point parameters
    """
    seen: set[int] = set()
    for parameter in parameters:
        shape, dtype = list(parameter.shape), parameter.dtype
        if not parameter.is_floating_point():
            raise TypeError(f"a parameter of shape {shape} is {dtype}; DeMo trains real floating-point parameters")
        if id(parameter) in seen:
            raise ValueError(f"a parameter of shape {shape} is twice in a parameter group; list it once")
        seen.add(id(parameter))


def check_matrices(update: Any, parameters: Iterable[Tensor]) -> None:
    """Raises ValueError if an update rule needs matrices, or batches of them, and a parameter is neither.

    Examples:
        >>> check_matrices("muon", [torch.zeros(3)])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: update 'muon' is for matrices, and a parameter has shape [3]; give such parameters a group of ...
    """
    rule = rule_of(update)
    for parameter in parameters if rule.whole else ():
        if parameter.dim() not in (2, 3):
            raise ValueError(
                f"update {rule.name!r} is for matrices, and a parameter has shape {list(parameter.shape)}; give such "
                "parameters a group of their own, with embeddings and heads: {'params': [...], 'update': 'adamw'}"
            )
