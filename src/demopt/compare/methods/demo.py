"""DeMo with an exchange one step late, and DeMo at the published settings with the published format's bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

import demopt
from demopt.exchange.wrappers import all_gather_bytes
from demopt.optim.presets import PUBLISHED_BYTES
from demopt.simulate.demo import DeMoWorkers
from demopt.simulate.method import Fleet
from demopt.train.method import Cost

Gradients = list[Tensor | None]
VERSIONS = {"v1": demopt.V1, "v2": demopt.V2}


class Published(DeMoWorkers):
    """DeMo at the settings of the paper's version 1 or 2; bytes are those of its format, not of this library's.

    Examples:
        >>> import torch
        >>> Published(Fleet(torch.nn.Linear(2, 2), world_size=2), version="v2", top_k=8).optimizers[0].defaults["alpha"]
        0.2
    """

    bytes_rule = "published format: 96 bits a kept coefficient, all-gathered: (W-1) 12 C K bytes up and down"

    def __init__(self, fleet: Fleet, version: str, **settings: Any) -> None:
        super().__init__(fleet, **{**VERSIONS[version], "route": "gather", **settings})

    def finish(self) -> Cost:
        cost = super().finish()
        payload = PUBLISHED_BYTES * self.optimizers[0].stats.kept
        others = all_gather_bytes(payload, self.fleet.world_size)
        return replace(cost, payload_bytes=payload, sent_bytes=others, received_bytes=others)


class Delayed(DeMoWorkers):
    """DeMo with delay=1: each step uses the gradients of the step before, which is equivalent to a late exchange.

    As in `demopt train`, the update in flight is applied before an evaluation. Only for `gradient_scale` "ema": "lr"
    would scale gradients by the learning rate of the next step.

    Examples:
        >>> import torch
        >>> Delayed(Fleet(torch.nn.Linear(2, 2), world_size=2)).finish().payload_bytes
        0
    """

    bytes_rule = f"{DeMoWorkers.bytes_rule}; the first message with the second"

    def __init__(self, fleet: Fleet, **settings: Any) -> None:
        super().__init__(fleet, **settings)
        self._arriving: list[Gradients] = []  # this step's, by worker
        self._waiting: list[Gradients] = []  # the last step's; empty once applied
        self._message: Cost | None = None  # one step's cost: all steps' are equal
        self._uncounted = 0

    def begin(self, lr: float) -> None:
        super().begin(lr)
        self._arriving = []

    def take(self, rank: int) -> None:
        self._arriving.append([parameter.grad for parameter in self.parameters])
        if self._waiting:
            self._take_late(rank)

    def finish(self) -> Cost:
        if self._waiting:
            self._message = super().finish()
        self._waiting = self._arriving
        self._uncounted += 1
        if self._message is None:
            return Cost(0, 0, 0, 0.0, 0.0)
        count, self._uncounted, cost = self._uncounted, 0, self._message
        payload, sent, received = cost.payload_bytes, cost.sent_bytes, cost.received_bytes
        return replace(cost, payload_bytes=count * payload, sent_bytes=count * sent, received_bytes=count * received)

    def settle(self) -> None:
        if self._waiting:
            for rank in range(self.fleet.world_size):
                self._take_late(rank)
            self._message = super().finish()
            self._waiting = []

    def _take_late(self, rank: int) -> None:
        for parameter, gradient in zip(self.parameters, self._waiting[rank], strict=True):
            parameter.grad = gradient
        super().take(rank)
