"""Update rules: turn the decoded update U into the direction phi(U) that is applied (arXiv 2411.19870 v2, section 3).

U is the same on every rank, and so is all that a rule computes from it and keeps: rules need no communication.
Elementwise rules use only additions, multiplications, divisions and square roots, one operation per pass over a tensor,
each correctly rounded: where U is the same on different hardware, so is phi(U) (docs/exact.md).

Shapes: C chunks of r rows and c columns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from demopt.core.orthogonal import orthogonal

#: (U, a spare tensor shaped like it, the rule's state by name, the hyper-parameters by name) -> phi(U). A rule may
#: overwrite U and the spare, and updates its state in place. U is [C, r, c]; for rules that need a whole matrix it is
#: [R, S], without a spare.
Phi: TypeAlias = Callable[[Tensor, Tensor, Mapping[str, Tensor], Mapping[str, Any]], Tensor]


@dataclass(frozen=True)
class Rule:
    """An update rule: phi, the names of its state (initially zeros), and whether it needs a parameter's whole matrix.

    `moments` have the shape of U; `weights` have one number per chunk, [C, 1, 1].

    Example:
        >>> RULES["adamw"].state_names, RULES["signum"].state_names
        (('exp_avg_sq', 'exp_avg_sq_weight'), ())
    """

    phi: Phi
    moments: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    whole: bool = False
    signs_only: bool = False  #: phi(U) is the sign of U, and nothing is kept

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of all of its state."""
        return self.moments + self.weights


def sign(update_Crc: Tensor, sent_C: Tensor | None = None) -> Tensor:
    """Replaces U by its sign, in place.

    The sign of zero is zero, as in the published code. With `sent_C` (bool [C]: some rank sent a nonzero value
    for the chunk), zero is a tie, which integers do reach, and counts as +1, except in chunks that are not sent, which
    stay zero: so each sign fits in one bit.

    Example:
        >>> sign(torch.tensor([[[0.5, 0.0, -2.0]]])), sign(torch.tensor([[[0.5, 0.0, -2.0]]]), torch.tensor([True]))
        (tensor([[[ 1.,  0., -1.]]]), tensor([[[ 1.,  1., -1.]]]))
    """
    if sent_C is None:
        return update_Crc.sign_()
    # adding +0 first turns -0 into +0, whose sign is +1
    torch.copysign(update_Crc.new_ones(()), update_Crc.add_(0.0), out=update_Crc)
    return update_Crc.mul_(sent_C.view(-1, 1, 1))


