"""A round of LocalDeMo, slow and literal: the oracle for `demopt.LocalDeMo`.

Each rank has moved from the global weights by local steps. Its pseudo-gradient goes through the algorithm of
`reference_step` with the error as its momentum (e <- e + T(D), the sent part leaves e), the global weights move by the
mean, and errors decay (e <- b e).

Shapes: W ranks, P parameters.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from oracles.reference import reference_step


def local_round(
    global_weights: Sequence[Tensor],
    local_weights: Sequence[Sequence[Tensor]],
    errors: Sequence[Sequence[Tensor]],
    settings: dict[str, Any],
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Returns the global weights [P] and the errors [W][P] after a round of ranks with `local_weights` [W][P].

    `settings` has error_decay, outer_lr, top_k, chunk, transform, reduction and values, as LocalDeMo has them.

    Examples:
        >>> import torch
        >>> settings = dict(error_decay=0.5, outer_lr=1.0, top_k=1, chunk=2, transform="identity",
        ...                 reduction="senders", values="float32")
        >>> before, zero = torch.tensor([[1.0, 1.0]]), torch.zeros(1, 2)
        >>> local_weights = [[torch.tensor([[0.5, 0.9]])], [torch.tensor([[0.7, 1.0]])]]
        >>> (after,), errors = local_round([before], local_weights, [[zero], [zero]], settings)
        >>> after, errors[0]  # the mean of .5 and .3 was sent
        (tensor([[0.6000, 1.0000]]), [tensor([[0.0000, 0.0500]])])
    """
    as_demo = {**settings, "lr": settings["outer_lr"], "momentum_decay": 1.0, "alpha": 1.0, "gradient_scale": "sum"}
    as_demo |= {"chunking": "padded", "update": "sgd", "weight_decay": 0.0, "maximize": False}
    pseudo_gradients = [[start - end for start, end in zip(global_weights, own, strict=True)] for own in local_weights]
    step = reference_step(global_weights, pseudo_gradients, errors, as_demo)
    return step.parameters, [[settings["error_decay"] * error for error in of_rank] for of_rank in step.momenta]
