"""Counts collectives and their bytes where torch dispatches them: for every caller and every backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from demopt.exchange.wrappers import all_reduce_bytes


@dataclass
class Traffic:
    """Calls and bytes of a rank: `payload_bytes` is what it put in, the others what then travels, as `Meter` counts.

    `unknown` is the number of collectives whose bytes cannot be counted.
    """

    world_size: int
    collectives: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    unknown: int = 0

    def add(self, name: str, own: int) -> None:
        """Count one call into which this rank put `own` bytes (all_to_all: for all ranks together).

        Example:
            >>> traffic = Traffic(world_size=4)
            >>> traffic.add("allreduce_", 1000)
            >>> traffic.collectives, traffic.received_bytes
            (1, 1500)
        """
        self.collectives += 1
        travels = _TRAVELS.get(name)
        if travels is None:
            self.unknown += 1
            return
        sent, received = travels(own, self.world_size)
        self.payload_bytes += own
        self.sent_bytes += sent
        self.received_bytes += received


def _reduced(own: int, world_size: int) -> tuple[int, int]:
    return (all_reduce_bytes(own, world_size),) * 2


def _told(own: int, world_size: int) -> tuple[int, int]:
    return (world_size - 1) * own, 0  # as the source, which rank 0 is in DDP


def _gathered(own: int, world_size: int) -> tuple[int, int]:
    return ((world_size - 1) * own,) * 2


def _scattered(own: int, world_size: int) -> tuple[int, int]:
    return ((world_size - 1) * own // world_size,) * 2


# By collective: the argument that holds this rank's input; and the bytes that it then sends and receives.
_INPUT = {
    "broadcast_": 0,
    "allreduce_": 0,
    "allreduce_coalesced_": 0,
    "allgather_": 1,
    "_allgather_base_": 1,
    "alltoall_base_": 1,
}
_INPUT |= {"_reduce_scatter_base_": 1, "reduce_scatter_": 1, "allgather_into_tensor_coalesced_": 1, "alltoall_": 1}
_TRAVELS: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "allreduce_": _reduced,
    "allreduce_coalesced_": _reduced,
    "broadcast_": _told,
    "allgather_": _gathered,
    "_allgather_base_": _gathered,
    "allgather_into_tensor_coalesced_": _gathered,
    "alltoall_": _scattered,
    "alltoall_base_": _scattered,
    "reduce_scatter_": _scattered,
    "_reduce_scatter_base_": _scattered,
}


class _Counting(TorchDispatchMode):
    """Counts the collectives that this thread dispatches."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.namespace == "c10d":
            name = func._schema.name.partition("::")[2]
            own = _bytes(args[_INPUT[name]]) if name in _INPUT else 0
            self._traffic.add(name, own)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(world_size: int) -> Iterator[Traffic]:
    """Count the collectives called inside, and those that a finished collective starts from its own thread.

    Example:
        >>> with counted(world_size=2) as traffic:
        ...     pass
        >>> traffic.collectives
        0
    """
    traffic, home, plain = Traffic(world_size), threading.get_ident(), dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == home:
            return plain(*args, **kwargs)
        with _Counting(traffic):  # PowerSGD's first starts the second and third, in a thread of gloo
            return plain(*args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        with _Counting(traffic):
            yield traffic
    finally:
        dist.all_reduce = plain


def _bytes(found: Tensor | Sequence[Any]) -> int:
    if isinstance(found, Tensor):
        return found.nbytes
    return sum(_bytes(part) for part in found)
