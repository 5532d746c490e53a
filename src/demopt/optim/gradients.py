"""Checks of parameters and gradients before they are used."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demopt.core.update import rule_of
from demopt.optim.chunk_group import local

_LIMIT = 1e30  # sums over a chunk, and the momentum, then stay below float32's 3e38


@dataclass(frozen=True)
class Scaling:
    """What torch.amp.GradScaler leaves on an optimizer: its scale, and whether it found an infinity.

    Example:
        >>> Scaling(grad_scale=torch.tensor(4.0)).factor
        0.25
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @property
    def factor(self) -> float:
        """The factor that unscales gradients."""
        return 1.0 if self.grad_scale is None else 1.0 / float(self.grad_scale)

    @property
    def found_infinite(self) -> bool:
        """Whether GradScaler found an infinite gradient."""
        return self.found_inf is not None and bool(self.found_inf)


def usable_gradients(groups: list[dict[str, Any]], only: Collection[Tensor] | None = None) -> list[Tensor]:
    """Returns the gradients of all parameters, or of `only` some, that have one; TypeError if one cannot be used.

    Example:
        >>> parameter = torch.nn.Parameter(torch.zeros(2))
        >>> parameter.grad = torch.ones(2)
        >>> usable_gradients([{"params": [parameter]}])
        [tensor([1., 1.])]
    """
    gradients, wanted = [], None if only is None else {id(parameter) for parameter in only}
    for number, group in enumerate(groups):
        for index, parameter in enumerate(group["params"]):
            if parameter.grad is None or not parameter.requires_grad:
                continue
            if wanted is not None and id(parameter) not in wanted:
                continue
            gradient = local(parameter.grad)
            where = f"the gradient of param_groups[{number}]['params'][{index}], shape {list(parameter.shape)},"
            if gradient.layout != torch.strided:
                raise TypeError(f"{where} is sparse; DeMo needs dense gradients, e.g. nn.Embedding(..., sparse=False)")
            if not gradient.is_floating_point():
                raise TypeError(f"{where} is {gradient.dtype}; DeMo needs real floating-point gradients")
            gradients.append(gradient)
    return gradients


def fill_gradients(groups: list[dict[str, Any]]) -> list[Tensor]:
    """Returns the gradients of all trained parameters; creates missing ones as zeros, so that ranks have equally many.

    Example:
        >>> fill_gradients([{"params": [torch.nn.Parameter(torch.ones(2))]}])
        [tensor([0., 0.])]
    """
    for group in groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    return usable_gradients(groups)


def all_usable(gradients: list[Tensor]) -> bool:
    """Whether no gradient holds NaN, Inf, or a number so large (1e30) that its transform could overflow.

    Example:
        >>> all_usable([torch.zeros(2), torch.tensor([1.0, float("nan")])])
        False
    """
    # The smallest or largest element is NaN or too large exactly if some element is; finding both takes one pass.
    ends: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            ends.setdefault(gradient.device, []).extend(end.double() for end in gradient.detach().aminmax())
    # One result per device, because reading each makes the host wait.
    return all(bool((torch.stack(found).abs() < _LIMIT).all()) for found in ends.values())


def check_parameter(parameter: Tensor) -> None:
    """Raises TypeError if a parameter cannot be trained.

    Example:
        >>> check_parameter(torch.zeros(2, dtype=torch.complex64))
        Traceback (most recent call last):
        TypeError: a parameter of shape [2] is torch.complex64; DeMo trains real floating-point parameters
    """
    if not parameter.is_floating_point():
        shape, dtype = list(parameter.shape), parameter.dtype
        raise TypeError(f"a parameter of shape {shape} is {dtype}; DeMo trains real floating-point parameters")


def check_matrices(update: Any, parameters: Iterable[Tensor]) -> None:
    """Raises ValueError if an update rule needs whole matrices and a parameter is not one.

    Example:
        >>> check_matrices("muon", [torch.zeros(3)])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: update 'muon' is for matrices, and a parameter has shape [3]; give such parameters a group of ...
    """
    rule = rule_of(update)
    for parameter in parameters if rule.whole else ():
        shape = list(parameter.shape)
        if len(shape) != 2:
            raise ValueError(
                f"update {rule.name!r} is for matrices, and a parameter has shape {shape}; give such parameters a "
                "group of their own, with embeddings and heads: {'params': [...], 'update': 'adamw'}"
            )
        if list(local(parameter).shape) != shape:
            raise ValueError(
                f"update {rule.name!r} needs whole matrices, and a parameter of shape {shape} is sharded; give sharded "
                "parameters another update"
            )
