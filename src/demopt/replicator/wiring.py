"""The wiring of a replicator: all that follows from settings, parameters and the number of ranks, before a step."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from demopt.codec.chunk_group import ChunkGroup, build
from demopt.codec.gradients import check_matrices
from demopt.codec.hyperparameters import FIXED, LAYOUT, NAMES, Hyperparameters
from demopt.codec.steps import Workspace
from demopt.core.exact import guard_bits
from demopt.exchange.dtensor import parts_of, shard_groups, to_local
from demopt.exchange.interface import device_between
from demopt.kernels.gate import check_in_host_memory
from demopt.replicator.owner import Owner
from demopt.replicator.route import Route
from demopt.validation import check_choice, check_count
from demopt.wire.message import VERSION

KERNELS = ("auto", "torch")
#: A new route is a file and an entry here.
ROUTES: dict[str, type[Route]] = {"gather": Route, "owner": Owner}
#: LocalDeMo's arguments, by the hyper-parameters that they are.
_OF_LOCAL = {"lr": "outer_lr", "momentum_decay": "error_decay", "update": "outer_momentum"}
HARDWARE = "its hardware (update='muon' needs the same on all ranks; others, such as 'signum', do not)"

Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Options:
    """Settings that hold for all parameter groups: see the arguments of `DeMo`. To change one, replace the object.

    `background`: rounds travel while this rank computes. `config_facts` returns other facts that ranks must share, by
    name, as they are now.
    """

    route: str = "auto"
    fingerprint_every: int = 100
    kernels: str = "auto"
    background: bool = False
    config_facts: Callable[[], Facts] = tuple

    def __post_init__(self) -> None:
        check_choice("route", self.route, ("auto", *ROUTES))
        check_choice("kernels", self.kernels, KERNELS)
        check_count("fingerprint_every", self.fingerprint_every, low=0)


class SeenParameter(NamedTuple):
    """A parameter as the wiring has seen it; `group` is the number of its parameter group."""

    group: int
    identity: int
    dtype: torch.dtype
    device: torch.device
    trains: bool
    shape: torch.Size


@dataclass(frozen=True)
class Inputs:
    """The inputs of a wiring: options, this rank, and values and parameters of each group. Cheap to compare."""

    options: Options
    rank: int
    world_size: int
    values: list[tuple[Any, ...]]  # of hyperparameters.NAMES
    parameters: list[SeenParameter]

    @staticmethod
    def of(groups: list[dict[str, Any]], options: Options, rank: int, world_size: int) -> "Inputs":
        """Reads the groups as they are now; hyper-parameters are not checked yet."""
        values = []
        for group in groups:
            found = [group.get(name) for name in NAMES]
            values.append(tuple([_comparable(value) if hasattr(value, "item") else value for value in found]))
        parameters = [
            SeenParameter(number, id(p), p.dtype, p.device, p.requires_grad, p.shape)
            for number, group in enumerate(groups)
            for p in group["params"]
        ]
        return Inputs(options, rank, world_size, values, parameters)

    @property
    def for_layout(self) -> "Inputs":
        """These inputs with only the settings that decide the layout of messages, or which state there is."""
        values = [tuple(of_group[NAMES.index(name)] for name in LAYOUT) for of_group in self.values]
        return replace(self, options=Options(self.options.route, kernels=self.options.kernels), values=values)


def fact_told(name: str, facts: Mapping[str, str]) -> str:
    """Returns the name by which users know a fact: LocalDeMo's argument, because its `param_groups` are the inner's."""
    found = re.fullmatch(r"param_groups\[\d+\]\['(\w+)'\]", name)
    return _OF_LOCAL.get(found[1], found[1]) if found and "sync_every" in facts else name


def _comparable(value: Any) -> Any:
    """Returns the number in a value of torch or numpy; if it has none, its text, which `Hyperparameters` refuses."""
    try:
        return value.item()
    except (RuntimeError, ValueError):  # several elements, or on the meta device
        return repr(value)


@dataclass(frozen=True)
class Wiring:
    """Chunk groups, and the route of their messages; made anew when one of its inputs changes.

    Two wirings with the same `route` object differ only in hyper-parameters that no layout depends on.
    """

    inputs: Inputs
    groups: list[dict[str, Any]]
    parameters: list[Tensor]  # of all groups, in order
    settings: list[Hyperparameters]
    chunk_groups: tuple[ChunkGroup, ...]
    route: Route
    reason: str  # for the choice of route
    shard_groups: dict[Any, str]  # process groups of ranks that hold shards of the same parameters

    @property
    def device(self) -> torch.device:
        """The device on which handshakes and consolidated states travel."""
        return device_between(to_local(parameter).device for parameter in self.parameters)

    @cached_property
    def names(self) -> list[str]:
        """The names of all parameters in error messages."""
        of_groups = groupby(seen.group for seen in self.inputs.parameters)  # groups may have got more parameters since
        return [f"param_groups[{group}]['params'][{place}]" for group, its in of_groups for place, _ in enumerate(its)]

    def require_unchanged(self) -> None:
        """Raises ValueError if a parameter has no memory, or dtype, device or shape differ from the wiring's."""
        for name, parameter, seen in zip(self.names, self.parameters, self.inputs.parameters, strict=True):
            came, was = (parameter.dtype, parameter.device, parameter.shape), (seen.dtype, seen.device, seen.shape)
            if came != was:
                raise ValueError(f"{name} was {was} when gradients were extracted, and is {came}; call rollback()")
            for part in parts_of([parameter] if parameter.is_cpu else []):
                check_in_host_memory(name, part)

    def replicated_tensors(self) -> list[Tensor]:
        """Returns the tensors that must be the same on all ranks: parts of parameters held here, and rules' state."""
        rule_state = [tensor for chunk_group in self.chunk_groups for tensor in chunk_group.rule_state.values()]
        return [*parts_of(self.parameters), *rule_state]

    def facts(self) -> dict[str, str]:
        """Returns the facts that must be equal on all ranks, by name; a difference in them cannot be repaired."""
        options = self.inputs.options
        facts = {"route": options.route, "fingerprint_every": str(options.fingerprint_every)}
        facts |= {"delay": str(int(options.background)), **dict(options.config_facts()), "wire version": str(VERSION)}
        for number, settings in enumerate(self.settings):
            facts |= {f"param_groups[{number}][{name!r}]": text for name, text in settings.texts.items()}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            trained = "" if parameter.requires_grad else ", frozen"
            facts[name] = f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}{trained}"
        devices = {chunk_group.key.device for chunk_group in self.chunk_groups if chunk_group.rule.whole_matrix}
        if devices:  # which decide the bits of matrix products; last, because an error names the first difference
            described = map(_describe, sorted(devices, key=str))
            facts[HARDWARE] = ", ".join((*described, f"float32 products {_precision()}", f"torch {torch.__version__}"))
        return facts


