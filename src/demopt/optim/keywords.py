"""Answers to keywords that DeMo and LocalDeMo do not have: what the name means elsewhere, and what to give instead."""

from collections.abc import Collection, Mapping
from typing import Any

from demopt.core.names import suggestion

#: Switches of torch's optimizers for a way to compute. Off is how DeMo works, so frameworks may pass them off.
SWITCHES = ("fused", "foreach", "capturable", "differentiable", "amsgrad")

#: Arguments of DeMo that hold for all parameter groups.
COMMON = ("route", "fingerprint_every", "overlap", "delay", "kernels", "process_group")

_RULES = "settings of an update rule are given with it"
#: Answers to keywords that DeMo does not have.
ANSWERS = {
    "betas": "momentum=... is the decay of its momentum; update=demopt.AdamW(beta2=...) has a second moment, and "
    "demopt.Lion(beta1=..., beta2=...) both betas of Lion; see docs/migrate.md",
    "beta": f"{_RULES}: update=demopt.Nesterov(beta=...)",
    "beta1": f"{_RULES}: update=demopt.Lion(beta1=...) or demopt.Nesterov(beta=...); the decay of DeMo's momentum is "
    "momentum=...",
    "beta2": f"{_RULES}: update=demopt.AdamW(beta2=...) or demopt.Lion(beta2=...)",
    "eps": f"{_RULES}: update=demopt.AdamW(eps=...)",
    "nesterov": "give update=demopt.Nesterov(beta=...)",
    "ns_steps": "update='muon' always takes five Newton-Schulz steps",
    "ns_coefficients": "update='muon' has the coefficients of torch.optim.Muon",
    "adjust_lr_fn": "update='muon' always scales as torch.optim.Muon does with 'match_rms_adamw'",
    "dampening": "gradient_scale='ema', the default, is a dampening of `momentum`",
    "amsgrad": "no update rule keeps a maximum; leave amsgrad out",
    "decoupled_weight_decay": "its weight decay is always decoupled; leave decoupled_weight_decay out",
    "fused": "it takes its compiled kernels by itself where they fit; leave fused out",
    "foreach": "it always works on many parameters at once; leave foreach out",
    "capturable": "its step exchanges messages and reads values on the host, which a CUDA graph cannot; leave "
    "capturable out",
    "differentiable": "its steps cannot be differentiated; leave differentiable out",
    "learning_rate": "give lr=...",
    "topk": "give top_k=...",
    "k": "give top_k=...",
    "compression_topk": "give top_k=...",
    "compression_chunk": "give chunk=...",
    "compression_decay": "give momentum=...; demopt.V1 has the published settings",
    "device_mesh": "give process_group=..., which also takes a DeviceMesh",
    "mesh": "give process_group=..., which also takes a DeviceMesh",
    "world_size": "give process_group=..., or none for all ranks of torch.distributed",
}


_INNER = "give it to the inner optimizer, as in LocalDeMo(torch.optim.AdamW(parameters, lr=...))"
_SAME = ("topk", "k", "compression_topk", "compression_chunk", "device_mesh", "mesh", "world_size")

#: Answers to keywords that LocalDeMo does not have.
LOCAL_ANSWERS = {
    **dict.fromkeys(("lr", "learning_rate", "betas", "eps", "weight_decay", "nesterov", "dampening"), _INNER),
    **dict.fromkeys(("beta", "beta1", "beta2", "maximize", "ns_steps", *SWITCHES), _INNER),
    **{name: ANSWERS[name] for name in _SAME},
    "momentum": "error_decay=... decays what was not sent; the momentum of steps is the inner optimizer's",
    "update": "the inner optimizer takes the steps; outer_lr=... and outer_momentum=... are those of rounds",
    "overlap": "give delay=1, with which a round has a round's time",
    "local_steps": "give sync_every=...",
}


def without_switches(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what was given without torch's switches that are off (False or None).

    Examples:
        >>> without_switches({"lr": 0.1, "fused": None, "foreach": False})
        {'lr': 0.1}
    """
    return {name: value for name, value in given.items() if name not in SWITCHES or (value is not None and value)}


def refuse(name: str, known: Collection[str], where: str = "DeMo", answers: Mapping[str, str] = ANSWERS) -> None:
    """Raises TypeError for a keyword that is not among the known ones, and says what to give instead.

    Examples:
        >>> refuse("eps", ["lr", "momentum"])
        Traceback (most recent call last):
        TypeError: DeMo has no eps; settings of an update rule are given with it: update=demopt.AdamW(eps=...)
        >>> refuse("momentun", ["lr", "momentum"])
        Traceback (most recent call last):
        TypeError: DeMo has no momentun; did you mean 'momentum'?
    """
    answer = f"; {answers[name]}" if name in answers else suggestion(name, known)
    raise TypeError(f"{where} has no {name}" + (answer or f"; known are {', '.join(known)}"))
