"""DeMo on W simulated workers: W optimizers over the same parameters, which exchange real messages.

Extraction and the route's exchange run for every worker, as on real ranks. Only `apply` runs once instead of W times:
replicas are equal, so the first worker's update, and the state that its update rule keeps, serve all workers.
"""

from __future__ import annotations

import time
from typing import Any

from demopt.exchange.threads import Threads
from demopt.optim.demo import DeMo
from demopt.simulate.method import Fleet, Method
from demopt.train.method import Cost, demo_groups


class DeMoWorkers(Method):
    """W optimizers that share parameters; `settings` are keyword arguments of `DeMo`, and `others_update`, with muon.

    Examples:
        >>> import torch
        >>> layer = torch.nn.Linear(8, 2)
        >>> workers = DeMoWorkers(Fleet(layer, world_size=3), route="gather")
        >>> workers.begin(lr=1e-3)
        >>> for rank in range(3):
        ...     layer.zero_grad()
        ...     layer(torch.randn(4, 8)).square().mean().backward()
        ...     workers.take(rank)
        >>> cost = workers.finish()
        >>> cost.received_bytes == 2 * cost.payload_bytes
        True
        >>> workers.close()
    """

    bytes_rule = "messages as the route sends them, headers included, counted at the exchange"

    def __init__(self, fleet: Fleet, others_update: str = "adamw", **settings: Any) -> None:
        super().__init__(fleet)
        if settings.get("overlap") or settings.get("delay"):
            raise ValueError("workers that are simulated in turn can neither overlap nor delay their exchange")
        self._threads = Threads(fleet.world_size)
        groups = demo_groups(fleet.model, settings.get("update", "signum"), others_update)
        self._shares = [group.pop("share") for group in groups]
        self.optimizers = [
            DeMo([dict(group) for group in groups], process_group=exchange, **settings)
            for exchange in self._threads.exchanges
        ]
        self._messages: list[Any] = [None] * fleet.world_size

    def begin(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group, share in zip(optimizer.param_groups, self._shares, strict=True):
                group["lr"] = lr * share

    def take(self, rank: int) -> None:
        self._messages[rank] = self.optimizers[rank].extract()

    def finish(self) -> Cost:
        leader, *others = self.optimizers
        for parameter in self.parameters:
            parameter.grad = None  # workers share it: the handshake would see one gradient on all ranks
        began = time.perf_counter()
        results = self._threads.run(
            lambda exchange: self.optimizers[exchange.rank].exchange(self._messages[exchange.rank])
        )
        # All workers' computation (such as the owners' reductions) ran here; one worker's share is 1/W of it.
        exchange_seconds = (time.perf_counter() - began) / self.fleet.world_size
        leader.apply(results[0])
        for optimizer in others:
            optimizer.follow(leader)
        stats = leader.stats
        apply_seconds = stats.seconds["apply"]
        return Cost(stats.payload_bytes, stats.sent_bytes, stats.received_bytes, apply_seconds, exchange_seconds)

    def close(self) -> None:
        self._threads.close()
