"""DeMo as this library runs it, and its published settings with the bytes of the published format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
