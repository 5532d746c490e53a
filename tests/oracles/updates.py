"""The update rules, slow and literal: the oracles for tests of `core/update.py`.

Each follows its paper line by line, on a parameter's whole U and in U's dtype, and ignores memory, blocks and the
order of operations.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from demopt.core.rules import AdamW, Lion, Muon, Nesterov, Signum, rule_of

#: A rule's state of a parameter: tensors shaped like U, and the number of updates; initially empty.
RuleState: TypeAlias = dict[str, Any]


def phi(U: Tensor, settings: Mapping[str, Any], rule_state: RuleState) -> tuple[Tensor, RuleState]:
    """Returns the direction phi(U) and the rule's state for the next one.

    Examples:
        >>> phi(torch.tensor([1.0]), {"update": "nesterov(beta=0.5)"}, {"V": torch.tensor([2.0])})
        (tensor([2.]), {'V': tensor([2.])})
    """
    rule, V = rule_of(settings["update"]), rule_state.get("V", torch.zeros_like(U))
    if isinstance(rule, Signum):  # arXiv 2411.19870, section 3
        return U.sign(), {}
    if isinstance(rule, Nesterov):
        V = rule.beta * V + U
        return U + rule.beta * V, {"V": V}
    if isinstance(rule, Lion):  # arXiv 2302.06675, algorithm 2
        b1, b2 = rule.beta1, rule.beta2
        return (b1 * V + (1 - b1) * U).sign(), {"V": b2 * V + (1 - b2) * U}
    if isinstance(rule, AdamW):  # arXiv 1412.6980, algorithm 1, with U in the place of the bias-corrected first moment
        b2, t = rule.beta2, rule_state.get("t", 0) + 1
        V = b2 * V + (1 - b2) * U**2
        corrected = V / (1 - b2**t)
        return U / (corrected.sqrt() + rule.eps), {"V": V, "t": t}
    if isinstance(rule, Muon):  # arXiv 2502.16982, equations 2 and 4
        return 0.2 * max(U.shape) ** 0.5 * newton_schulz(U), {}
    if rule.name == "sgd":
        return U, {}
    raise ValueError(f"there is no literal update {rule}")


def newton_schulz(U: Tensor) -> Tensor:
    """Does five steps X <- a X + b (X X^T) X + c (X X^T)^2 X from U / |U|.

    Examples:
        >>> newton_schulz(torch.eye(2, dtype=torch.float64)).diagonal().round(decimals=2)
        tensor([1.1100, 1.1100], dtype=torch.float64)
    """
    norm = U.square().sum().sqrt()
    X = U / norm if norm > 0 else U
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X - 4.7750 * A @ X + 2.0315 * A @ A @ X
    return X
