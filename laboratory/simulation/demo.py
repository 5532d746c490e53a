"""DeMo on W simulated workers: W optimizers over the same parameters, which exchange real messages.

Extraction and exchange run for every worker, as on real ranks. Only `apply` runs once instead of W times: replicas are
equal, so the first worker's update, and the state of its update rule, serve all workers.
"""

from typing import Any

from torch import Tensor

import demopt
from demopt.exchange import Threads
from laboratory.simulation.workers import Cost, Method, Rates, SimulatedWorkers


class DeMoWorkers(Method):
    """W optimizers that share parameters; `settings` are keywords of `DeMo`.

    Under update "muon", `others_update` is the rule of the parameters that are not for it.

    Examples:
        >>> import torch
        >>> layer = torch.nn.Linear(8, 2)
        >>> workers = DeMoWorkers(SimulatedWorkers(layer, world_size=3))
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

    def __init__(self, workers: SimulatedWorkers, others_update: str = "adamw", **settings: Any) -> None:
        super().__init__(workers)
        settings.pop("route", None)  # in studies from the time when DeMo had several
        self._threads = Threads(workers.world_size)
        groups: list[dict[str, Any]] = [{"params": self.parameters, "lr": 1.0}]
        if settings.get("update") == "muon":
            groups = demopt.muon_groups(workers.model, lr=1.0, others_update=others_update)
        self.optimizers = [
            demopt.DeMo([dict(group) for group in groups], process_group=exchange, **settings)
            for exchange in self._threads.exchanges
        ]
        self._rates = Rates(self.optimizers)
        self._messages: dict[int, Tensor] = {}

    def begin(self, lr: float) -> None:
        self._rates.set(lr)

    def take(self, rank: int) -> None:
        self._messages[rank] = self.optimizers[rank].extract()

    def finish(self) -> Cost:
        leader, *others = self.optimizers
        results = self._threads.run(
            lambda exchange: self.optimizers[exchange.rank].exchange(self._messages[exchange.rank])
        )
        leader.apply(results[0])
        for optimizer in others:
            _subtract_sent(optimizer, leader.stats.skipped)
        stats = leader.stats
        return Cost(stats.payload_bytes, stats.sent_bytes, stats.received_bytes)

    def close(self) -> None:
        self._threads.close()


def _subtract_sent(optimizer: demopt.DeMo, skipped: bool) -> None:
    """Ends the round of a worker whose parameters another one has just updated: only its momentum is left."""
    replicator = optimizer.replicator
    if skipped:
        replicator.rollback()
    else:
        replicator.mark_applied()
    optimizer.state[optimizer.param_groups[0]["params"][0]]["step"].add_(1)  # the counter that all entries share
