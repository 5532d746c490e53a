"""Exchange over a torch.distributed process group, gloo or nccl."""

import os
import threading
import uuid
import weakref
from collections import Counter
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from demopt.exchange.hierarchical import Hierarchical
from demopt.exchange.interface import Exchange, SingleRank, gather_values
from demopt.exchange.liveness import Liveness

dist: Any = getattr(torch, "distributed", None)  # a build of torch may lack it, or all that is in it
_FIRST = threading.Lock()  # of threads that make the first Collective at once
_LIVENESS: "weakref.WeakKeyDictionary[Any, Liveness]" = weakref.WeakKeyDictionary()  # one per default process group
#: Groups that `duplicate` made and no Collective has now, with their `_calls`, by kind and name; per default group.
_IDLE: "weakref.WeakKeyDictionary[Any, dict[tuple[str, str], Any]]" = weakref.WeakKeyDictionary()
_THREADS: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()  # the last thread to exchange on a group


class Collective(Exchange):
    """Ranks of a process group, or of one dimension of a DeviceMesh; every call is one collective.

    `timeout` (seconds) overrides the group's. Tensors on a device that no backend of the group serves, such as an
    accelerator with only gloo, travel through the host, where their results stay. "cpu:gloo,cuda:nccl" serves both.

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
        pg = process_group.get_group() if hasattr(process_group, "get_group") else process_group
        self._pg: Any = pg if pg is not None else dist.group.WORLD
        if self._pg is None:
            raise ValueError("torch.distributed is not initialised: call init_process_group before using its groups")
        self._timeout = None if timeout is None else timedelta(seconds=timeout)
        self.rank = dist.get_rank(self._pg)
        if self.rank < 0:
            raise ValueError("this process is not a member of the given process group")
        self.world_size = dist.get_world_size(self._pg)
        self._global_ranks = dist.get_process_group_ranks(self._pg)
        self.global_ranks = frozenset(self._global_ranks)
        self._liveness = _liveness()
        self._calls: Counter[str] = Counter()  # collectives that have "begun" and "ended"
        self._device = torch.device(min(self._served_types))  # of the last collective; before it, a type's current one

    def all_gather(self, message_B: Tensor) -> Tensor:
        message_B = self._served(message_B)
        gathered = torch.empty(self.world_size * message_B.numel(), dtype=message_B.dtype, device=message_B.device)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # as torch 2.13 renamed it
        self._run(message_B, gather, gathered, message_B)
        return gathered.view(self.world_size, -1)

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        sent = self._served(parts_WB).contiguous()
        received = torch.empty_like(sent)
        self._run(sent, dist.all_to_all_single, received, sent)
        return received

    def broadcast(self, data_B: Tensor, src: int) -> None:
        spread = self._served(data_B)
        self._run(spread, dist.broadcast, spread, self._global_ranks[src])
        if spread is not data_B:
            data_B.copy_(spread)

    def gather(self, message_B: Tensor, dst: int) -> Tensor | None:
        message_B, rows = self._served(message_B), None
        if self.rank == dst:
            rows = [torch.empty_like(message_B) for _ in range(self.world_size)]
        self._run(message_B, dist.gather, message_B, rows, self._global_ranks[dst])
        return None if rows is None else torch.stack(rows)

    def await_all(self, call: str) -> None:
        """Waits over the store, not the group: ranks that are elsewhere may be in another of its collectives."""
        if self.world_size > 1:
            timeout = self._timeout or _timeout_of(self._pg) or dist.default_pg_timeout
            group = dist.distributed_c10d._world.pg_names.get(self._pg, "")
            self._liveness.await_all(self._global_ranks, call, timeout.total_seconds(), group)

    def duplicate(self) -> "Collective":
        """Returns a Collective on another process group of these ranks, backend and timeout.

        Once that Collective is dropped, its group is idle. It is not destroyed, because others may still read from its
        connections; it is reused if all ranks have left it after equally many collectives, and none has failed.
        """
        ranks, backend = self._global_ranks, dist.get_backend_config(self._pg)
        timeout = self._timeout or _timeout_of(self._pg) or dist.default_pg_timeout
        idle, kind = _IDLE.setdefault(dist.group.WORLD, {}), f"{ranks} {backend} {timeout}"
        found = {key: idle.pop(key, None) for key in [*idle] if key[0] == kind}  # so that no other thread takes them
        mine = {name: group for (_, name), group in found.items() if group is not None}
        offered = {name: calls["ended"] for name, (_, calls) in mine.items()}
        told = gather_values(self, [f"demopt {uuid.uuid4()}", offered], self._device)
        name, offers = told[0]
        name = next((each for each in offers if all(theirs.get(each) == offers[each] for _, theirs in told)), name)
        pg, calls = mine.pop(name, None) or (_new_group(ranks, self.rank, backend, timeout, name), Counter())
        idle.update({(kind, name): group for name, group in mine.items()})
        twin = Collective(pg, timeout.total_seconds())
        twin._calls = calls
        weakref.finalize(twin, _leave, idle, (kind, name), pg, calls).atexit = False
        return twin

    def waiting(self) -> AbstractContextManager[None]:
        """The context of another library's collective on these ranks: its failure becomes an ExchangeError too."""
        return self._liveness.waiting(self._global_ranks, ours=False)

    @property
    def _served_types(self) -> set[str]:
        """The types of devices whose tensors a backend of the group moves."""
        return {device.type for device in self._pg._device_types}

    def _served(self, tensor: Tensor) -> Tensor:
        """Returns the tensor where a backend of the group serves it: on the host, if none serves its device."""
        served = self._served_types
        if tensor.device.type in served:
            return tensor
        if tensor.is_cpu:
            moves = f"the process group moves tensors of {', '.join(sorted(served))}; this one is on the CPU, as with"
            raise ValueError(f"{moves} state_device='cpu': give a group of backend 'gloo', or 'cpu:gloo,cuda:nccl'")
        return tensor.cpu()

    def _run(self, tensor: Tensor, collective: Any, *given: Any) -> None:
        # nccl's wait returns at once unless it has a timeout: a lost rank would then hang whoever reads the result
        timeout = self._timeout if tensor.is_cpu else self._timeout or _timeout_of(self._pg)
        self._device = tensor.device
        self._calls["begun"] += 1
        _THREADS[self._pg] = threading.get_ident()
        with self._liveness.waiting(self._global_ranks):
            work = collective(*given, group=self._pg, async_op=True)
            work.wait() if timeout is None else work.wait(timeout)
        self._calls["ended"] += 1


