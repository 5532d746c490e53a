"""What a step costs. The routes themselves compute it, for parameters that have shapes but no memory (meta device).

Shapes: W ranks, P parameters, C chunks, K kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from demopt.exchange import SingleRank
from demopt.exchange.wrappers import all_gather_bytes, all_reduce_bytes
from demopt.optim.chunk_group import ChunkGroup, build, group_key
from demopt.optim.compress import Workspace
from demopt.optim.demo import DeMo
from demopt.optim.local_arguments import answered
from demopt.optim.presets import LOCAL as LOCAL_DEFAULTS
from demopt.optim.presets import PUBLISHED_BYTES
from demopt.optim.routes.choice import ROUTES, make_route
from demopt.optim.routes.route import Route
from demopt.plan.model import Model, Shape
from demopt.plan.network import Call
from demopt.train.method import FLOAT32_BYTES

PUBLISHED_ROUNDS = 2  # per tensor: one all_gather of indices, then one of values
BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's
RINGS = {"all_reduce_fp32": 4, "all_reduce_bf16": 2}  # bytes per parameter
# The settings that affect a plan.
SHOWN = ("top_k", "relay_top_k", "chunk", "chunking", "transform", "values", "update", "exact")
_INDEX_BYTES = 8  # per position, between extract and apply

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Cost:
    """The cost of one way to synchronise a step, for one rank.

    `message_bytes` is the size of the rank's own message, `gathered_bytes` what the collectives write into its memory
    (its own message included), `kept_back_bytes` the second error feedback of route relay on the rank that owns most.
    `calls` are the collectives, one after the other.

    Examples:
        >>> Cost(sent_bytes=10, received_bytes=20, rounds=1).received_bytes
        20
    """

    sent_bytes: int
    received_bytes: int
    rounds: int
    message_bytes: int = 0
    gathered_bytes: int = 0
    kept_back_bytes: int = 0
    calls: tuple[Call, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Row:
    """The cost of all ways for one number of workers; `auto` is the route that "auto" takes, `why` the reason.

    `ways` leaves out routes that the settings rule out.
    """

    workers: int
    ways: dict[str, Cost]
    auto: str
    why: str


@dataclass(frozen=True)
class Memory:
    """Memory of the optimizer on a rank, independent of the route; messages are in `Cost`.

    `rule_bytes` is what the update rule keeps (docs/update-rules.md); with muon it counts neither the matrix being
    orthogonalised nor what adamw keeps for the parameters that muon does not update.
    `workspace_bytes` is the two buffers of one block; `chosen_bytes` is the positions and values held between extract
    and apply, so that a failed round loses nothing.
    """

    momentum_bytes: int
    workspace_bytes: int
    chosen_bytes: int
    rule_bytes: int


@dataclass(frozen=True)
class LocalRow:
    """The cost of a round of LocalDeMo for one number of workers, by route; a step costs 1/H of it, in the mean."""

    workers: int
    ways: dict[str, Cost]


@dataclass(frozen=True)
class Local:
    """What LocalDeMo costs: a round every `sync_every` steps, none in between.

    `memory_bytes` is what it holds beside the inner optimizer: shared weights and error.
    """

    sync_every: int
    top_k: int
    kept: int
    memory_bytes: int
    rows: tuple[LocalRow, ...]


@dataclass(frozen=True)
class Plan:
    """A model, the settings, and what a step costs; `local`: the same with LocalDeMo."""

    model: str
    parameters: int
    tensors: int
    chunks: int
    kept: int
    settings: dict[str, Any]
    memory: Memory
    rows: tuple[Row, ...]
    local: Local


def make_plan(
    model: Model,
    settings: Settings,
    workers: Sequence[int],
    sync_every: int = LOCAL_DEFAULTS["sync_every"],
    local_top_k: int | None = None,
) -> Plan:
    """Plan a model with keyword arguments of `DeMo`; ValueError or TypeError if DeMo refuses one.

    `local_top_k` is what LocalDeMo keeps of a chunk in a round, instead of `top_k`; None: its default, at most all.

    Examples:
        >>> from demopt.plan.model import of_count
        >>> plan = make_plan(of_count(4096 * 8, chunk=64), {"values": "sign"}, workers=[2])
        >>> plan.rows[0].ways["gather"].received_bytes  # 64 for the header, 331 for 8 chunks, rounded up to 336
        400
    """
    chunk_groups = make_chunk_groups(model.shapes, settings)
    if not chunk_groups:
        raise ValueError("the model has no parameters")
    published = published_coefficients(model.shapes, settings)
    rows = []
    for world_size in workers:
        routes = {name: _route(name, chunk_groups, world_size) for name in ROUTES}
        ways = {name: ring(size * model.parameters, world_size) for name, size in RINGS.items()}
        ways["published"] = all_gather(
            PUBLISHED_BYTES * published, world_size, rounds=PUBLISHED_ROUNDS * len(model.shapes)
        )
        ways.update({name: cost_of(route) for name, route in routes.items() if route is not None})
        route, why = make_route("auto", chunk_groups, 0, world_size, Workspace())
        rows.append(Row(world_size, ways, route.name, why))
    chunks = sum(group.chunks for group in chunk_groups)
    kept = sum(group.chunks * group.key.keep for group in chunk_groups)
    shown = {name: chunk_groups[0].group[name] for name in SHOWN}
    tensors = len(model.shapes)
    side = shown["chunk"]
    keep = min(LOCAL_DEFAULTS["top_k"], side * side) if local_top_k is None else local_top_k
    local = make_local(model, {**settings, "top_k": keep, "relay_top_k": answered(keep)}, workers, sync_every)
    memory = memory_of(chunk_groups)
    return Plan(model.name, model.parameters, tensors, chunks, kept, shown, memory, tuple(rows), local)


def make_local(model: Model, settings: Settings, workers: Sequence[int], sync_every: int) -> Local:
    """Plan LocalDeMo: movements travel as DeMo's messages do, on the routes that do not need signs.

    Examples:
        >>> from demopt.plan.model import of_count
        >>> local = make_local(of_count(4096 * 8, chunk=64), {"top_k": 32}, [2], sync_every=4)
        >>> local.rows[0].ways["gather"].received_bytes  # that of DeMo at the same top_k, every fourth step
        400
    """
    if sync_every < 1:
        raise ValueError(f"sync_every is {sync_every}; give a number of steps from one round to the next, 1 or more")
    # LocalDeMo's codec: movements are added up, and are no signs, which route owner would carry
    chunk_groups = make_chunk_groups(model.shapes, {**settings, "update": "sgd", "chunking": "padded"})
    rows = []
    for world_size in workers:
        routes = {name: _route(name, chunk_groups, world_size) for name in ROUTES}
        rows.append(LocalRow(world_size, {name: cost_of(r) for name, r in routes.items() if r is not None}))
    kept = sum(group.chunks * group.key.keep for group in chunk_groups)
    memory = FLOAT32_BYTES * model.parameters + memory_of(chunk_groups).momentum_bytes
    return Local(sync_every, chunk_groups[0].group["top_k"], kept, memory, tuple(rows))


def make_chunk_groups(shapes: Sequence[Shape], settings: Settings) -> list[ChunkGroup]:
    """Build the chunk groups that DeMo would build, on torch's meta device: shapes without memory.

    Examples:
        >>> [(group.chunks, group.key.keep) for group in make_chunk_groups([(128, 64), (50,)], {"top_k": 8})]
        [(2, 8), (1, 1)]
    """
    return [chunk_group for chunk_group in build([_group(shapes, settings)]) if chunk_group.chunks]


def published_coefficients(shapes: Sequence[Shape], settings: Settings) -> int:
    """Count the coefficients that the published code keeps: its own chunking, and K for any chunk size.

    Examples:
        >>> published_coefficients([(50257, 64), (64,)], {"top_k": 32})  # 1,733 chunks of 29 x 64, and one of 64
        55488
    """
    group = _group(shapes, {**settings, "values": "float32", "chunking": "divisor"})
    kinds = (group_key(parameter, 0, group) for parameter in group["params"])
    return sum(whole.chunks * kind.keep for kind, whole in kinds)


def ring(size: int, world_size: int) -> Cost:
    """Return the cost of a ring all-reduce of `size` bytes, in place, in the buckets of DistributedDataParallel.

    Examples:
        >>> ring(1000, world_size=4)
        Cost(sent_bytes=1500, received_bytes=1500, rounds=6, message_bytes=1000, gathered_bytes=0, kept_back_bytes=0)
    """
    both = all_reduce_bytes(size, world_size)
    buckets = -(-size // BUCKET_BYTES)
    calls = (Call("all_reduce", -(-size // buckets), buckets),)
    return Cost(both, both, 2 * (world_size - 1), message_bytes=size, calls=calls)


def all_gather(size: int, world_size: int, rounds: int) -> Cost:
    """Return the cost of an all_gather of `size` bytes per rank.

    Examples:
        >>> all_gather(1000, world_size=4, rounds=1).received_bytes
        3000
    """
    both = all_gather_bytes(size, world_size)
    calls = (Call("all_gather", -(-size // rounds), rounds),)
    return Cost(both, both, rounds, message_bytes=size, gathered_bytes=world_size * size, calls=calls)


def cost_of(route: Route) -> Cost:
    """Return the cost of a step on a route.

    Examples:
        >>> from demopt.optim.routes.gather import Gather
        >>> cost_of(Gather([], 0, 3, Workspace()))
        Cost(sent_bytes=128, received_bytes=128, rounds=1, message_bytes=64, gathered_bytes=192, kept_back_bytes=0)
    """
    world_size, traffic = route.world_size, route.traffic
    gathered = traffic.received * world_size // (world_size - 1)
    message, answer = route.widths
    calls: tuple[Call, ...] = (Call("all_gather", message),)
    if route.collectives == 2:
        calls = (Call("all_to_all", message), Call("all_gather", answer))
    back = route.kept_back_bytes
    return Cost(traffic.sent, traffic.received, route.collectives, message, gathered, back, calls)


def memory_of(chunk_groups: Sequence[ChunkGroup]) -> Memory:
    """Return the memory that the optimizer holds on any route.

    Examples:
        >>> memory_of(make_chunk_groups([(64, 64)], {"top_k": 8}))
        Memory(momentum_bytes=16384, workspace_bytes=8388608, chosen_bytes=96, rule_bytes=0)
    """
    workspace = Workspace()
    buffers: dict[torch.dtype, int] = {}
    for chunk_group in chunk_groups:
        first, _ = workspace.pair(chunk_group, max(block.stop - block.start for block in chunk_group.blocks))
        buffers[chunk_group.key.dtype] = max(buffers.get(chunk_group.key.dtype, 0), first.untyped_storage().nbytes())
    chosen = sum(
        chunk_group.chunks * chunk_group.key.keep * (_INDEX_BYTES + chunk_group.key.dtype.itemsize)
        for chunk_group in chunk_groups
    )
    rule = sum(tensor.nbytes for chunk_group in chunk_groups for tensor in chunk_group.rule_state.values())
    return Memory(sum(chunk_group.momentum.nbytes for chunk_group in chunk_groups), sum(buffers.values()), chosen, rule)


def _group(shapes: Sequence[Shape], settings: Settings) -> dict[str, Any]:
    """Build a parameter group; DeMo checks and completes the settings on a matrix of one element.

    This does not check that the update rule fits all of a model's parameters: with muon, vectors are in another group.
    """
    single, *parameters = (torch.empty(shape, device="meta", requires_grad=True) for shape in ((1, 1), *shapes))
    group: dict[str, Any] = DeMo([single], process_group=SingleRank(), **settings).param_groups[0]
    return {**group, "params": parameters}


def _route(name: str, chunk_groups: list[ChunkGroup], world_size: int) -> Route | None:
    """Build the route of rank 0; None if the settings rule it out."""
    try:
        return make_route(name, chunk_groups, 0, world_size, Workspace())[0]
    except ValueError:
        return None
