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


def local_round(
    shared: Sequence[Tensor],
    own: Sequence[Sequence[Tensor]],
    errors: Sequence[Sequence[Tensor]],
    settings: dict[str, Any],
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Returns the shared weights [P] and the errors [W][P] after a round of ranks with weights `own` [W][P].

    `settings` has error_decay, outer_lr, alpha, top_k, chunk, transform, reduction and values, as LocalDeMo has them.

    Example:
        >>> import torch
        >>> settings = dict(error_decay=0.5, outer_lr=1.0, alpha=1.0, top_k=1, chunk=2, transform="identity",
        ...                 reduction="senders", values="float32")
        >>> shared, zero = torch.tensor([[1.0, 1.0]]), torch.zeros(1, 2)
        >>> own = [[torch.tensor([[0.5, 0.9]])], [torch.tensor([[0.7, 1.0]])]]
        >>> (after,), errors = local_round([shared], own, [[zero], [zero]], settings)
        >>> after, errors[0]  # the mean of .5 and .3 was sent
        (tensor([[0.6000, 1.0000]]), [tensor([[0.0000, 0.0500]])])
    """
    group = {
        **settings,
        "lr": settings["outer_lr"],
        "momentum": 1.0,
        "gradient_scale": "sum",
        "chunking": "padded",
        "update": "sgd",
        "weight_decay": 0.0,
        "maximize": False,
    }
    movements = [[x - w for x, w in zip(shared, weights, strict=True)] for weights in own]
    step = reference_step(shared, movements, errors, group)
    return step.parameters, [[settings["error_decay"] * e for e in errors] for errors in step.momenta]
