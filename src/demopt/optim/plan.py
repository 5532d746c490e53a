"""The plan of an optimizer: all that follows from settings, parameters and the number of ranks, known before a step."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from demopt.core.chunk import to_local
from demopt.core.names import suggestion
from demopt.exchange import Exchange
from demopt.optim import handshake, settings
from demopt.optim.chunk_group import ChunkGroup, build
from demopt.optim.compress import Workspace
from demopt.optim.gradients import check_matrices
from demopt.optim.matrices import Matrices
from demopt.optim.routes.choice import ROUTES, make_route
from demopt.optim.routes.route import Route

KERNELS = ("auto", "triton", "torch")
MACHINE = "its machine (update='muon' wants like ones; others, such as 'signum', take unlike ones)"


@dataclass(frozen=True)
class Options:
    """What holds for all parameter groups, and never changes: see the arguments of `DeMo`.

    Examples:
        >>> Options(route="auto", fingerprint_every=100, overlap=0, delay=0, kernels="auto").check()
    """

    route: str
    fingerprint_every: int
    overlap: int
    delay: int
    kernels: str
    keeps_gradients: bool = True  # in the momentum, if the round that they came in is undone
    also: tuple[tuple[str, str], ...] = ()  # other facts that ranks must share, by name

    @property
    def in_background(self) -> bool:
        """Whether exchanges run in the background while this rank computes."""
        return bool(self.overlap or self.delay)

    def check(self) -> None:
        """Raises ValueError if an option, or a combination of them, is invalid."""
        if self.route not in (*ROUTES, "auto"):
            known = ("auto", *ROUTES)
            raise ValueError(
                f"route is {self.route!r}; choose one of {', '.join(map(repr, known))}{suggestion(self.route, known)}"
            )
        if not isinstance(self.fingerprint_every, int) or self.fingerprint_every < 0:
            raise ValueError(f"fingerprint_every is {self.fingerprint_every!r}; give a number of steps, or 0 for never")
        if not isinstance(self.overlap, int) or self.overlap < 0:
            raise ValueError(f"overlap is {self.overlap!r}; give a number of buckets, or 0 for no overlap")
        if not isinstance(self.delay, int) or self.delay not in (0, 1):
            raise ValueError(f"delay is {self.delay!r}; give 0, or 1 for updates that come a step late")
        if self.overlap and self.delay:
            raise ValueError("overlap and delay cannot be had together: with delay=1 the exchange has a step anyway")
        if self.kernels not in KERNELS:
            raise ValueError(
                f"kernels is {self.kernels!r}; choose one of {', '.join(map(repr, KERNELS))}"
                f"{suggestion(self.kernels, KERNELS)}"
            )


@dataclass(frozen=True)
class Bucket:
    """Parameters with a message of their own, which can leave before those of other buckets; DDP's word."""

    route: Route
    parameters: tuple[Tensor, ...]  # those that are trained


@dataclass(frozen=True)
class Inputs:
    """What a plan was made from: this rank, and each group's hyper-parameters and parameters. Cheap to compare."""

    rank: int
    world_size: int
    values: list[list[Any]]  # of settings.NAMES
    parameters: list[list[tuple[Any, ...]]]

    @staticmethod
    def of(groups: list[dict[str, Any]], rank: int, world_size: int) -> "Inputs":
        """Reads the groups as they are now."""
        return Inputs(
            rank,
            world_size,
            [[v.item() if isinstance(v, Tensor) else v for v in map(group.get, settings.NAMES)] for group in groups],
            [[(id(p), p.dtype, p.device, p.requires_grad) for p in group["params"]] for group in groups],
        )

    @property
    def momenta(self) -> list[float]:
        """Each group's momentum."""
        return [values[_MOMENTUM] for values in self.values]

    @property
    def layout(self) -> list[list[Any]]:
        """Those hyper-parameters that decide what is in which place of a message, or which state there is."""
        return [[values[number] for number in _LAYOUT] for values in self.values]


_MOMENTUM = settings.NAMES.index("momentum")
_LAYOUT = [settings.NAMES.index(n) for n in (*settings.FIXED, "top_k", "relay_top_k", "values", "exact", "update")]


