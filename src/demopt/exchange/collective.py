"""Exchange over a torch.distributed process group, gloo or nccl. Nothing else in or below optim/ imports it."""

import os
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from demopt.errors import ExchangeError
from demopt.exchange.hierarchical import Hierarchical
from demopt.exchange.interface import Exchange
from demopt.exchange.single_rank import SingleRank

# torch 2.13 renamed all_gather_into_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_ROLL_CALL_SECONDS = 2.0  # after a failure: how long stuck ranks have to report that they are alive


class Collective(Exchange):
    """Ranks of a process group, or of one dimension of a DeviceMesh; every call is one collective.

    `timeout` (seconds) overrides the group's. Tensors must be on the backend's device (gloo: CPU, nccl: GPU).

    Example:
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
        self._rounds = 0

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

    def duplicate(self) -> "Collective":
        """Returns a Collective on a new process group with the same ranks, backend and timeout."""
        timeout = self._timeout or _timeout_of(self._group)
        ranks, backend = sorted(self._global_ranks), dist.get_backend_config(self._group)
        if ranks != self._global_ranks:
            raise ValueError("ranks of a group that are not in ascending order cannot exchange in the background")
        group = dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
        return Collective(group, timeout=None if timeout is None else timeout.total_seconds())

    def _run(self, start: Any) -> None:
        self._rounds += 1
        begun = time.monotonic()
        try:
            work = start()
            work.wait() if self._timeout is None else work.wait(self._timeout)
        except (RuntimeError, ValueError) as error:
            waited = time.monotonic() - begun
            raise ExchangeError(f"{self._absent()} after {waited:.1f} s ({_first_line(error)})") from error

    def _absent(self) -> str:
        """Names the ranks that do not answer: stuck ranks report in the store, and those that do not are missing.

        Runs only after a failure, in a thread, because the store may be gone with its host.
        """
        missing: list[int] | None = None

        def roll_call() -> None:
            nonlocal missing
            store = self._group.get_group_store()
            store.set(self._key(self.rank), "here")
            time.sleep(_ROLL_CALL_SECONDS)
            missing = [rank for rank in range(self.world_size) if not store.check([self._key(rank)])]

        def safely() -> None:
            try:
                roll_call()
            except Exception:  # without a store nobody can be named; the first error is the one to report
                return

        thread = threading.Thread(target=safely, daemon=True)
        thread.start()
        thread.join(2 * _ROLL_CALL_SECONDS)
        if missing:
            return f"no answer from rank {', '.join(map(str, missing))} of {self.world_size}"
        return f"exchange among {self.world_size} ranks failed"

    def _key(self, rank: int) -> str:
        return f"demopt/stuck/{self._rounds}/{rank}"


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


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]


def resolve(process_group: Any) -> Exchange:
    """Returns the exchange for a user's `process_group`: None, a group, a mesh, or an exchange.

    A mesh of two dimensions is (nodes, ranks of a node).

    Example:
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

    Example:
        >>> forgotten_world_size()
        1
    """
    if dist.is_available() and dist.is_initialized():
        return 1
    return int(os.environ.get("WORLD_SIZE", "1"))


def sharded_over(tensor: Tensor) -> frozenset[int]:
    """Returns the global ranks that a DTensor is sharded over, this rank included; empty if it is not sharded.

    Example:
        >>> sharded_over(torch.zeros(3))
        frozenset()
    """
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return frozenset()
    ranks: set[int] = set()
    for dimension, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if not placement.is_replicate():
            ranks |= set(dist.get_process_group_ranks(mesh.get_group(dimension)))
    return frozenset(ranks) if len(ranks) > 1 else frozenset()


def true_in_all_shards(mine: bool, tensors: Iterable[Tensor]) -> bool:
    """Whether `mine` is True on all ranks that hold shards of the same DTensors; those ranks call this together.

    Example:
        >>> true_in_all_shards(True, [torch.zeros(2)])
        True
    """
    groups = {}
    for tensor in tensors:
        for dimension, placement in enumerate(getattr(tensor, "placements", ())):
            if placement.is_shard():
                mesh = tensor.device_mesh  # type: ignore[attr-defined]
                groups[mesh.get_group(dimension)] = mesh.device_type
    for group, device in groups.items():
        flag = torch.tensor(float(mine), device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
        mine = bool(flag)
    return mine
