"""DeMo and LocalDeMo on W simulated workers. Each has all that a real rank has, and runs its rounds in a thread."""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from demopt import DeMo, LocalDeMo, muon_groups
from demopt.exchange import Exchange, Threads
from laboratory.simulation.workers import Cost, Method, Optimizer, Rates, SimulatedWorkers, copy_weights


class DemoptWorkers(Method):
    """W workers, each with a copy of the model and the optimizer that `make(model, exchange)` returns for it."""

    def __init__(self, workers: SimulatedWorkers, make: Callable[[nn.Module, Exchange], Any]) -> None:
        super().__init__(workers)
        self._threads = Threads(workers.world_size)
        self._models = [copy.deepcopy(workers.model) for _ in range(workers.world_size)]
        self.optimizers = [*map(make, self._models, self._threads.exchanges)]
        self._rates = Rates(self.optimizers)

    def begin(self, lr: float) -> None:
        self._rates.set(lr)

    def model_of(self, rank: int) -> nn.Module:
        return self._models[rank]

    def take(self, rank: int) -> None:
        """Does nothing: the step takes all gradients."""

    def finish(self) -> Cost:
        return self._together(lambda optimizer: optimizer.step())

    def prepare_evaluation(self) -> Cost:
        copy_weights(self._models[0].parameters(), self.workers.model.parameters())
        return Cost()

    def close(self) -> None:
        self._threads.close()

    def _together(self, work: Callable[[Any], Any]) -> Cost:
        """Runs `work` on all workers, who meet in it; returns the first one's cost."""
        self._threads.run(lambda exchange: work(self.optimizers[exchange.rank]))
        stats = self.optimizers[0].stats
        return Cost(stats.payload_bytes, stats.sent_bytes, stats.received_bytes)


class DeMoWorkers(DemoptWorkers):
    """DeMo; `settings` are its keywords. With update "muon", `others_update` is for parameters that Muon does not take.

    Examples:
        >>> import torch
        >>> workers = DeMoWorkers(SimulatedWorkers(nn.Linear(8, 2), world_size=3))
        >>> workers.begin(lr=1e-3)
        >>> for rank in range(3):
        ...     workers.model_of(rank)(torch.randn(4, 8)).square().mean().backward()
        >>> cost = workers.finish()
        >>> cost.received_bytes == 2 * cost.payload_bytes
        True
        >>> workers.close()
    """

    bytes_rule = "messages as the route sends them, headers included, counted at the exchange"

    def __init__(self, workers: SimulatedWorkers, others_update: str = "adamw", **settings: Any) -> None:
        settings.pop("route", None)  # in studies from when DeMo had several

        def make(model: nn.Module, exchange: Exchange) -> DeMo:
            groups: Any = [{"params": model.parameters(), "lr": 1.0}]
            if settings.get("update") == "muon":
                groups = muon_groups(model, lr=1.0, others_update=others_update)
            return DeMo(groups, process_group=exchange, **settings)

        super().__init__(workers, make)


class LocalDeMoWorkers(DemoptWorkers):
    """LocalDeMo, which exchanges pseudo-gradients; `settings` are its keywords.

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
        super().__init__(
            workers, lambda model, exchange: LocalDeMo(make_inner(model), process_group=exchange, **settings)
        )

    def finish(self) -> Cost:
        cost = super().finish()
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
            return cost + super().prepare_evaluation()

    def state(self) -> dict[str, Any] | None:
        if self.optimizers[0].local_steps or self.optimizers[0].replicator.in_flight:
            return None  # within a round: workers' weights differ, and a state has one model
        optimizers = self._threads.run(lambda exchange: self.optimizers[exchange.rank].state_dict())
        return {"model": self._models[0].state_dict(), "optimizers": optimizers}

    def load(self, state: dict[str, Any]) -> None:
        for model in self._models:
            model.load_state_dict(state["model"])
        saved = state["optimizers"]
        self._threads.run(lambda exchange: self.optimizers[exchange.rank].load_state_dict(saved[exchange.rank]))
