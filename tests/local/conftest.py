"""All promises of LocalDeMo hold with the state beside the parameters, and with the state on the host."""

import pytest
import torch

from demopt.optim.local_weights import LocalWeights


@pytest.fixture(autouse=True, params=["beside", "on the host"])
def _state(request, monkeypatch):
    """On the host: as if parameters were on an accelerator, so that every step that differs there is taken."""
    if request.param == "on the host":
        init = LocalWeights.__init__

        def on_the_host(self, parameters, _=None):
            init(self, parameters, torch.device("cpu"))

        monkeypatch.setattr(LocalWeights, "__init__", on_the_host)
        monkeypatch.setattr(LocalWeights, "_is_here", lambda *_: False)
