"""The reference step, driven beside a real optimizer: all its ranks at once, settings read live from param groups."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from demopt.core.rules import Lion, Signum, rule_of
from oracles import reference

_LARGEST = reference.largest


class Oracle:
    """Parameters of one model and momenta [W][P] of all ranks, stepped by `reference.step` in `dtype`.

    `aggregates` [P] holds the last step's U. `undecided` [P] marks where the value whose sign the rule takes was, at
    some step so far, too small for its sign to mean anything: at most `zero` times the parameter's largest. `gap` is
    the smallest difference so far between the weakest coefficient sent and the strongest not sent, relative to the
    chunk's largest: where it is almost zero, either may rightly be sent. Some padded chunks have such ties whatever
    the gradient.
    """

    def __init__(self, groups: list[Any], world_size: int, dtype: torch.dtype = torch.float64, zero: float = 1e-11):
        self.groups: list[dict[str, Any]] = []
        self.zero, self.dtype, self.gap = zero, dtype, float("inf")
        self.parameters: list[Tensor] = []
        self.momenta: list[list[Tensor]] = [[] for _ in range(world_size)]
        self.aggregates: list[Tensor] = []
        self.rule_state: list[reference.RuleState] = []
        self.undecided: list[Tensor] = []
        for group in groups:
            self.add(group)

    def add(self, group: dict[str, Any]) -> None:
        self.groups.append(group)
        for parameter in group["params"]:
            self.parameters.append(parameter.detach().clone())
            self.aggregates.append(torch.zeros_like(parameter))
            self.rule_state.append({})
            self.undecided.append(torch.zeros(parameter.shape, dtype=torch.bool))
            for of_rank in self.momenta:
                of_rank.append(reference.zero_momentum(parameter, group, self.dtype))

    def step(self, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        """Takes `gradients[w][p]` over all groups' parameters in order; frozen parameters do not change."""
        with mock.patch.object(reference, "largest", self._watched):
            for n, (parameter, group) in enumerate(self._settings()):
                if parameter.requires_grad:
                    of_ranks = [of_rank[n] for of_rank in gradients], [of_rank[n] for of_rank in self.momenta]
                    after = reference.step(self.parameters[n], *of_ranks, group, self.rule_state[n])
                    self.parameters[n], momenta, self.aggregates[n], rule_state = after
                    self._note_undecided(n, group)
                    self.rule_state[n] = rule_state
                    for of_rank, momentum in zip(self.momenta, momenta, strict=True):
                        of_rank[n] = momentum

    def fail(self, gradients: Sequence[Sequence[Tensor | None]], poisoned: int | None = None) -> None:
        """A step that is not applied; the gradients of rank `poisoned` are not finite, and never enter its momenta."""
        for rank, of_rank in enumerate(self.momenta):
            for n, (parameter, group) in enumerate(self._settings()):
                if rank != poisoned and parameter.requires_grad:
                    of_rank[n] = reference.accumulate(of_rank[n], gradients[rank][n], group)

    def _settings(self) -> list[tuple[Tensor, dict[str, Any]]]:
        return [(parameter, group) for group in self.groups for parameter in group["params"]]

    def _watched(self, coefficients: list[float], K: int, codec: str) -> reference.Coefficients:
        magnitudes = sorted(map(abs, coefficients), reverse=True)
        if len(magnitudes) > K and magnitudes[K - 1] > 0:
            self.gap = min(self.gap, (magnitudes[K - 1] - magnitudes[K]) / magnitudes[0])
        return _LARGEST(coefficients, K, codec)

    def _note_undecided(self, number: int, group: dict[str, Any]) -> None:
        rule = rule_of(group["update"])
        if not isinstance(rule, Signum | Lion):
            return
        signed = self.aggregates[number]
        if isinstance(rule, Lion) and self.rule_state[number]:
            signed = rule.beta1 * self.rule_state[number]["V"] + (1 - rule.beta1) * signed
        magnitude = signed.abs()
        if magnitude.numel():
            self.undecided[number] |= magnitude <= self.zero * magnitude.max()


def dense(momentum_CN: Tensor, parameter: Tensor, settings: reference.Settings) -> Tensor:
    """Turns an optimizer's momentum [chunks, N], in the transform domain, into the oracle's: dense, float64, padded."""
    matrix = reference.zero_momentum(parameter, settings)
    r, c = reference.chunk_shape(parameter.shape, settings)
    rows, columns = (reference.basis(settings["transform"], n) for n in (r, c))
    chunks = [(top, left) for top in range(0, matrix.shape[0], r) for left in range(0, matrix.shape[1], c)]
    for (top, left), coefficients in zip(chunks if matrix.numel() else [], momentum_CN.double(), strict=True):
        matrix[top : top + r, left : left + c] = rows.T @ coefficients.view(r, c) @ columns
    return matrix
