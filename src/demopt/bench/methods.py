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
from demopt.bench.shapes import is_for_muon
from demopt.core.update import rule_of
from demopt.exchange import SingleRank
from demopt.optim.demo import DeMo
from demopt.optim.local import LocalDeMo
from demopt.train.config import InputError
from demopt.train.method import Together, build_muon

FUSED, FOREACH = "AdamW fused", "AdamW foreach"
MUON, ROUND, NO_ROUND = "Muon", "LocalDeMo, round", "LocalDeMo, none"
NEVER = 1 << 40  # steps from one round to the next, where only steps without one are timed
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
    if config.muon:
        found[len(config.demo) : len(config.demo)] = _around_muon(config, parameters, world_size)
    if config.foreach:
        found.append(Method(FOREACH, lambda: AdamW(parameters, lr=LR, foreach=True), False, TWO_MOMENTS_BYTES))
    if config.against:
        arguments = keywords(config.against_args, "--against-args")
        other = against_name(config)
        make = lambda: against.make(config.against, parameters, LR, arguments)  # noqa: E731
        found.append(Method(other, make, True, ONE_MOMENT_BYTES))
    return found


def _around_muon(config: BenchConfig, parameters: list[Parameter], world_size: int) -> list[Method]:
    """Return LocalDeMo with a round in its step, LocalDeMo without one, and their inner optimizers alone."""
    settings = local_settings(config, world_size)

    def local(every: int) -> Callable[[], Optimizer]:
        return lambda: LocalDeMo(inner(parameters), sync_every=every, **settings)

    return [
        Method(ROUND, local(1), True, ONE_MOMENT_BYTES),
        Method(NO_ROUND, local(NEVER), True, ONE_MOMENT_BYTES),
        Method(MUON, lambda: Together(inner(parameters)), False, ONE_MOMENT_BYTES),
    ]


def inner(parameters: list[Parameter]) -> list[Optimizer]:
    """Return the Muon of `demopt train` for matrices, and AdamW for vocabularies and vectors, told apart by shape.

    Examples:
        >>> [type(one).__name__ for one in inner([Parameter(torch.zeros(3, 3)), Parameter(torch.zeros(3))])]
        ['Float32Muon', 'AdamW']
    """
    matrices = [parameter for parameter in parameters if is_for_muon(tuple(parameter.shape))]
    rest = [parameter for parameter in parameters if not is_for_muon(tuple(parameter.shape))]
    found: list[Optimizer] = []
    if matrices:
        found.append(build_muon(matrices, LR))
    if rest:
        found.append(AdamW(rest, lr=LR, fused=True))
    return found


def local_settings(config: BenchConfig, world_size: int) -> dict[str, Any]:
    """Return the keyword arguments of LocalDeMo.

    Examples:
        >>> local_settings(BenchConfig(local="top_k=8"), world_size=2)["top_k"]
        8
    """
    fixed: dict[str, Any] = {"fingerprint_every": 0, "process_group": SingleRank() if world_size == 1 else None}
    return {**fixed, **keywords(config.local, "--local")}


def demo_settings(config: BenchConfig, world_size: int) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments of each DeMo, by name.

    A single rank needs no process group. Replicas are not compared: in the step study others update them too.

    Examples:
        >>> list(demo_settings(BenchConfig(demo=("values=sign", "top_k=8")), world_size=2))
        ['DeMo values=sign', 'DeMo top_k=8']
    """
    fixed: dict[str, Any] = {"fingerprint_every": 0, "process_group": SingleRank() if world_size == 1 else None}
    return {f"DeMo {text}".strip(): {**fixed, **keywords(text, "--demo")} for text in config.demo}


def against_name(config: BenchConfig) -> str:
    """Return the name of the --against optimizer in tables: without its folder.

    Examples:
        >>> against_name(BenchConfig(against="some/where/other.py:Other"))
        'other.py:Other'
    """
    return config.against.replace("\\", "/").rpartition("/")[2]


def check_demo(config: BenchConfig) -> None:
    """Construct each DeMo once, and LocalDeMo, so that they refuse bad settings before any worker starts."""
    if config.local:
        if not config.muon or "step" not in config.studies:
            raise InputError("--local is for LocalDeMo, which the study step measures, unless with --no-muon")
        single = local_settings(config, 1)
        try:
            if "sync_every" in keywords(config.local, "--local"):
                raise ValueError("sync_every is set here: one step with a round is measured, and one without")
            LocalDeMo(inner([Parameter(torch.zeros(64, 64))]), **single)
        except (TypeError, ValueError) as error:
            raise InputError(f"--local {config.local}: {error}") from None
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
