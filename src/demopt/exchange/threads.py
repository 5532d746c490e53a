"""Ranks as threads of one process, for tests and simulation: no ports, no processes."""

import threading

import torch
from torch import Tensor

from demopt.errors import ExchangeError
from demopt.exchange.interface import Exchange


class _Meeting:
    """The place where threads leave their messages and wait for each other."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self.barrier = threading.Barrier(world_size)
        self.timeout = timeout
        self.arrived: list[Tensor | None] = [None] * world_size

    def swap(self, rank: int, message: Tensor) -> list[Tensor]:
        """Returns all messages; the second wait keeps a fast thread from overwriting what a slow one still reads."""
        self.arrived[rank] = message
        self._wait()
        messages = [arrived for arrived in self.arrived if arrived is not None]
        self._wait()
        self.arrived[rank] = None
        return messages

    def _wait(self) -> None:
        try:
            self.barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            missing = [str(rank) for rank, message in enumerate(self.arrived) if message is None]
            who = f"no message from rank {', '.join(missing)}" if missing else "another rank gave up"
            raise ExchangeError(f"{who} within {self.timeout:g} s") from None


class _Thread(Exchange):
    def __init__(self, rank: int, world_size: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.world_size = world_size
        self._meeting = meeting

    def all_gather(self, message_B: Tensor) -> Tensor:
        messages = self._meeting.swap(self.rank, message_B)
        if len({message.numel() for message in messages}) > 1:
            raise ExchangeError(f"ranks sent messages of different lengths: {[m.numel() for m in messages]} bytes")
        return torch.stack(messages)

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        parts = self._meeting.swap(self.rank, parts_WB)
        if len({part.shape for part in parts}) > 1:
            raise ExchangeError(f"ranks sent parts of different lengths: {[p.shape[1] for p in parts]} bytes")
        return torch.stack([part[self.rank] for part in parts])

    def all_reduce(self, values: Tensor) -> None:
        values.copy_(torch.stack(self._meeting.swap(self.rank, values.clone())).sum(0))

    def broadcast(self, data_B: Tensor, src: int) -> None:
        data_B.copy_(self._meeting.swap(self.rank, data_B.clone())[src])


def thread_exchanges(world_size: int, timeout: float = 60.0) -> list[Exchange]:
    """Returns one exchange for each of `world_size` threads; waits raise ExchangeError after `timeout` seconds.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> message = torch.zeros(3, dtype=torch.uint8)
        >>> with ThreadPoolExecutor(2) as pool:
        ...     list(pool.map(lambda exchange: exchange.all_gather(message).shape[0], thread_exchanges(2)))
        [2, 2]
    """
    if world_size < 1:
        raise ValueError(f"world is {world_size}; it takes at least one rank")
    meeting = _Meeting(world_size, timeout)
    return [_Thread(rank, world_size, meeting) for rank in range(world_size)]
