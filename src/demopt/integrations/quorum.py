"""The workers of a quorum of torchft, and exchanges over its process group, which is rebuilt for every quorum.

All private names of torchft's Manager that demopt needs are used here (torchft 0.2.0).

Shapes: W workers, B bytes.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from demopt.errors import ExchangeError, first_line
from demopt.exchange import Exchange


class QuorumExchange(Exchange):
    """The workers of a quorum. `seconds`: the timeout of a call; None: that of the process group.

    Any error closes the connections to all workers, so that none of them waits for another.
    """

    def __init__(self, process_group: Any, seconds: float | None = None) -> None:
        self._whole = process_group
        self._parent = weakref.ref(process_group.parent)  # gloo closes connections when nobody holds the group any more
        self._timeout = None if seconds is None else timedelta(seconds=seconds)
        self.rank = self._group.rank()
        self.world_size = self._group.size()

    @property
    def _group(self) -> Any:
        """torch's own group of this quorum; None once it is closed."""
        return self._parent()

    def all_gather(self, message_B: Tensor) -> Tensor:
        rows = [torch.empty_like(message_B) for _ in range(self.world_size)]
        self._run(lambda: self._group.allgather([rows], [message_B.contiguous()], self._options(AllgatherOptions())))
        return torch.stack(rows)

    def broadcast(self, data_B: Tensor, src: int) -> None:
        self.broadcast_among(data_B, src, range(self.world_size))

    def broadcast_among(self, data_B: Tensor, src: int, ranks: Any) -> None:
        """Sends `data_B` from `src` to each of `ranks`; these call it, all other workers do not."""
        if self.rank == src:
            for rank in ranks:
                if rank != src:
                    self._run(lambda rank=rank: self._group.send([data_B], rank, 0))
        else:
            self._run(lambda: self._group.recv([data_B], src, 0))

    def _options(self, options: Any) -> Any:
        if self._timeout is not None:
            options.timeout = self._timeout
        return options

    def _run(self, start: Any) -> None:
        work = None
        try:
            work = start()
            work.wait() if self._timeout is None else work.wait(self._timeout)
        except (RuntimeError, ValueError, AttributeError) as error:  # AttributeError: closed after an earlier error
            del work  # it holds the connections too
            self._whole.abort()  # the calls of others then fail at once
            raise ExchangeError(f"exchange between {self.world_size} workers failed ({first_line(error)})") from error


class HealExchange(Exchange):
    """A worker and the workers that take its weights; all others wait. Only `broadcast`, from worker 0, works."""

    def __init__(self, quorum: QuorumExchange, src: int, takers: list[int]) -> None:
        self._quorum, self._src, self._takers = quorum, src, takers
        ranks = [src, *takers]
        self.rank, self.world_size = ranks.index(quorum.rank), len(ranks)

    def broadcast(self, data_B: Tensor, src: int) -> None:
        if src != 0:
            raise ValueError(f"src is {src}, and only worker 0 of a heal gives")
        self._quorum.broadcast_among(data_B, self._src, self._takers)

    def all_gather(self, message_B: Tensor) -> Tensor:
        raise NotImplementedError("weights go one way")


class Quorum:
    """The manager's quorum: the workers of the next round."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._number: int | None = None  # of the quorum whose workers have met

    @property
    def met(self) -> bool:
        """Whether the workers of the current quorum have met."""
        return bool(self._number == self._manager._quorum_id)

    def now_met(self) -> None:
        """Notes that they have."""
        self._number = self._manager._quorum_id

    def form(self) -> None:
        """Waits for a quorum. Raises ExchangeError if there is none, or if its workers cannot be reached."""
        manager = self._manager
        try:
            manager.start_quorum(allow_heal=False)  # weights travel between the workers, without pickles
            manager.wait_quorum()
        except Exception as error:  # the coordinator's errors are of several classes
            manager._quorum_future = None  # otherwise the next call would only raise this error again
            self._number = None
            raise ExchangeError(f"no quorum: {first_line(error)}") from error
        failed = manager.errored()
        if failed is not None:
            raise ExchangeError(f"the workers of the quorum were not reached: {first_line(failed.original_exception)}")

    def exchange(self, seconds: float | None = None) -> QuorumExchange:
        """Returns an exchange between the workers. `seconds`: as in `QuorumExchange`."""
        try:
            return QuorumExchange(self._manager._pg, seconds)
        except AssertionError:
            raise ExchangeError("the workers of the quorum were not reached") from None

    def vote(self) -> bool:
        """Whether the round is to be applied; True moves the manager's step on."""
        try:
            agreed: bool = self._manager.should_commit()
        except Exception as error:
            raise ExchangeError(f"no vote: {first_line(error)}") from error
        return agreed

    def refuse(self, error: Exception) -> None:
        """Votes no, so that the manager asks for a quorum with new connections."""
        self._manager.report_error(error)
        self.vote()

    def close(self) -> None:
        """Closes the connections to all workers, so that none waits for this one."""
        self._manager._pg.abort()
        self._number = None
