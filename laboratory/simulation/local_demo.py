"""LocalDeMo on W simulated workers. Each has all that a real rank has, and runs its rounds by `step`, in a thread."""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from demopt import LocalDeMo
from demopt.exchange import Threads
from laboratory.simulation.workers import Cost, Method, Optimizer, Rates, SimulatedWorkers, copy_weights


class LocalDeMoWorkers(Method):
    """W workers, each with a copy of the model, that exchange pseudo-gradients; `settings` are keywords of `LocalDeMo`.

    `make_inner` makes a model's inner optimizers; their rates are factors on a step's rate (`Rates`).

    Examples:
        >>> import torch
        >>> make_inner = lambda model: [torch.optim.AdamW(model.parameters(), lr=1.0)]
        >>> workers = LocalDeMoWorkers(SimulatedWorkers(nn.Linear(8, 2), world_size=3), make_inner, sync_every=2)
        >>> costs = []
        >>> for _ in range(2):
        ...     workers.begin(lr=1e-3)
        ...     for rank in range(3):
        ...         workers.model_of(rank).zero_grad()
        ...         workers.model_of(rank)(torch.randn(4, 8)).square().mean().backward()
        ...         workers.take(rank)
        ...     costs.append(workers.finish())
        >>> [cost.received_bytes == 2 * cost.payload_bytes > 0 for cost in costs]
        [False, True]
        >>> workers.close()
    """

    bytes_rule = "every H steps messages as the route sends them, headers included, counted at the exchange"

    def __init__(
        self, workers: SimulatedWorkers, make_inner: Callable[[nn.Module], list[Optimizer]], **settings: Any
    ) -> None:
        super().__init__(workers)
        self._threads = Threads(workers.world_size)
        self._models = [copy.deepcopy(workers.model) for _ in range(workers.world_size)]
        self.optimizers = [
            LocalDeMo(make_inner(model), process_group=exchange, **settings)
            for model, exchange in zip(self._models, self._threads.exchanges, strict=True)
        ]
        self._rates = Rates(self.optimizers)
        self._ends_round = False  # whether the step that has begun is the last before a round

    def begin(self, lr: float) -> None:
        leader = self.optimizers[0]
        self._ends_round = leader.local_steps + 1 >= leader.sync_every
        self._rates.set(lr)

    def model_of(self, rank: int) -> nn.Module:
        return self._models[rank]

    def take(self, rank: int) -> None:
        if not self._ends_round:
            self.optimizers[rank].local_step()

    def finish(self) -> Cost:
        cost = Cost()
        if self._ends_round:
            cost = self._together(lambda optimizer: optimizer.step())
        if self.last:
            cost += self.prepare_evaluation()
            if self.optimizers[0].local_steps:
                cost += self._together(lambda optimizer: optimizer.apply(optimizer.exchange(optimizer.extract())))
        return cost

    def prepare_evaluation(self) -> Cost:
        cost = Cost()
        if any(optimizer.replicator.in_flight for optimizer in self.optimizers):
            cost = self._together(lambda optimizer: optimizer.flush())
        with self.optimizers[0].shared():
            copy_weights(self._models[0].parameters(), self.workers.model.parameters())
        return cost

    def state(self) -> dict[str, Any] | None:
        if self.optimizers[0].local_steps or self.optimizers[0].replicator.in_flight:
            return None  # between rounds all workers have the same weights
        optimizers = self._threads.run(lambda exchange: self.optimizers[exchange.rank].state_dict())
        return {"model": self._models[0].state_dict(), "optimizers": optimizers}

    def load(self, state: dict[str, Any]) -> None:
        for model in self._models:
            model.load_state_dict(state["model"])
        saved = state["optimizers"]
        self._threads.run(lambda exchange: self.optimizers[exchange.rank].load_state_dict(saved[exchange.rank]))

    def close(self) -> None:
        self._threads.close()

    def _together(self, work: Callable[[LocalDeMo], Any]) -> Cost:
        """Runs `work` on all workers, who meet in it; returns the first one's cost."""
        self._threads.run(lambda exchange: work(self.optimizers[exchange.rank]))
        stats = self.optimizers[0].stats
        return Cost(stats.payload_bytes, stats.sent_bytes, stats.received_bytes)
