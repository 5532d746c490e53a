"""Update rules: turn the decoded update U into the direction phi(U) that is applied (arXiv 2411.19870 v2, section 3).

U is the same on every rank, and so is the state that a rule computes from it: rules need no communication.
Elementwise rules use only additions, multiplications, divisions and square roots, one operation per pass over a tensor,
each correctly rounded: where U is the same on different hardware, so is phi(U) (docs/algorithm.md).

A parameter group holds its rule as a text, such as "lion" or "lion(beta1=0.5, beta2=0.99)": checkpoints then load with
`weights_only=True`, and equal rules are equal texts. `rule_of` reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from demopt.core.rounding import without_autocast
from demopt.validation import check_number, suggestion

#: (a, b, c) of x -> a x + b x^3 + c x^5. Five iterations take every singular value in (0.01, 1] to between 0.7 and
#: 1.2: not to 1, but fast. Source: Keller Jordan et al., "Muon", https://kellerjordan.github.io/posts/muon/, 2024.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_LARGEST = 1e16  # limit of elements whose squares AdamW averages: an infinite average would stay infinite


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An update rule with its settings. `str` writes it as parameter groups hold it.

    `moments` (shaped like U) and `weights` (one number per chunk, [C, 1, 1]) name the state that it keeps, initially
    zeros. `whole_matrix`: it needs a parameter's whole matrix and multiplies matrices, so its bits depend on the
    hardware, which all ranks need alike. `signs_only`: phi(U) is the sign of U, so it needs only the signs of U.

    Raises:
        ValueError, TypeError: a setting is not a number, or outside its limits: betas in [0, 1), eps >= 1e-30.

    Examples:
        >>> AdamW.moments, AdamW.weights, Signum.moments
        (('exp_avg_sq',), ('exp_avg_sq_weight',), ())
        >>> str(Lion()), str(Lion(beta1=0.5))
        ('lion', 'lion(beta1=0.5, beta2=0.99)')
    """

    name: ClassVar[str]
    moments: ClassVar[tuple[str, ...]] = ()
    weights: ClassVar[tuple[str, ...]] = ()
    whole_matrix: ClassVar[bool] = False
    signs_only: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__.lower()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            # a smaller eps vanishes in float32
            limits: dict[str, Any] = {"low": 1e-30} if name == "eps" else {"high": 1.0}
            object.__setattr__(self, name, check_number(f"{name} of {type(self).__name__}", value, **limits))

    def __str__(self) -> str:
        return self.name if self == type(self)() else repr(self).lower()

    def __call__(self, update: Tensor, spare: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Returns phi(U) of U [C, r, c], or matrices [..., R, S]; may overwrite U and the spare, shaped like it."""
        return update


def sign(update_Crc: Tensor, sent_C: Tensor | None = None) -> Tensor:
    """Replaces U by its sign, in place.

    The sign of zero is zero, as in the published code. Sums of integers do reach zero: with `sent_C` (bool [C], whether
    some rank sent a nonzero value for the chunk) such a tie counts as +1, so each sign fits in one bit. Chunks that are
    not sent stay zero. No zero of U may then be negative.

    Examples:
        >>> sign(torch.tensor([[[0.5, 0.0, -2.0]]])), sign(torch.tensor([[[0.5, 0.0, -2.0]]]), torch.tensor([True]))
        (tensor([[[ 1.,  0., -1.]]]), tensor([[[ 1.,  1., -1.]]]))
    """
    if sent_C is None:
        return update_Crc.sign_()
    return torch.copysign(sent_C.view(-1, 1, 1), update_Crc, out=update_Crc)


@dataclass(frozen=True, kw_only=True)
class SGD(Rule):
    """phi(U) = U: each rank already has a momentum. No state.

    Examples:
        >>> SGD()(torch.tensor([3.0]), torch.empty(1), {})
        tensor([3.])
    """


@dataclass(frozen=True, kw_only=True)
class Nesterov(Rule):
    """V <- beta V + U, phi = U + beta V: a second momentum, of the decoded update, with look-ahead.

    Source: Sutskever et al. 2013, as `torch.optim.SGD(nesterov=True)` writes it.

    Examples:
        >>> state = {"velocity": torch.tensor([2.0])}
        >>> Nesterov(beta=0.5)(torch.tensor([1.0]), torch.empty(1), state), state["velocity"]
        (tensor([2.]), tensor([2.]))
    """

    moments = ("velocity",)

    beta: float = 0.9

    def __call__(self, update: Tensor, spare: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        velocity = state["velocity"]
        velocity.mul_(self.beta).add_(update)
        return update.add_(torch.mul(velocity, self.beta, out=spare))


@dataclass(frozen=True, kw_only=True)
class Signum(Rule):
    """phi(U) = sign(U). No state.

    Examples:
        >>> Signum()(torch.tensor([3.0, -0.1]), torch.empty(2), {})
        tensor([ 1., -1.])
    """

    signs_only = True

    def __call__(self, update: Tensor, spare: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return sign(update)


@dataclass(frozen=True, kw_only=True)
class Lion(Rule):
    """phi = sign(beta1 V + (1 - beta1) U), then V <- beta2 V + (1 - beta2) U.

    Source: Chen et al., arXiv 2302.06675, algorithm 2. The sign of zero is zero.

    Examples:
        >>> rule, state = Lion(beta1=0.5, beta2=0.75), {"exp_avg": torch.tensor([1.0, 0.0])}
        >>> rule(torch.tensor([-0.5, -4.0]), torch.empty(2), state), state["exp_avg"]
        (tensor([ 1., -1.]), tensor([ 0.6250, -1.0000]))
    """

    moments = ("exp_avg",)

    beta1: float = 0.9
    beta2: float = 0.99

    def __call__(self, update: Tensor, spare: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        average = state["exp_avg"]
        torch.mul(average, self.beta1, out=spare)
        _mix(average, update, self.beta2)
        return update.mul_(1 - self.beta1).add_(spare).sign_()


@dataclass(frozen=True, kw_only=True)
class AdamW(Rule):
    """V <- beta2 V + (1 - beta2) U^2, phi = U / (sqrt(V / w) + eps), with the bias correction w = 1 - beta2^t.

    Not `torch.optim.AdamW`: it has no beta1, since the ranks' momenta are the first moment, and V is the second
    moment of U, not of the ranks' gradients. w is stored with V, as the sum of V's weights: it then counts only the t
    updates of these chunks, not skipped rounds or steps while they were frozen, and needs no power function, which
    different hardware rounds differently.

    Source: Kingma and Ba, arXiv 1412.6980; arXiv 2411.19870 v2 leaves the second moment of U open.

    Examples:
        >>> state = {"exp_avg_sq": torch.zeros(1, 1, 2), "exp_avg_sq_weight": torch.zeros(1, 1, 1)}
        >>> AdamW(beta2=0.75)(torch.tensor([[[0.25, -4.0]]]), torch.empty(1, 1, 2), state)
        tensor([[[ 1., -1.]]])
        >>> state["exp_avg_sq"], state["exp_avg_sq_weight"].item()
        (tensor([[[0.0156, 4.0000]]]), 0.25)
    """

    moments = ("exp_avg_sq",)
    weights = ("exp_avg_sq_weight",)

    beta2: float = 0.99
    eps: float = 1e-8

    def __call__(self, update: Tensor, spare: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        square, weight = state["exp_avg_sq"], state["exp_avg_sq_weight"]
        update.clamp_(-_LARGEST, _LARGEST)
        _mix(square, torch.mul(update, update, out=spare), self.beta2)
        weight.mul_(self.beta2).add_(1 - self.beta2)
        torch.div(square, weight, out=spare)
        return update.div_(spare.sqrt_().add_(self.eps))


@dataclass(frozen=True, kw_only=True)
class Muon(Rule):
    """phi(U) = 0.2 sqrt(max(R, S)) times U orthogonalised: its RMS is about 0.2, as with Adam. No state.

    Matrices [R, S] only; a parameter [E, R, S] is a batch of them.

    `torch.optim.Muon` calls this scale `adjust_lr_fn="match_rms_adamw"`. Its matrix products are not exact, see
    docs/algorithm.md. `demopt.muon_groups` finds the matrices of a model.

    Source: Liu et al., arXiv 2502.16982, equation 4.

    Examples:
        >>> Muon()(torch.randn(64, 16), torch.empty(0), {}).square().mean().sqrt().round(decimals=1)
        tensor(0.2000)
    """

    whole_matrix = True

    def __call__(self, update_RS: Tensor, spare: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return newton_schulz(update_RS).mul_(0.2 * max(update_RS.shape[-2:]) ** 0.5)


def newton_schulz(matrices_RS: Tensor) -> Tensor:
    """Returns U V^T of the singular value decomposition U S V^T, with singular values between 0.7 and 1.2 instead of 1.

    Newton-Schulz iteration of a matrix, or of a batch, in its dtype. Its scale does not matter; zeros stay zeros.
    """
    if not matrices_RS.numel():
        return matrices_RS.clone()
    is_tall, sides = matrices_RS.shape[-2] > matrices_RS.shape[-1], (-2, -1)
    wide = matrices_RS.mT if is_tall else matrices_RS  # for the smaller Gram matrix
    largest: Tensor = torch.linalg.vector_norm(wide, float("inf"), dim=sides, keepdim=True)
    x = wide / largest.clamp_(min=torch.finfo(wide.dtype).tiny)  # first, so that squares do not underflow
    x.div_(torch.linalg.vector_norm(x, dim=sides, keepdim=True).clamp_(min=1.0))
    plus_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    a, b, c = _QUINTIC
    with without_autocast(x.device):
        for _ in range(_STEPS):
            gram = x @ x.mT
            x = plus_product(x, plus_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT.contiguous() if is_tall else x


def _mix(average: Tensor, new: Tensor, beta: float) -> None:
    """average <- beta average + (1 - beta) new, in place. On some hardware, `add_(new, alpha=...)` rounds only once."""
    average.mul_(beta / (1 - beta)).add_(new).mul_(1 - beta)


RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (SGD, Nesterov, Signum, Lion, Muon, AdamW)}

RULE_STATE = tuple(name for rule in RULES.values() for name in rule.moments + rule.weights)
RULE_WEIGHTS = tuple(name for rule in RULES.values() for name in rule.weights)

_ALLOWED = f"choose one of {', '.join(map(repr, RULES))}, or give a rule with settings, such as demopt.Lion(beta1=0.9)"


def rule_of(update: Any) -> Rule:
    """Returns the rule that `update` names or is; a parameter group holds its `str`.

    Raises:
        ValueError: a text that names no rule, or a setting that the rule does not have.
        TypeError: neither a text nor one of the rules.
    """
    if isinstance(update, str):
        return _read(update)
    if type(update) in RULES.values():
        found: Rule = update
        return found
    if isinstance(update, type) and update in RULES.values():
        raise TypeError(f"update is the class {update.__name__}; give an object: demopt.{update.__name__}()")
    raise TypeError(f"update is {update!r}; {_ALLOWED}")


@lru_cache(maxsize=256)
def _read(text: str) -> Rule:
    name, bracket, rest = text.strip().partition("(")
    if name not in RULES or (bracket and not rest.endswith(")")):
        raise ValueError(f"update is {text!r}; {_ALLOWED}{suggestion(name, RULES)}")
    default, parts = RULES[name](), rest.removesuffix(")").split(",")
    try:
        pairs = [part.split("=") for part in (parts if parts != [""] else ())]
        given = {key.strip(): float(value) for key, value in pairs}
        if len(given) < len(pairs) or not given.keys() <= vars(default).keys():
            raise ValueError
    except ValueError:
        raise ValueError(f"update is {text!r}; write its settings as in {repr(default).lower()!r}") from None
    return RULES[name](**given)
