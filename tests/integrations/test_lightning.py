"""demopt.integrations.lightning; examples/lightning_strategy.py trains and resumes with it."""

from typing import Any

import pytest
import torch
from torch import nn


def test_strategy_refuses_another_optimizer() -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs Lightning: make test-integrations")
    from demopt.integrations.lightning import DeMoStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([nn.Parameter(torch.ones(2))])

    trainer = lightning.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False)
    strategy, module = DeMoStrategy(), Module()
    strategy._lightning_module = module
    module.trainer = trainer
    with pytest.raises(TypeError, match="the optimizer is AdamW, and with DeMoStrategy only DeMo and LocalDeMo"):
        strategy.setup_optimizers(trainer)