def sgd(update: Tensor, spare: Tensor, state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Tensor:
    """phi(U) = U: each rank already has its own momentum.

    Example:
        >>> sgd(torch.tensor([3.0]), torch.empty(1), {}, {})
        tensor([3.])
    """
    del spare, state, settings
    return update


def nesterov(update: Tensor, spare: Tensor, state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Tensor:
    """V <- beta1 V + U, phi = U + beta1 V: a second momentum, of the decoded update, with look-ahead.

    Source: Sutskever et al. 2013, as `torch.optim.SGD(nesterov=True)` writes it.

    Example:
        >>> state = {"velocity": torch.tensor([2.0])}
        >>> nesterov(torch.tensor([1.0]), torch.empty(1), state, {"beta1": 0.5}), state["velocity"]
        (tensor([2.]), tensor([2.]))
    """
    velocity, beta = state["velocity"], float(settings["beta1"])
    velocity.mul_(beta).add_(update)
    return update.add_(torch.mul(velocity, beta, out=spare))


def signum(update: Tensor, spare: Tensor, state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Tensor:
    """phi(U) = sign(U).

    Example:
        >>> signum(torch.tensor([3.0, -0.1]), torch.empty(2), {}, {})
        tensor([ 1., -1.])
    """
    del spare, state, settings
    return sign(update)


def lion(update: Tensor, spare: Tensor, state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Tensor:
    """phi = sign(beta1 V + (1 - beta1) U), then V <- beta2 V + (1 - beta2) U.

    Source: Chen et al., arXiv 2302.06675, algorithm 2. The sign of zero is zero.

    Example:
        >>> state, settings = {"exp_avg": torch.tensor([1.0, 0.0])}, {"beta1": 0.5, "beta2": 0.75}
        >>> lion(torch.tensor([-0.5, -4.0]), torch.empty(2), state, settings), state["exp_avg"]
        (tensor([ 1., -1.]), tensor([ 0.6250, -1.0000]))
    """
    average, beta = state["exp_avg"], float(settings["beta1"])
    torch.mul(average, beta, out=spare)
    _mix(average, update, float(settings["beta2"]))
    return update.mul_(1 - beta).add_(spare).sign_()


def adamw(update: Tensor, spare: Tensor, state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Tensor:
    """V <- beta2 V + (1 - beta2) U^2, phi = U / (sqrt(V / w) + eps), with the bias correction w = 1 - beta2^t.

    The first moment is the ranks' own momentum. w is stored with V, as the sum of V's weights: it then counts the t
    updates of these chunks alone, without skipped rounds and steps while they were frozen, and needs no power function,
    which different hardware rounds differently.

    Source: Kingma and Ba, arXiv 1412.6980; arXiv 2411.19870 v2 leaves the second moment of U open.

    Example:
        >>> state = {"exp_avg_sq": torch.zeros(1, 1, 2), "exp_avg_sq_weight": torch.zeros(1, 1, 1)}
        >>> adamw(torch.tensor([[[0.25, -4.0]]]), torch.empty(1, 1, 2), state, {"beta2": 0.75, "eps": 1e-8})
        tensor([[[ 1., -1.]]])
        >>> state["exp_avg_sq"], state["exp_avg_sq_weight"].item()
        (tensor([[[0.0156, 4.0000]]]), 0.25)
    """
    square, weight, beta = state["exp_avg_sq"], state["exp_avg_sq_weight"], float(settings["beta2"])
    _mix(square, torch.mul(update, update, out=spare), beta)
    weight.mul_(beta).add_(1 - beta)
    torch.div(square, weight, out=spare)
    return update.div_(spare.sqrt_().add_(float(settings["eps"])))


def muon(update_RS: Tensor, spare: Tensor, state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Tensor:
    """phi(U) = 0.2 sqrt(max(R, S)) times U orthogonalised: its RMS is about 0.2, as with Adam.

    `torch.optim.Muon` calls this scale `adjust_lr_fn="match_rms_adamw"`. Its matrix products are not exact, see
    docs/exact.md.

    Source: Liu et al., arXiv 2502.16982, equation 4.

    Example:
        >>> muon(torch.randn(64, 16), torch.empty(0), {}, {}).square().mean().sqrt().round(decimals=1)
        tensor(0.2000)
    """
    del spare, state, settings
    return orthogonal(update_RS).mul_(0.2 * max(update_RS.shape) ** 0.5)


def _mix(average: Tensor, new: Tensor, beta: float) -> None:
    """average <- beta average + (1 - beta) new, in place, without a temporary or a fused multiply-add.

    `add_(new, alpha=...)` is fused on some hardware and rounded twice on other hardware.
    """
    average.mul_(beta / (1 - beta)).add_(new).mul_(1 - beta)


RULES: dict[str, Rule] = {
    "sgd": Rule(sgd),
    "nesterov": Rule(nesterov, moments=("velocity",)),
    "signum": Rule(signum, signs_only=True),
    "lion": Rule(lion, moments=("exp_avg",)),
    "muon": Rule(muon, whole=True),
    "adamw": Rule(adamw, moments=("exp_avg_sq",), weights=("exp_avg_sq_weight",)),
}

UPDATES = tuple(RULES)

#: The names of the state of all rules.
RULE_STATE = tuple(name for rule in RULES.values() for name in rule.state_names)
