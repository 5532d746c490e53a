"""Route relay, slow and literal: the oracle for tests of `optim/routes/relay.py`.

It differs from the step of `reference.py` (arXiv 2411.19870, section 3) in one place: what is not among the strongest
coefficients of the ranks' aggregate is kept back. The rest is the same: one parameter, one chunk, one rank at a time.
One call steps all ranks.

Shapes: W ranks, P parameters, (R, C) a parameter's matrix padded to whole chunks, N elements in a chunk, K kept.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from oracles import reference
from oracles.reference import Chunk, Coefficients, Settings
from oracles.updates import RuleState


class RelayStep(NamedTuple):
    """The result of one step of route relay on every rank.

    Examples:
        >>> RelayStep(parameters=[], momenta=[[], []], kept_back=[], delivered=[], rule_state=[]).kept_back
        []
    """

    parameters: list[Tensor]  # [P], the same on every rank
    momenta: list[list[Tensor]]  # [W][P], each (R, C)
    kept_back: list[Tensor]  # [P], each (R, C): coefficients that the chunks' owners have not yet sent
    delivered: list[Tensor]  # [P], U, before the update rule
    rule_state: list[RuleState]  # [P], the update rule's state


def relay_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor | None]],
    momenta: Sequence[Sequence[Tensor]],
    kept_back: Sequence[Tensor],
    settings: Settings,
    rule_state: Sequence[RuleState] | None = None,
) -> RelayStep:
    """Does one step of every rank on route relay.

    Follows algorithm 1 up to the aggregate Q of a chunk. Then A <- A + Q; q2 = the K2 largest of A, quantised as in a
    message; A <- A - q2; the update is T^-1(q2). `kept_back[p]` holds A of all chunks of parameter p, as coefficients.

    Examples:
        >>> settings = dict(lr=0.1, momentum=0.0, alpha=1.0, top_k=2, relay_top_k=1, chunk=2, transform="identity",
        ...                 update="sgd", reduction="mean", values="float32", weight_decay=0.0, gradient_scale="ema",
        ...                 chunking="divisor", maximize=False)
        >>> x, g = torch.zeros(2, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> zero = reference.zero_momentum(x, settings)
        >>> step = relay_step([x], [[g]], [[zero]], [zero], settings)
        >>> step.momenta[0][0].tolist(), step.kept_back[0].tolist(), step.delivered[0].tolist()
        ([[1.0, 2.0], [0.0, 0.0]], [[0.0, 0.0], [3.0, 0.0]], [[0.0, 0.0], [0.0, 4.0]])
    """
    after_x: list[Tensor] = []
    after_a: list[Tensor] = []
    delivered: list[Tensor] = []
    after_state: list[RuleState] = []
    after_m: list[list[Tensor]] = [[] for _ in momenta]
    for p, x in enumerate(parameters):
        r, c = reference.chunk_shape(x.shape, settings)
        bases = [reference.basis(settings["transform"], n, momenta[0][p].dtype) for n in (r, c)]
        K = reference.kept_per_chunk(r * c, settings) if x.numel() else 0
        K2 = reference.kept_per_chunk(r * c, {**settings, "top_k": settings["relay_top_k"]}) if x.numel() else 0
        accumulated = [reference.accumulate(m[p], g[p], settings) for m, g in zip(momenta, gradients, strict=True)]
        A, U = kept_back[p].clone(), torch.zeros_like(kept_back[p])
        for chunk in reference.chunks(A, r, c):
            messages = [_send(m, chunk, K, bases, settings) for m in accumulated]
            held = A[chunk].clone().flatten()
            for position, value in reference.reduce(messages, settings["reduction"]).items():
                held[position] += value
            answer = reference.largest(held.tolist(), K2, settings["values"])
            for position, value in answer.items():
                held[position] -= value
            A[chunk] = held.reshape(r, c)
            U[chunk] = reference.inverse(answer, U[chunk], bases)
        delivered.append(reference.unpad(U, x))
        moved, state_after = reference.update(x, delivered[p], settings, rule_state[p] if rule_state else {})
        after_x.append(moved)
        after_state.append(state_after)
        after_a.append(A)
        for of_rank, m in zip(after_m, accumulated, strict=True):
            of_rank.append(m)
    return RelayStep(after_x, after_m, after_a, delivered, after_state)


def _send(momentum: Tensor, chunk: Chunk, K: int, bases: list[Tensor], settings: Settings) -> Coefficients:
    sent = reference.largest(reference.forward(momentum[chunk], bases), K, settings["values"])
    momentum[chunk] -= settings["alpha"] * reference.inverse(sent, momentum[chunk], bases)
    return sent
