"""Exchanges around an exchange: to count bytes, to wait as a slow link would, to break as a bad one would."""

import time
from collections.abc import Callable

from torch import Tensor

from demopt.exchange.interface import Exchange


class _Wrapper(Exchange):
    """Passes everything on to `inner`."""

    def __init__(self, inner: Exchange) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world = inner.world
        self.members = inner.members
        self.leads = inner.leads

    def all_gather(self, message_B: Tensor) -> Tensor:
        return self.inner.all_gather(message_B)

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        return self.inner.all_to_all(parts_WB)

    def all_reduce(self, values: Tensor) -> None:
        self.inner.all_reduce(values)

    def broadcast(self, data_B: Tensor, source: int) -> None:
        self.inner.broadcast(data_B, source)

    def apart(self) -> Exchange:
        self.inner = self.inner.apart()
        return self

    def average(self, gradients: list[Tensor]) -> None:
        self.inner.average(gradients)

    @property
    def inside(self) -> Exchange | None:
        return self.inner.inside


def all_reduce_bytes(size: int, world: int) -> int:
    """What each rank sends, and receives, in a ring all-reduce of `size` bytes: a reduce-scatter and an all-gather.

    Example:
        >>> all_reduce_bytes(size=1000, world=4)
        1500
    """
    return -(-2 * (world - 1) * size // world)


class Meter(_Wrapper):
    """Counts calls and the bytes that this rank sends and receives.

    An all-gather of B bytes sends and receives (W - 1) B on each rank, in a ring as in pairs. Where ranks are
    nodes, the process that speaks for its node counts what goes between nodes.

    Example:
        >>> import torch
        >>> from demopt.exchange import Alone
        >>> meter = Meter(Alone())
        >>> _ = meter.all_gather(torch.zeros(3, dtype=torch.uint8))
        >>> meter.calls, meter.sent_bytes, meter.received_bytes
        (1, 0, 0)
    """

    def __init__(self, inner: Exchange) -> None:
        super().__init__(inner)
        self.calls = 0
        self.sent_bytes = 0
        self.received_bytes = 0

    @property
    def bytes_so_far(self) -> tuple[int, int]:
        """Sent and received."""
        return self.sent_bytes, self.received_bytes

    def all_gather(self, message_B: Tensor) -> Tensor:
        """Counted, then passed on."""
        self._count((self.world - 1) * message_B.nbytes, (self.world - 1) * message_B.nbytes)
        return super().all_gather(message_B)

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        """Counted, then passed on; the part for this rank itself stays at home."""
        self._count(parts_WB[0].nbytes * (self.world - 1), parts_WB[0].nbytes * (self.world - 1))
        return super().all_to_all(parts_WB)

    def all_reduce(self, values: Tensor) -> None:
        """Counted as a ring's: 2 (W - 1) / W of the values each way, rounded up; then passed on."""
        ring = all_reduce_bytes(values.nbytes, self.world)
        self._count(ring, ring)
        super().all_reduce(values)

    def broadcast(self, data_B: Tensor, source: int) -> None:
        """Counted as the source sending to each of the others, then passed on."""
        mine = self.rank == source
        self._count((self.world - 1) * data_B.nbytes if mine else 0, 0 if mine else data_B.nbytes)
        super().broadcast(data_B, source)

    def _count(self, sent: int, received: int) -> None:
        if not self.leads:
            return
        self.calls += 1
        self.sent_bytes += sent
        self.received_bytes += received


class Delay(_Wrapper):
    """Waits before each call as a link would: `latency_seconds`, and the received bytes at `bytes_per_second`.

    Example:
        >>> import torch
        >>> from demopt.exchange import Alone
        >>> Delay(Alone(), latency_seconds=0.001).all_gather(torch.zeros(3, dtype=torch.uint8)).shape
        torch.Size([1, 3])
    """

    def __init__(self, inner: Exchange, latency_seconds: float = 0.0, bytes_per_second: float = float("inf")) -> None:
        super().__init__(inner)
        self._latency_seconds = latency_seconds
        self._bytes_per_second = bytes_per_second

    def all_gather(self, message_B: Tensor) -> Tensor:
        """After the time that W - 1 messages take."""
        self._wait((self.world - 1) * message_B.nbytes)
        return super().all_gather(message_B)

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        """After the time that the other ranks' parts take."""
        self._wait((self.world - 1) * parts_WB[0].nbytes)
        return super().all_to_all(parts_WB)

    def all_reduce(self, values: Tensor) -> None:
        """After the time that a ring takes."""
        self._wait(all_reduce_bytes(values.nbytes, self.world))
        super().all_reduce(values)

    def broadcast(self, data_B: Tensor, source: int) -> None:
        """After the time that the data takes."""
        self._wait(data_B.nbytes)
        super().broadcast(data_B, source)

    def _wait(self, received: int) -> None:
        time.sleep(self._latency_seconds + received / self._bytes_per_second)


class Faulty(_Wrapper):
    """Hands what was gathered to `damage`, which returns what arrives instead, or raises.

    Example:
        >>> import torch
        >>> from demopt.exchange import Alone
        >>> faulty = Faulty(Alone(), damage=lambda messages: messages[:, :-1])
        >>> faulty.all_gather(torch.zeros(3, dtype=torch.uint8)).shape
        torch.Size([1, 2])
    """

    def __init__(self, inner: Exchange, damage: Callable[[Tensor], Tensor]) -> None:
        super().__init__(inner)
        self._damage = damage

    def all_gather(self, message_B: Tensor) -> Tensor:
        """What `damage` makes of the gathered messages, which are a copy of its own."""
        return self._damage(super().all_gather(message_B).clone())

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        """What `damage` makes of the parts that arrived."""
        return self._damage(super().all_to_all(parts_WB).clone())
