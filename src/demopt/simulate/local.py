"""LocalDeMo on W simulated workers: W optimizers over one model, into which each worker's own weights are swapped.

Local steps, extraction and the route's exchange run for every worker, as on real ranks. Without delay the workers hold
the shared weights once, and `apply` runs once instead of W times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from demopt.exchange.threads import Threads
from demopt.optim.local import LocalDeMo
from demopt.optim.stats import Stats
from demopt.simulate.method import Fleet, Method, set_rate
from demopt.train.method import Cost, shares_of

NOTHING = Cost(0, 0, 0, 0.0, 0.0)

MakeInner = Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]


class LocalWorkers(Method):
    """W workers that take their own steps and exchange movements; `settings` are keyword arguments of `LocalDeMo`.

    `make_inner` builds one worker's inner optimizers over the model's parameters. The learning rates that it gives
    them are factors: `begin(lr)` sets each to `lr` times its own.

    Examples:
        >>> layer = nn.Linear(8, 2)
        >>> fleet = Fleet(layer, world_size=3)
        >>> workers = LocalWorkers(fleet, lambda own: [torch.optim.AdamW(own, lr=1.0)], sync_every=2)
        >>> costs = []
        >>> for _ in range(2):
        ...     workers.begin(lr=1e-3)
        ...     for rank in range(3):
        ...         workers.enter(rank)
        ...         layer.zero_grad()
        ...         layer(torch.randn(4, 8)).square().mean().backward()
        ...         workers.take(rank)
        ...     costs.append(workers.finish())
        >>> [cost.received_bytes == 2 * cost.payload_bytes > 0 for cost in costs]
        [False, True]
        >>> workers.close()
    """

    bytes_rule = "every H steps messages as the route sends them, headers included, counted at the exchange"

    def __init__(self, fleet: Fleet, make_inner: MakeInner, **settings: Any) -> None:
        super().__init__(fleet)
        self._delayed = bool(settings.get("delay"))
        self._threads = Threads(fleet.world_size)
        self.optimizers = [
            _Worker(make_inner(self.parameters), process_group=exchange, **settings)
            for exchange in self._threads.exchanges
        ]
        self._shares = shares_of(self.optimizers[:1])
        self._own = [[parameter.detach().clone() for parameter in self.parameters] for _ in self.optimizers]
        self._owed = NOTHING  # with delay: what rounds cost that were applied for an evaluation
        if not self._delayed:
            for optimizer in self.optimizers[1:]:
                optimizer.share(self.optimizers[0])
        self._threads.run(lambda exchange: self.optimizers[exchange.rank].meet())

    def begin(self, lr: float) -> None:
        for optimizer in self.optimizers:
            set_rate([optimizer], lr, self._shares)

    def enter(self, rank: int) -> None:
        _copy(self._own[rank], self.parameters)

    def take(self, rank: int) -> None:
        if self._delayed:
            self.optimizers[rank].step()  # its exchange waits for the others' in the background
        else:
            self.optimizers[rank].local_step()
        _copy(self.parameters, self._own[rank])

    def finish(self) -> Cost:
        leader = self.optimizers[0]
        if not self._delayed:
            return self._round() if leader.due or self.last else NOTHING
        seconds = leader.stats.seconds
        spent = seconds.get("extract", 0.0) + seconds.get("apply", 0.0)
        cost = _sum(self._owed, _cost(leader.stats, spent, seconds.get("exchange", 0.0)))
        self._owed = NOTHING
        if not self.last:
            return cost
        cost = _sum(cost, self._flush())
        return _sum(cost, self._round()) if leader.local_steps else cost

    def settle(self) -> None:
        if self._delayed:
            self._owed = _sum(self._owed, self._flush())
        with self.optimizers[0].shared():
            weights = [parameter.detach().clone() for parameter in self.parameters]
        _copy(weights, self.parameters)

    def close(self) -> None:
        self._threads.close()

    def _round(self) -> Cost:
        """Runs a round at once: every worker's message, one exchange, and the shared weights moved by it."""
        messages = [worker.extract() for worker in self._each()]
        for parameter in self.parameters:
            parameter.grad = None
        began = time.perf_counter()
        results = self._threads.run(lambda exchange: self.optimizers[exchange.rank].exchange(messages[exchange.rank]))
        # All workers' computation (such as the owners' reductions) ran here; one worker's share is 1/W of it.
        seconds = (time.perf_counter() - began) / self.fleet.world_size
        leader = self.optimizers[0]
        for worker, result in zip(self._each(), results, strict=True):
            if worker is leader or self._delayed:
                worker.apply(result)
            else:
                worker.follow(leader)
        spent = leader.stats.seconds
        return _cost(leader.stats, spent["extract"] + spent["apply"], seconds)

    def _flush(self) -> Cost:
        """With delay: applies the round in flight, if there is one."""
        began, leader = time.perf_counter(), self.optimizers[0]
        before = leader.stats
        for worker in self._each():
            worker.flush()
        if leader.stats is before:
            return NOTHING
        seconds = (time.perf_counter() - began) / self.fleet.world_size
        return replace(_cost(leader.stats, 0.0, seconds), payload_bytes=0)  # counted when it was sent

    def _each(self) -> Iterator[_Worker]:
        """Yields each worker with its own weights in the model, and keeps what it makes of them."""
        for rank, worker in enumerate(self.optimizers):
            self.enter(rank)
            yield worker
            _copy(self.parameters, self._own[rank])


class _Worker(LocalDeMo):
    """One of the optimizers; its round is run by `LocalWorkers`, for all workers together."""

    def meet(self) -> None:
        """Runs the handshake, which all ranks do together, before local steps, which they do in turn."""
        self._codec.agree()

    def _look(self) -> None:
        """Does not compare gradients: workers step in turn, and a worker that waits for the others waits for ever."""

    def share(self, leader: _Worker) -> None:
        """Takes the leader's shared weights for its own: one copy for all workers."""
        for mine, other in zip(self._weights.shared, leader._weights.shared, strict=True):
            mine.data = other.data

    @torch.no_grad()
    def follow(self, leader: _Worker) -> None:
        """Replaces `apply` where the leader has just applied the round to the weights that are shared with it."""
        self._codec.follow(leader._codec)
        self._stats = self._codec.stats
        self._go_on()


def _cost(stats: Stats, compute: float, exchange: float) -> Cost:
    return Cost(stats.payload_bytes, stats.sent_bytes, stats.received_bytes, compute, exchange)


def _sum(one: Cost, other: Cost) -> Cost:
    pairs = ((a or 0, b or 0) for a, b in zip(vars(one).values(), vars(other).values(), strict=True))
    return Cost(*(a + b for a, b in pairs))


@torch.no_grad()
def _copy(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one)
