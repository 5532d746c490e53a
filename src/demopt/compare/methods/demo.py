"""DeMo with an exchange that is a step late, and the published settings with the bytes of the published format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

import demopt
from demopt.simulate.demo import DeMoWorkers
from demopt.simulate.method import Fleet
from demopt.train.method import Cost

PUBLISHED_BYTES = 12  # a kept coefficient: a 64-bit index and a 32-bit value
VERSIONS = {"v1": demopt.V1, "v2": demopt.V2}


class Published(DeMoWorkers):
    """The settings of the paper's first or second version; bytes are those of its format, not of ours.

    Example:
        >>> import torch
        >>> Published(Fleet(torch.nn.Linear(2, 2), world=2), version="v2", top_k=8).optimizers[0].defaults["alpha"]
        0.2
    """

    bytes_rule = "published format: 96 bits a kept coefficient, all-gathered: (W-1) 12 C K bytes up and down"

    def __init__(self, fleet: Fleet, version: str, **settings: Any) -> None:
        super().__init__(fleet, **{**VERSIONS[version], "route": "gather", **settings})

    def finish(self) -> Cost:
        cost = super().finish()
        payload = PUBLISHED_BYTES * self.optimizers[0].stats.kept
        others = (self.fleet.world - 1) * payload
        return replace(cost, payload_bytes=payload, sent_bytes=others, received_bytes=others)


class Delayed(DeMoWorkers):
    """DeMo with delay=1: each step is made of the gradients of the step before, which is what a late exchange comes to.

    What is evaluated is what a worker has by then: the last message is still under way.

    Example:
        >>> import torch
        >>> Delayed(Fleet(torch.nn.Linear(2, 2), world=2)).finish().payload_bytes
        0
    """

    bytes_rule = f"{DeMoWorkers.bytes_rule}; none of the first step's, whose exchange ends in the second"

    def __init__(self, fleet: Fleet, **settings: Any) -> None:
        super().__init__(fleet, **settings)
        self._before: list[list[Tensor | None]] = [[] for _ in range(fleet.world)]
        self._begun = False

    def take(self, rank: int) -> None:
        gradients, self._before[rank] = self._before[rank], [parameter.grad for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, gradients, strict=False):
            parameter.grad = gradient
        if gradients:
            super().take(rank)
        self._begun = bool(gradients)

    def finish(self) -> Cost:
        return super().finish() if self._begun else Cost(0, 0, 0, 0.0, 0.0)