def _precision() -> str:
    """Returns whether float32 products are in TF32, where devices have it."""
    backends: Any = torch.backends
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by torch's newer names, as by transformers' tf32=True
        return f"{backends.cuda.matmul.fp32_precision} and {backends.mkldnn.matmul.fp32_precision}"


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{torch.backends.cpu.get_cpu_capability()} with {torch.get_num_threads()} threads"
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def make_wiring(groups: list[dict[str, Any]], inputs: Inputs, workspace: Workspace, before: Wiring | None) -> Wiring:
    """Makes the wiring, and takes over the valid parts of `before`; ValueError or TypeError if a setting is invalid."""
    options = inputs.options
    settings = [Hyperparameters.of(group) for group in groups]
    for each, group in zip(settings, groups, strict=True):
        check_matrices(each.update, group["params"])
    if before is not None:
        _check_fixed(before.inputs, inputs)
        if inputs.for_layout == before.inputs.for_layout:
            # A scheduler changes lr at every step. So chunk groups and route stay, with their buffers and kernels, and
            # take the new settings; and since the route is the same object, the ranks need no new handshake.
            for chunk_group in before.chunk_groups:
                chunk_group.settings = settings[chunk_group.key.param_group]
            return replace(before, inputs=inputs, settings=settings)
    grouped = [(number, parameter) for number, group in enumerate(groups) for parameter in group["params"]]
    chunk_groups = build(grouped, settings, options.kernels, before.chunk_groups if before else ())
    route, reason = make_route(options.route, chunk_groups, inputs.rank, inputs.world_size, workspace)
    parameters = [parameter for _, parameter in grouped]
    return Wiring(inputs, groups, parameters, settings, tuple(chunk_groups), route, reason, shard_groups(parameters))


def make_route(
    name: str, chunk_groups: Sequence[ChunkGroup], rank: int, world_size: int, workspace: Workspace
) -> tuple[Route, str]:
    """Builds the route `name`; returns it and a line that states the reason. ValueError if a setting does not fit.

    "auto" takes the one that receives the fewest bytes, of those meant for so many ranks.
    """
    mine = list(chunk_groups)
    for chunk_group in mine:
        if chunk_group.key.exact:
            guard_bits(world_size, chunk_group.largest_level)  # ValueError if sums over so many ranks are not exact

    def made(kind: type[Route], least_ranks: int = 1) -> Route:
        for chunk_group in mine:
            if reason := kind.unsupported(chunk_group.settings):
                raise ValueError(reason)
        if world_size < least_ranks:
            raise ValueError(f"{kind.name} answers with signs, which pays with {least_ranks} ranks or more")
        route = kind(mine, rank, world_size, workspace)
        _ = route.widths  # ValueError, before any training, if messages are longer than their headers can say
        return route

    if name != "auto":
        return made(ROUTES[name]), f"{name}: as asked"
    if world_size == 1:
        return made(Route), "gather: a rank alone receives nothing"
    routes, refusals = [], []
    for kind in ROUTES.values():
        try:
            routes.append(made(kind, kind.least_ranks))
        except ValueError as refused:
            refusals.append(str(refused))
    if not routes:
        raise ValueError("; ".join(refusals))
    cheapest, *others = sorted(routes, key=lambda route: route.bytes_each_way)
    why = [f"{cheapest.name}: {cheapest.bytes_each_way:,} bytes received per round"]
    why += [f"{other.name} would take {other.bytes_each_way:,}" for other in others]
    return cheapest, "; ".join([", ".join(why), *refusals])


def _check_fixed(before: Inputs, after: Inputs) -> None:
    """Raises ValueError if a hyper-parameter, or a shape, that determines the momentum's layout changed."""
    shapes = {seen.identity: seen.shape for seen in before.parameters}
    for place, seen in enumerate(after.parameters):
        if (was := shapes.get(seen.identity, seen.shape)) != seen.shape:
            raise ValueError(
                f"parameter {place}, of param_groups[{seen.group}], had shape {list(was)} and has {list(seen.shape)}: "
                "its data was replaced, but the momentum is laid out by shape; make a new optimizer"
            )
    for number, (old, new) in enumerate(zip(before.values, after.values, strict=False)):
        for name in FIXED:
            at = NAMES.index(name)
            if old[at] != new[at]:
                raise ValueError(
                    f"param_groups[{number}][{name!r}] was changed from {old[at]!r} to {new[at]!r}, but the momentum "
                    "is laid out by it; make a new optimizer instead"
                )
