"""The codec, and the hyper-parameters of a parameter group: names, allowed values, and errors for everything else."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Annotated, Any, get_type_hints

import torch

from demopt.core.aggregate import REDUCTIONS
from demopt.core.chunking import CHUNKINGS
from demopt.core.rules import Rule, rule_of
from demopt.core.transform import TRANSFORMS
from demopt.validation import check_choice, check_count, check_number, check_yes_or_no, suggestion
from demopt.wire.bits import index_code
from demopt.wire.quantizers import QUANTIZERS

GRADIENT_SCALES = ("ema", "lr")  # for DeMo; LocalDeMo's error has "sum"

#: Hyper-parameters that determine the shape or meaning of the momentum, and so cannot change once a group exists.
FIXED = ("chunk", "transform", "chunking")
#: Those that determine the layout of messages, the state that is kept, or the route.
LAYOUT = (*FIXED, "top_k", "values", "exact", "update", "clip_to_median")

IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")  # of torch's optimizers; they change no result
#: Hints for arguments of other optimizers, by the name of ours.
_ABSENT = {
    "DeMo": {
        "route": "; it always has gather: leave it out",
        **dict.fromkeys(("betas", "eps"), "; give momentum_decay, and update=demopt.AdamW(beta2=..., eps=...)"),
        **dict.fromkeys(IMPLEMENTATIONS, "; leave it out"),
    },
    "LocalDeMo": {
        "alpha": "; all that was sent leaves the error: leave it out",
        **dict.fromkeys(("lr", "betas", "eps", "weight_decay", *IMPLEMENTATIONS), "; give it to the inner optimizer"),
    },
}


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Rarely changed settings of how coefficients become a message and an update; not `top_k`, which optimizers take.

    Args:
        chunk: side of the chunks.
        transform: "dct" or "identity".
        values: encoding of the values in messages: integers with one scale per chunk, "sign" (+-1) or "2-bit" (+-1,
            +-2); or floats, "float32" or "float64".
        reduction: the divisor of a coefficient's sum: "senders" (the ranks that sent it) or "mean" (all ranks). None:
            "senders"; for the signs of all coefficients always the mean.
        exact: whether decoding runs in integers, which give the same bits on different hardware; None: if values and
            dtype allow it.
        clip_to_median: bounds the harm of hostile peers: scales down chunks larger than the median rank's, and, with
            three ranks or more, leaves out messages whose signs do not agree with the others'. None: only in a folder,
            where workers come uninvited.
        kernels: "auto" (compiled kernels on CPUs) or "torch" (torch operations only). Ranks may differ in it.

    Examples:
        >>> import demopt
        >>> codec = demopt.Codec(chunk=32, values="2-bit")
        >>> optimizer = demopt.DeMo(torch.nn.Linear(8, 2).parameters(), codec=codec)
        >>> optimizer.param_groups[0]["chunk"], optimizer.param_groups[0]["reduction"]
        (32, 'senders')
    """

    chunk: int = 64
    transform: str = "dct"
    values: str = "sign"
    reduction: str | None = None
    exact: bool | None = None
    clip_to_median: bool | None = None
    kernels: str = "auto"

    def hyperparameters(self, top_k: int | None = 1, clips: bool = False) -> dict[str, Any]:
        """Returns the settings as parameter groups hold them, without kernels; `clips`: clip_to_median's default."""
        usual = {"reduction": "mean" if top_k is None else "senders", "clip_to_median": clips, "exact": None}
        return {k: usual.get(k) if value is None else value for k, value in vars(self).items() if k != "kernels"}


def codec_of(optimizer: type, given: Mapping[str, Any], codec: Any) -> Codec:
    """Returns the codec with the settings that an optimizer got as its own arguments; TypeError for unknown ones."""
    names = [entry.name for entry in fields(Codec)]
    given = {n: v for n, v in given.items() if n not in IMPLEMENTATIONS or not (v is None or v is False)}
    for name in given:
        if name not in names:
            hint = _ABSENT[optimizer.__name__].get(name) or suggestion(
                name, [*inspect.signature(optimizer).parameters, *names]
            )
            raise TypeError(f"{optimizer.__name__} has no argument {name!r}{hint}")
    if not isinstance(codec, Codec):
        raise TypeError(f"codec is {codec!r}; give a demopt.Codec, such as demopt.Codec(chunk=32)")
    return replace(codec, **given)