def _liveness() -> Liveness:
    """Returns this process's failure detection: one for all groups, because a rank may be missed in any of them."""
    world, rank, session = dist.group.WORLD, dist.get_rank(), 0
    with _FIRST:
        if world in _LIVENESS:
            return _LIVENESS[world]
        # A group that begins again, as under torchrun, has the store and the prefix of the one before.
        place = f"demopt/sessions/{dist.get_world_size()}"
        with suppress(Exception):  # a group without a store
            session = world.get_group_store().add(f"{place}/{rank}", 1)
        found = weakref.ref(world)

        def store() -> Any:
            if (alive := found()) is None or not dist.is_initialized():
                raise RuntimeError("the process group has ended")
            return dist.PrefixStore(f"{place}/{session}", alive.get_group_store())

        _LIVENESS[world] = Liveness(store, rank)
        return _LIVENESS[world]


def _new_group(ranks: list[int], rank: int, backend: str, timeout: timedelta, name: str) -> Any:
    """Returns a process group of these ranks, which call this together.

    `new_group` names a group of some ranks by the number of groups that each of them is in. That differs where ranks
    are in other groups, or where threads make theirs at once; ranks of unlike names wait for each other for ever.
    """
    torchs, store = dist.distributed_c10d, dist.distributed_c10d._get_default_store()
    pg, _ = torchs._new_process_group_helper(
        len(ranks), rank, ranks, dist.Backend(backend), store, name, timeout=timeout
    )
    torchs._world.pg_group_ranks[pg] = {each: number for number, each in enumerate(ranks)}
    return pg


def _leave(idle: dict[tuple[str, str], Any], key: tuple[str, str], pg: Any, calls: "Counter[str]") -> None:
    if calls["begun"] == calls["ended"]:
        idle[key] = pg, calls


def _timeout_of(pg: Any) -> timedelta | None:
    """Returns the group's timeout, which torch stores only in the group's backends."""
    for device in pg._device_types:
        with suppress(AttributeError, RuntimeError):  # a backend without it, or none for this device
            return pg._get_backend(device).options._timeout  # type: ignore[no-any-return]
    return None


def collectives_between(ranks: frozenset[int]) -> int:
    """Returns the number of collectives so far in all process groups that have several of these global ranks.

    Groups on which another thread exchanges, such as one that trains a model of its own, do not count.
    """
    count, here = 0, threading.get_ident()
    for pg in [*dist.distributed_c10d._world.pg_map] if len(ranks) > 1 else ():
        if len(ranks & {*dist.get_process_group_ranks(pg)}) > 1 and _THREADS.get(pg, here) == here:
            with suppress(RuntimeError):  # a backend that does not count
                count += pg._get_sequence_number_for_group()
    return count


def resolve(process_group: Any) -> Exchange:
    """Returns the exchange for None, a group, a mesh (of two dimensions: nodes, ranks of a node), or an exchange."""
    if isinstance(process_group, Exchange):
        return process_group
    if process_group is None:
        return Collective() if can_connect() and dist.is_initialized() else SingleRank()
    dimensions = getattr(process_group, "ndim", 1)
    if dimensions == 2:
        _check_nodes(process_group.mesh.tolist())
        return Hierarchical(Collective(process_group.get_group(0)), Collective(process_group.get_group(1)))
    if dimensions > 2:
        wanted = "the one that replicas span, mesh['name'], or two: between nodes, and inside a node"
        raise ValueError(f"process_group is a DeviceMesh of {dimensions} dimensions; give {wanted}")
    is_group = hasattr(process_group, "get_group")  # of a mesh
    if can_connect() and not is_group:
        outside = dist.GroupMember.NON_GROUP_MEMBER  # -100, which `new_group` gives to those outside
        is_group = isinstance(process_group, dist.ProcessGroup) or process_group is outside
    if is_group:
        return Collective(process_group)
    raise TypeError(f"process_group is {process_group!r}; give a ProcessGroup, a DeviceMesh, an Exchange, or None")


def _check_nodes(rows: list[list[int]]) -> None:
    """Raises ValueError unless the n-th ranks of all nodes are a column, in the order of nodes; torch sorts both."""
    by_rank = [*zip(*sorted(sorted(row) for row in rows), strict=True)]
    for column in zip(*rows, strict=True):
        if tuple(sorted(column)) not in by_rank:
            found = f"process_group is a DeviceMesh in which ranks {sorted(column)} are a column"
            raise ValueError(f"{found}; torch sorts ranks, so give one whose rows and columns ascend")


def can_connect() -> bool:
    """Whether this build of torch has process groups; a run in a folder needs none."""
    return dist is not None and bool(dist.is_available())


def forgotten_world_size() -> int:
    """Returns how many ranks a launcher started without a process group; 1 on all but rank 0, which warns."""
    tells = os.environ.get("RANK", "0") == "0" and not (can_connect() and dist.is_initialized())
    return int(os.environ.get("WORLD_SIZE", "1")) if tells else 1
