"""The step study: whole optimizer steps on given gradients, every method in every round.

All methods share parameters and gradients, so they are measured on the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from demopt.bench import clock, memory
from demopt.bench.capture import try_capture
from demopt.bench.config import BenchConfig
from demopt.bench.gradients import Gradients
from demopt.bench.methods import Method, step_methods
from demopt.bench.samples import Samples, traffic_figures
from demopt.bench.shapes import model_of
from demopt.bench.traffic import counted
from demopt.kernels.choice import kernels_for
from demopt.optim.demo import DeMo
from demopt.train.team import Team

COPIED = (1 << 26, 1 << 28)  # least and most bytes copied to measure bandwidth: more than caches hold


@dataclass(frozen=True)
class Bench:
    """The team, parameters and gradients that all methods share."""

    team: Team
    parameters: list[Parameter]
    gradients: Gradients

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(parameter.nbytes for parameter in self.parameters)

    def fill(self, method: Method, turn: int) -> None:
        """Set the method's gradients for a round; averaged ones are equal on all ranks."""
        self.gradients.fill(self.team.rank if method.private else 0, turn)


def measure_step(config: BenchConfig, team: Team) -> dict[str, Any]:
    """Run the study on this rank. Seconds are each round's slowest rank's; other figures are this rank's own."""
    torch.manual_seed(0)
    shapes = model_of(config.shapes).shapes
    parameters = [Parameter(0.02 * torch.randn(shape, device=team.device)) for shape in shapes]
    bench = Bench(team, parameters, Gradients(parameters))
    team.barrier()  # ranks that share a memory then measure it together, and so share its bandwidth
    bandwidth = clock.memory_bandwidth(min(max(bench.parameter_bytes, COPIED[0]), COPIED[1]), team.device)
    methods = step_methods(config, parameters, team.world_size)
    started = [_start(bench, method) for method in methods]
    _rounds(config, bench, methods, started)
    if team.device.type == "cuda":
        for samples, optimizer in started:
            if isinstance(optimizer, DeMo):
                samples.figures["cuda_graph"] = try_capture(optimizer)
    return {
        "memory_bytes_per_second": bandwidth,
        "kernels": kernels_name(team.device),
        "methods": [samples.together(team) for samples, _ in started],
    }


def kernels_name(device: torch.device) -> str | None:
    """Return the kernels that DeMo uses for full float32 chunks; None where it uses torch operations.

    Examples:
        >>> kernels_name(torch.device("meta")) is None
        True
    """
    kernels = kernels_for("auto", (64, 64), torch.float32, device)
    return None if kernels is None else getattr(kernels, "__name__", type(kernels).__name__).rpartition(".")[2]


def _start(bench: Bench, method: Method) -> tuple[Samples, Optimizer]:
    """Make the optimizer and take its first two steps, untimed, to measure memory and bytes.

    Memory is what the first step leaves held, beyond parameters, gradients and one momentum buffer, plus what the
    second allocates on top. The first step may include one-time work, such as comparing settings.
    """
    made: list[Optimizer] = []

    def first() -> None:
        made.append(method.make())
        made[0].step()

    device = bench.team.device
    bench.fill(method, 0)
    held = memory.measure(first, device)
    bench.fill(method, 1)
    with counted(bench.team.world_size) as traffic:
        stepped = memory.measure(made[0].step, device)
    extra = held.kept_bytes + stepped.peak_bytes - bench.parameter_bytes
    figures = {
        "held_bytes": held.kept_bytes,
        "extra_memory_bytes": extra,
        "extra_memory_percent": 100 * extra / bench.parameter_bytes,
        "floor_bytes": method.floor_bytes * sum(parameter.numel() for parameter in bench.parameters),
        **traffic_figures(traffic, made[0]),
    }
    return Samples(method.name, figures), made[0]


def _rounds(config: BenchConfig, bench: Bench, methods: list[Method], started: list[tuple[Samples, Optimizer]]) -> None:
    for turn in range(config.warmup + config.rounds):
        for place in clock.turn_order(len(methods), turn):
            samples, optimizer = started[place]
            bench.fill(methods[place], 2 + turn)
            bench.team.barrier()
            seconds = clock.seconds(optimizer.step, bench.team.device)
            if turn >= config.warmup:
                samples.add(seconds, optimizer)