@dataclass(frozen=True)
class Hyperparameters:
    """The checked hyper-parameters of one parameter group, each with its check; `DeMo` describes them."""

    lr: Annotated[float, check_number]
    momentum_decay: Annotated[float, lambda _, value: value]  # `of` checks it: only LocalDeMo's error may have 1
    alpha: Annotated[float, partial(check_number, high=1.0, open_low=True, closed_high=True)]
    weight_decay: Annotated[float, check_number]
    top_k: Annotated[int | None, lambda name, value: None if value is None else check_count(name, value)]
    chunk: Annotated[int, check_count]
    update: Annotated[Rule, lambda _, value: rule_of(value)]
    transform: Annotated[str, partial(check_choice, known=TRANSFORMS)]
    reduction: Annotated[str, partial(check_choice, known=REDUCTIONS)]
    values: Annotated[str, partial(check_choice, known=QUANTIZERS)]
    gradient_scale: Annotated[str, partial(check_choice, known=(*GRADIENT_SCALES, "sum"))]  # see `momentum_is_error`
    chunking: Annotated[str, partial(check_choice, known=CHUNKINGS)]
    exact: Annotated[bool | None, lambda name, value: None if value is None else check_yes_or_no(name, value)]
    clip_to_median: Annotated[bool, check_yes_or_no]
    maximize: Annotated[bool, check_yes_or_no]

    @staticmethod
    def of(group: Mapping[str, Any]) -> "Hyperparameters":
        """Reads a parameter group; ValueError or TypeError if a value is not allowed."""
        found = {name: _CHECKS[name](name, value) for name, value in group.items() if name in NAMES}
        decay, is_error = group.get("momentum_decay"), found.get("gradient_scale") == "sum"
        found["momentum_decay"] = check_number("momentum_decay", decay, high=1.0, closed_high=is_error)
        made = Hyperparameters(**found)
        top_k, chunk, values = made.top_k, made.chunk, made.values
        if top_k is None and values != "sign":
            raise ValueError(f"top_k=None sends the signs of all coefficients; values is {values!r}")
        if top_k is not None and top_k > chunk * chunk:
            raise ValueError(f"top_k is {top_k}, but a {chunk} x {chunk} chunk has {chunk * chunk} coefficients")
        if made.exact and not QUANTIZERS[values].largest_level:
            raise ValueError(f"exact=True needs integers on the wire: values 'sign' or '2-bit', not {values!r}")
        return made

    @cached_property
    def momentum_is_error(self) -> bool:
        """Whether the momentum is LocalDeMo's error: pseudo-gradients enter it whole, and it decays after a round."""
        return self.gradient_scale == "sum"

    @cached_property
    def texts(self) -> dict[str, str]:
        """The values as texts, equal on ranks with equal values: 1 and 1.0 give the same, as do a rule and its name."""
        return {name: repr(getattr(self, name)) for name in NAMES} | {"update": str(self.update)}

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Whether decoding runs in integers: if it can, and `exact` is not False."""
        if dtype == torch.float64 and self.exact:
            raise ValueError("exact=True computes in float32; use exact=None or False for float64 parameters")
        return dtype != torch.float64 and bool(QUANTIZERS[self.values].largest_level) and self.exact is not False

    def keep_count(self, length: int) -> int:
        """Returns K for a chunk of `length` elements (docs/algorithm.md#chunks-and-k)."""
        if self.top_k is None:
            return length
        if self.chunking == "divisor":
            return min(self.top_k, length)
        keep = min(length, max(1, math.floor(self.top_k * length / self.chunk**2 + 0.5)))
        value_bits = QUANTIZERS[self.values].bits
        return length if index_code(keep, length).bits + keep * value_bits >= length * value_bits else keep


_CHECKS = {n: hint.__metadata__[0] for n, hint in get_type_hints(Hyperparameters, include_extras=True).items()}
NAMES = tuple(_CHECKS)


def check_names(group: Mapping[str, Any]) -> None:
    """Raises TypeError if a user's parameter group has a key that is not a hyper-parameter."""
    for name in group:
        if name in ("fingerprint_every", "kernels", "process_group"):
            raise TypeError(f"a parameter group of DeMo has no {name!r}, which holds for all: give it to DeMo itself")
        if name not in NAMES and name not in ("params", "param_names", "name", "initial_lr"):
            hint = suggestion(name, NAMES) or f"; known are {', '.join(NAMES)}"
            raise TypeError(f"a parameter group of DeMo has no {name!r}{hint}")


def plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group as checkpoints hold it: its update rule as text, and no scalars of numpy."""
    found = without_numpy(group)
    return {**found, "update": str(rule_of(group["update"]))} if "update" in group else found


def without_numpy(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group with plain numbers for scalars of numpy, which torch does not read with `weights_only`.

    Replaces arrays without dimensions, too, and elements of tuples and lists, such as `betas`.
    """

    def plainly(value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(plainly, value))
        return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value

    return {name: value if name == "params" else plainly(value) for name, value in group.items()}
