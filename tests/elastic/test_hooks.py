"""The wrapper is a torch optimizer: its hooks run."""

from typing import Any

import pytest
import torch
from torch.nn import Parameter

import demopt


class _Alone:
    """What the wrapper asks of a manager when it is built."""

    def current_step(self) -> int:
        return 0


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_hooks_of_torch_run(kind: str) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed (extra elastic)")
    from demopt.integrations.torchft import Optimizer

    parameters = [Parameter(torch.ones(4, 4))]
    inner: Any = (
        demopt.DeMo(parameters)
        if kind == "DeMo"
        else demopt.LocalDeMo(torch.optim.SGD(parameters, lr=0.1), sync_every=1)
    )
    optimizer: Any = Optimizer(_Alone(), inner)
    optimizer.finish_round = lambda: None
    optimizer._new = False
    called = []
    names = [f"{of}_{when}" for of in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")]
    for name in names:
        getattr(optimizer, f"register_{name}_hook")(lambda *_, name=name: called.append(name))
    parameters[0].grad = torch.ones(4, 4)
    optimizer.step()
    if kind == "LocalDeMo":
        inner.finish_round()
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == names
