"""The optimizers whose steps are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from demopt.bench import against
from demopt.bench.config import BenchConfig, keywords
from demopt.core.update import rule_of
from demopt.exchange import SingleRank
from demopt.optim.demo import DeMo
from demopt.train.config import InputError

FUSED, FOREACH = "AdamW fused", "AdamW foreach"
LR = 1e-6  # so small that parameters hardly move
# Bytes that a step must move per fp32 parameter: gradient read; parameter and each moment read and written.
ONE_MOMENT_BYTES, TWO_MOMENTS_BYTES = 20, 28


@dataclass(frozen=True)
class Method:
    """An optimizer to construct. `private`: gradients differ between ranks; otherwise they are equal, as after DDP."""

    name: str
    make: Callable[[], Optimizer]
    private: bool
    floor_bytes: int  # per parameter


def step_methods(config: BenchConfig, parameters: list[Parameter], world_size: int) -> list[Method]:
    """Return all methods of the step study. DeMo comes first: its first step compares the ranks' weights."""
    found = [
        Method(name, lambda settings=settings: DeMo(parameters, lr=LR, **settings), True, ONE_MOMENT_BYTES)  # type: ignore[misc]
        for name, settings in demo_settings(config, world_size).items()
    ]
    found.append(Method(FUSED, lambda: AdamW(parameters, lr=LR, fused=True), False, TWO_MOMENTS_BYTES))
    if config.foreach:
        found.append(Method(FOREACH, lambda: AdamW(parameters, lr=LR, foreach=True), False, TWO_MOMENTS_BYTES))
    if config.against:
        arguments = keywords(config.against_args, "--against-args")
        other = against_name(config)
        make = lambda: against.make(config.against, parameters, LR, arguments)  # noqa: E731
        found.append(Method(other, make, True, ONE_MOMENT_BYTES))
    return found


def demo_settings(config: BenchConfig, world_size: int) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments of each DeMo, by name.

    A single rank needs no process group. Replicas are not compared: in the step study others update them too.

    Example:
        >>> list(demo_settings(BenchConfig(demo=("values=sign", "top_k=8")), world_size=2))
        ['DeMo values=sign', 'DeMo top_k=8']
    """
    fixed: dict[str, Any] = {"fingerprint_every": 0, "process_group": SingleRank() if world_size == 1 else None}
    return {f"DeMo {text}".strip(): {**fixed, **keywords(text, "--demo")} for text in config.demo}


def against_name(config: BenchConfig) -> str:
    """Return the name of the --against optimizer in tables: without its folder.

    Example:
        >>> against_name(BenchConfig(against="some/where/other.py:Other"))
        'other.py:Other'
    """
    return config.against.replace("\\", "/").rpartition("/")[2]


def check_demo(config: BenchConfig) -> None:
    """Construct each DeMo once, so that it refuses bad settings before any worker starts."""
    for text in config.demo:
        settings = {"lr": LR, "process_group": SingleRank(), **keywords(text, "--demo")}
        try:
            demo = DeMo([Parameter(torch.zeros(2, 2))], **settings)
        except (TypeError, ValueError) as error:
            raise InputError(f"--demo {text}: {error}") from None
        if rule_of(demo.defaults["update"]).whole and "step" in config.studies:
            raise InputError(
                f"--demo {text}: the study step knows shapes, not which of them are embeddings, which muon is not for; "
                "use --study train"
            )
