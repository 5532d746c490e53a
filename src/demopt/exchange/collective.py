"""Exchange over a torch.distributed process group, gloo or nccl. Nothing else in or below optim/ imports it."""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from demopt.exchange.hierarchical import Hierarchical
from demopt.exchange.interface import Exchange
from demopt.exchange.roll_call import RollCall
from demopt.exchange.single_rank import SingleRank

# torch 2.13 renamed all_gather_into_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_DUPLICATES: "weakref.WeakKeyDictionary[Any, list[_Duplicate]]" = weakref.WeakKeyDictionary()  # by the user's group
_ROLL_CALLS: "weakref.WeakKeyDictionary[Any, RollCall]" = weakref.WeakKeyDictionary()  # one a default process group


class Collective(Exchange):
    """Ranks of a process group, or of one dimension of a DeviceMesh; every call is one collective.

    `timeout` (seconds) overrides the group's. Tensors must be on the backend's device (gloo: CPU, nccl: GPU).

    Examples:
        >>> import torch.distributed as dist
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> exchange = Collective(dist.group.WORLD)
        >>> exchange.all_gather(torch.zeros(3, dtype=torch.uint8)).shape
        torch.Size([1, 3])
        >>> dist.destroy_process_group()
    """

    def __init__(self, process_group: Any = None, timeout: float | None = None) -> None:
        group = process_group.get_group() if hasattr(process_group, "get_group") else process_group
        self._group: Any = group if group is not None else dist.group.WORLD
        if self._group is None:
            raise ValueError("torch.distributed is not initialised: call init_process_group before using its groups")
        self._timeout = None if timeout is None else timedelta(seconds=timeout)
        self.rank = dist.get_rank(self._group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the given process group")
        self.world_size = dist.get_world_size(self._group)
        self._global_ranks = dist.get_process_group_ranks(self._group)
        self.global_ranks = frozenset(self._global_ranks)
        self._calls = _Calls()
        self._roll_call = _roll_call()

    def all_gather(self, message_B: Tensor) -> Tensor:
        """One all_gather of bytes."""
        gathered = torch.empty(self.world_size * message_B.numel(), dtype=message_B.dtype, device=message_B.device)
        self._run(lambda: _all_gather(gathered, message_B, group=self._group, async_op=True))
        return gathered.view(self.world_size, -1)

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        """One all_to_all of equal parts."""
        received = torch.empty_like(parts_WB)
        sent = parts_WB.contiguous()
        self._run(lambda: dist.all_to_all_single(received, sent, group=self._group, async_op=True))
        return received

    def all_reduce(self, values: Tensor) -> None:
        """One all_reduce (a reduce-scatter and an all-gather, so that all ranks end with the same bits)."""
        self._run(lambda: dist.all_reduce(values, group=self._group, async_op=True))

    def broadcast(self, data_B: Tensor, src: int) -> None:
        """One broadcast from the member `src`, counted within the group."""
        self._run(lambda: dist.broadcast(data_B, self._global_ranks[src], group=self._group, async_op=True))

    def gather(self, message_B: Tensor, dst: int) -> Tensor | None:
        """One gather to the member `dst`, counted within the group."""
        rows = None
        if self.rank == dst:
            rows = [torch.empty_like(message_B) for _ in range(self.world_size)]
        self._run(lambda: dist.gather(message_B, rows, self._global_ranks[dst], group=self._group, async_op=True))
        return None if rows is None else torch.stack(rows)

    def duplicate(self, device: torch.device) -> "Collective":
        """Returns a Collective on another process group with the same ranks, backend and timeout.

        It takes one that was made before, if on all ranks nobody has it any more and every call on it ended well.
        """
        timeout = self._timeout or _timeout_of(self._group)
        made = _DUPLICATES.setdefault(self._group, [])
        spare = next((number for number, each in enumerate(made) if each.spare), -1)
        told = self.all_gather(torch.tensor([spare], device=device).view(torch.uint8)).view(torch.int64)
        if spare < 0 or bool((told != spare).any()):
            spare = len(made)
            made.append(_Duplicate(self._another_group(timeout)))
        taken = Collective(made[spare].group, timeout=None if timeout is None else timeout.total_seconds())
        taken._calls, made[spare].owner = made[spare].calls, weakref.ref(taken)
        return taken

    def _another_group(self, timeout: timedelta | None) -> Any:
        ranks, backend = sorted(self._global_ranks), dist.get_backend_config(self._group)
        if ranks != self._global_ranks:
            raise ValueError("ranks of a group that are not in ascending order cannot exchange in the background")
        return dist.new_group(ranks, timeout, backend, use_local_synchronization=True)

    def waiting(self) -> AbstractContextManager[None]:
        """Around a collective of somebody else's on these ranks: its failure becomes an ExchangeError as ours do."""
        return self._roll_call.waiting(self._global_ranks, ours=False)

    def _run(self, start: Any) -> None:
        self._calls.unended += 1
        with self._roll_call.waiting(self._global_ranks):
            work = start()
            work.wait() if self._timeout is None else work.wait(self._timeout)
        self._calls.unended -= 1


@dataclass
class _Calls:
    """Calls on a process group that have not ended, or failed: after one of these the group is unusable."""

    unended: int = 0


@dataclass
class _Duplicate:
    """A process group that was made for exchanges in the background; `owner` is the last Collective that took it.

    It is kept, not destroyed: torch gives the name of a destroyed group to the next one of these ranks, which then
    finds the old addresses in the store, and cannot connect. Without destruction gloo's connections stay open.
    """

    group: Any
    calls: _Calls = field(default_factory=_Calls)
    owner: Callable[[], Collective | None] = lambda: None

    @property
    def spare(self) -> bool:
        return self.owner() is None and not self.calls.unended


def _roll_call() -> RollCall:
    """Returns this process's part in roll calls: one for all groups, as a rank may be missed in any of them."""
    world = dist.group.WORLD
    if world not in _ROLL_CALLS:
        found = weakref.ref(world)

        def store() -> Any:
            alive = found()
            return alive.get_group_store() if alive is not None and dist.is_initialized() else None

        _ROLL_CALLS[world] = RollCall(store, dist.get_rank())
    return _ROLL_CALLS[world]


def _timeout_of(group: Any) -> timedelta | None:
    """Returns the group's timeout, which torch stores only in the group's backends."""
    for device in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device)).options
        except (AttributeError, RuntimeError):
            continue
        found = getattr(options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return None


def resolve(process_group: Any) -> Exchange:
    """Returns the exchange for a user's `process_group`: None, a group, a mesh, or an exchange.

    A mesh of two dimensions is (nodes, ranks of a node).

    Examples:
        >>> type(resolve(None)).__name__
        'SingleRank'
    """
    if isinstance(process_group, Exchange):
        return process_group
    if process_group is None:
        return Collective() if dist.is_available() and dist.is_initialized() else SingleRank()
    dimensions = getattr(process_group, "ndim", 1)
    if dimensions == 2:
        return Hierarchical(Collective(process_group.get_group(0)), Collective(process_group.get_group(1)))
    if dimensions > 2:
        raise ValueError(
            f"process_group is a DeviceMesh of {dimensions} dimensions; give the one that replicas span, mesh['name'], "
            "or two: between nodes, and inside a node"
        )
    return Collective(process_group)


def forgotten_world_size() -> int:
    """Returns the number of ranks that a launcher started if there is no process group, otherwise 1.

    Only the first of them learns it, so that one says it.

    Examples:
        >>> forgotten_world_size()
        1
    """
    if dist.is_available() and dist.is_initialized():
        return 1
    return int(os.environ.get("WORLD_SIZE", "1")) if os.environ.get("RANK", "0") == "0" else 1


def _placements(tensor: Tensor) -> Iterator[tuple[Any, int, Any]]:
    """Yields the mesh of a DTensor, the number of each of its dimensions, and how the tensor is placed over it."""
    for number, placement in enumerate(getattr(tensor, "placements", ())):
        yield tensor.device_mesh, number, placement  # type: ignore[attr-defined]


def sharded_over(tensor: Tensor) -> frozenset[int]:
    """Returns the global ranks that a DTensor is sharded over, this rank included; empty if it is not sharded.

    Examples:
        >>> sharded_over(torch.zeros(3))
        frozenset()
    """
    ranks: set[int] = set()
    for mesh, number, placement in _placements(tensor):
        if not placement.is_replicate():
            ranks |= set(dist.get_process_group_ranks(mesh.get_group(number)))
    return frozenset(ranks) if len(ranks) > 1 else frozenset()


def cuts_of(tensor: Tensor) -> list[tuple[Any, int, tuple[int, ...]]]:
    """Returns how the matrices of a DTensor, its last two dimensions, are cut over ranks, the last cut first.

    Each cut is a process group, the dimension, and the length of each rank's part in the piece that was cut.

    Raises:
        ValueError: the parts are not those that torch's FSDP2 and tensor parallelism make.

    Examples:
        >>> cuts_of(torch.zeros(3, 2))
        []
    """
    found, lengths = [], list(tensor.shape)
    placements = list(_placements(tensor))
    # _StridedShard: FSDP2 cuts what tensor parallelism, which has a later dimension of the mesh, has cut before
    for mesh, number, placement in sorted(placements, key=lambda each: hasattr(each[2], "split_factor")):
        dimension = _cut_dimension(placement)
        if dimension is not None:
            ranks, length = mesh.size(number), lengths[dimension]
            each = -(-length // ranks)
            parts = tuple(max(0, min(each, length - rank * each)) for rank in range(ranks))
            lengths[dimension] = parts[mesh.get_local_rank(number)]
            if dimension >= len(lengths) - 2 and ranks > 1:
                found.append((mesh.get_group(number), dimension, parts))
    if placements and lengths != list(tensor.to_local().shape):  # type: ignore[attr-defined]
        cuts = [placement for _, _, placement in placements]
        raise ValueError(
            f"a parameter of shape {list(tensor.shape)} is sharded as {cuts} into parts that DeMo cannot follow; "
            "give such parameters another update than 'muon'"
        )
    return found[::-1]


def _cut_dimension(placement: Any) -> int | None:
    """Returns the dimension that a placement cuts. `is_shard` is False for FSDP2 over tensor parallelism."""
    return getattr(placement, "dim", None)


def groups_of_copies(tensor: Tensor) -> list[Any]:
    """Returns the process groups of several ranks that hold the same part of a DTensor, this rank included.

    Examples:
        >>> groups_of_copies(torch.zeros(3))
        []
    """
    return [
        mesh.get_group(number)
        for mesh, number, placement in _placements(tensor)
        if placement.is_replicate() and mesh.size(number) > 1
    ]


def shard_of(tensor: Tensor) -> tuple[int, int]:
    """Returns the number of this process's shard of a DTensor, and how many shards there are.

    Examples:
        >>> shard_of(torch.zeros(3))
        (0, 1)
    """
    shard, count = 0, 1
    for mesh, number, placement in _placements(tensor):
        if _cut_dimension(placement) is not None:
            shard = shard * mesh.size(number) + mesh.get_local_rank(number)
            count *= mesh.size(number)
    return shard, count


def true_in_all_shards(mine: bool, tensors: Iterable[Tensor]) -> bool:
    """Whether `mine` is True on all ranks that hold shards of the same DTensors; those ranks call this together.

    Examples:
        >>> true_in_all_shards(True, [torch.zeros(2)])
        True
    """
    groups = {}
    for tensor in tensors:
        for mesh, number, placement in _placements(tensor):
            if _cut_dimension(placement) is not None:
                groups[mesh.get_group(number)] = mesh.device_type
    for group, device in groups.items():
        flag = torch.tensor(float(mine), device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
        mine = bool(flag)
    return mine