@dataclass(frozen=True)
class Plan:
    """Chunk groups, and the buckets that send them; rebuilt whole when something that it was made from changes.

    Two plans with the same `buckets`, the same object, differ only in hyper-parameters that no layout depends on.
    """

    inputs: Inputs
    options: Options
    groups: list[dict[str, Any]]
    chunk_groups: tuple[ChunkGroup, ...]
    buckets: tuple[Bucket, ...]
    reason: str  # for the choice of route
    settings_digest: int  # of all hyper-parameters, which every message carries
    matrices: Matrices  # whose updates the ranks of a node share out

    @cached_property
    def routes(self) -> list[Route]:
        """Each bucket's route."""
        return [bucket.route for bucket in self.buckets]

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all groups, in order; of a DTensor, this process's part."""
        return [to_local(parameter) for group in self.groups for parameter in group["params"]]

    @property
    def device(self) -> torch.device:
        """Where the bytes of handshakes and of consolidated states are."""
        return self.parameters[0].device if self.parameters else torch.device("cpu")

    @cached_property
    def widths(self) -> tuple[list[int], list[int]]:
        """The bytes of each bucket's message, and of a row of its exchange's result."""
        sent, received = zip(*(route.widths for route in self.routes), strict=True)
        return list(sent), list(received)

    def facts(self) -> dict[str, str]:
        """Returns what must be equal on all ranks, by name; a difference in it cannot be repaired."""
        own = ("kernels", "keeps_gradients", "also")
        options = {name: str(value) for name, value in vars(self.options).items() if name not in own}
        # settings before the machine, because an error names the first difference
        return {**options, **dict(self.options.also), **handshake.describe(self.groups), **self._machine()}

    def _machine(self) -> dict[str, str]:
        """Returns what determines the bits of matrix products, if a rule uses any: different machines would drift."""
        if not any(group.rule.like_machines for group in self.chunk_groups):
            return {}
        devices = sorted({group.key.device for group in self.chunk_groups if group.rule.like_machines}, key=str)
        return {MACHINE: ", ".join((*map(_hardware, devices), f"torch {torch.__version__}"))}


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()} with {torch.get_num_threads()} threads"


def make_plan(
    groups: list[dict[str, Any]],
    options: Options,
    inputs: Inputs,
    workspace: Workspace,
    before: Plan | None,
    node: Exchange | None = None,
) -> Plan:
    """Makes the plan; ValueError or TypeError if a setting is invalid. What can be taken over from `before` is.

    `node`: the exchange among the ranks of a node that all have the same gradients, if there are several.

    Examples:
        >>> options, inputs = Options("auto", 100, 0, 0, "auto"), Inputs.of([], 0, 1)
        >>> make_plan([], options, inputs, Workspace(), None).reason
        'gather: a rank alone receives nothing'
    """
    for group in groups:
        settings.check(group)
        check_matrices(group["update"], group["params"])
    digest = handshake.settings_digest(groups, options.also)
    if before is not None and groups is before.groups:  # otherwise a state was loaded, with its own settings
        _check_fixed(before.inputs, inputs)
        if replace(inputs, values=inputs.layout) == replace(before.inputs, values=before.inputs.layout):
            return replace(before, inputs=inputs, options=options, settings_digest=digest)
    buckets: list[Bucket] = []
    chunk_groups: list[ChunkGroup] = []
    reason = ""
    for parameters in _cut(groups, options.overlap or 1):
        found = build(groups, parameters, options.kernels, before.chunk_groups if before else ())
        trained = [group for group in found if group.chunks and not group.key.frozen]
        route, reason = make_route(options.route, trained, inputs.rank, inputs.world_size, workspace)
        buckets.append(Bucket(route, tuple(parameter for parameter in parameters if parameter.requires_grad)))
        chunk_groups += found
    trained_in_order = [parameter for bucket in buckets for parameter in bucket.parameters]
    matrices = Matrices(chunk_groups, trained_in_order, node)
    return Plan(inputs, options, groups, tuple(chunk_groups), tuple(buckets), reason, digest, matrices)


def _cut(groups: list[dict[str, Any]], count: int) -> list[list[Tensor]]:
    """Splits the parameters into at most `count` buckets, the last ones first, because backward reaches them first."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    total, gathered = sum(p.numel() for p in parameters), 0
    buckets: list[list[Tensor]] = [[]]
    for parameter in reversed(parameters):
        if buckets[-1] and gathered >= len(buckets) * total / count:
            buckets.append([])
        buckets[-1].append(parameter)
        gathered += parameter.numel()
    return buckets


def _check_fixed(before: Inputs, after: Inputs) -> None:
    """Raises ValueError if a hyper-parameter that determines the momentum's layout changed."""
    for number, (old, new) in enumerate(zip(before.values, after.values, strict=False)):
        for name in settings.FIXED:
            at = settings.NAMES.index(name)
            if old[at] != new[at]:
                raise ValueError(
                    f"param_groups[{number}][{name!r}] was changed from {old[at]!r} to {new[at]!r}, but the momentum "
                    "is laid out by it; make a new optimizer instead"
                )
