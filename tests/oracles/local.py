"""A round of LocalDeMo, slow and literal: the oracle for `demopt.LocalDeMo`.

Every rank has moved by its own optimizer from weights that all share. Movements go through the algorithm of
`reference_step` with the error as its momentum (e <- e + T(D), what is sent leaves e), the shared weights move by the
mean, and errors decay (e <- b e).

Shapes: W ranks, P parameters.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from oracles.reference import reference_step
from oracles.relay import relay_step


def local_round(
    shared: Sequence[Tensor],
    own: Sequence[Sequence[Tensor]],
    errors: Sequence[Sequence[Tensor]],
    settings: dict[str, Any],
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Returns the shared weights [P] and the errors [W][P] after a round of ranks with weights `own` [W][P].

    `settings` has error_decay, outer_lr, alpha, top_k, chunk, transform, reduction and values, as LocalDeMo has them.

    Examples:
        >>> import torch
        >>> settings = dict(error_decay=0.5, outer_lr=1.0, alpha=1.0, top_k=1, chunk=2, transform="identity",
        ...                 reduction="senders", values="float32")
        >>> shared, zero = torch.tensor([[1.0, 1.0]]), torch.zeros(1, 2)
        >>> own = [[torch.tensor([[0.5, 0.9]])], [torch.tensor([[0.7, 1.0]])]]
        >>> (after,), errors = local_round([shared], own, [[zero], [zero]], settings)
        >>> after, errors[0]  # the mean of .5 and .3 was sent
        (tensor([[0.6000, 1.0000]]), [tensor([[0.0000, 0.0500]])])
    """
    step = reference_step(shared, _movements(shared, own), errors, _codec(settings))
    return step.parameters, _decayed(step.momenta, settings)


def local_round_over_relay(
    shared: Sequence[Tensor],
    own: Sequence[Sequence[Tensor]],
    errors: Sequence[Sequence[Tensor]],
    kept_back: Sequence[Tensor],
    settings: dict[str, Any],
) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
    """Returns weights, errors, and what owners keep back [P], which decays from round to round as the errors do.

    Examples:
        >>> import torch
        >>> settings = dict(error_decay=0.5, outer_lr=1.0, alpha=1.0, top_k=4, relay_top_k=1, chunk=2,
        ...                 transform="identity", reduction="mean", values="float32")
        >>> shared, zero = torch.tensor([[1.0, 1.0]]), torch.zeros(1, 2)
        >>> own, stale = [[torch.tensor([[0.5, 0.75]])]], [torch.tensor([[0.0, 1.0]])]
        >>> (after,), _, (kept,) = local_round_over_relay([shared], own, [[zero]], stale, settings)
        >>> after, kept  # .5 1 + .25 is the stronger one, and was sent
        (tensor([[1.0000, 0.2500]]), tensor([[0.5000, 0.0000]]))
    """
    stale = [settings["error_decay"] * each for each in kept_back]
    step = relay_step(shared, _movements(shared, own), errors, stale, _codec(settings))
    return step.parameters, _decayed(step.momenta, settings), step.kept_back


def _codec(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings under which a movement is a gradient, and the error a momentum."""
    fixed = {"gradient_scale": "sum", "chunking": "padded", "update": "sgd", "weight_decay": 0.0, "maximize": False}
    return {**settings, "lr": settings["outer_lr"], "momentum": 1.0, **fixed}


def _movements(shared: Sequence[Tensor], own: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[x - w for x, w in zip(shared, weights, strict=True)] for weights in own]


def _decayed(errors: Sequence[Sequence[Tensor]], settings: dict[str, Any]) -> list[list[Tensor]]:
    return [[settings["error_decay"] * error for error in of_rank] for of_rank in errors]
