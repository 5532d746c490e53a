"""Counts the collectives of any code, DDP's too, where torch dispatches them; their bytes by the rules of `Meter`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from demopt.exchange.wrappers import all_gather_bytes, all_reduce_bytes, all_to_all_bytes

# By collective: the argument that holds this rank's input, and its rule.
_RULES = {
    "allreduce_": (0, all_reduce_bytes),
    "allreduce_coalesced_": (0, all_reduce_bytes),
    "broadcast_": (0, all_gather_bytes),  # the source sends it to each other rank
    "allgather_": (1, all_gather_bytes),
    "_allgather_base_": (1, all_gather_bytes),
    "allgather_into_tensor_coalesced_": (1, all_gather_bytes),
    "alltoall_": (1, all_to_all_bytes),
    "alltoall_base_": (1, all_to_all_bytes),
    "reduce_scatter_": (1, all_to_all_bytes),
    "_reduce_scatter_base_": (1, all_to_all_bytes),
}


@dataclass
class Traffic:
    """Calls and bytes of rank 0: `payload_bytes` is what it put in, the others what then travels.

    `unknown` is the number of collectives whose bytes cannot be counted.
    """

    collectives: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    unknown: int = 0


class _Counting(TorchDispatchMode):
    """Counts the collectives that this thread dispatches."""

    def __init__(self, traffic: Traffic, world_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traffic, self._world_size = traffic, world_size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.namespace == "c10d":
            self._count(func._schema.name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        traffic = self._traffic
        traffic.collectives += 1
        if name not in _RULES:
            traffic.unknown += 1
            return
        place, rule = _RULES[name]
        own = _bytes(args[place])
        each_way = rule(own, self._world_size)
        traffic.payload_bytes += own
        traffic.sent_bytes += each_way
        traffic.received_bytes += each_way if name != "broadcast_" else 0  # rank 0 is the source in DDP


@contextmanager
def counted(world_size: int) -> Iterator[Traffic]:
    """Count the collectives called inside, and those that a finished collective starts from its own thread.

    Examples:
        >>> with counted(world_size=2) as traffic:
        ...     pass
        >>> traffic.collectives
        0
    """
    traffic, home, plain = Traffic(), threading.get_ident(), dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == home:
            return plain(*args, **kwargs)
        with _Counting(traffic, world_size):  # PowerSGD's first starts the second and third, in a thread of gloo
            return plain(*args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        with _Counting(traffic, world_size):
            yield traffic
    finally:
        dist.all_reduce = plain


def _bytes(found: Tensor | Sequence[Any]) -> int:
    if isinstance(found, Tensor):
        return found.nbytes
    return sum(_bytes(part) for part in found)
