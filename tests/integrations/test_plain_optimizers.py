"""Integrations switch dense synchronisation off, so they refuse optimizers that do not replace it, by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import demopt


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def test_trainer_callback_refuses_the_default_optimizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="needs accelerate: make test-integrations")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from demopt.integrations.transformers import DeMoCallback

    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1))
    data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}]
    how = {"max_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path), **how)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[DeMoCallback()])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(TypeError, match=r"the optimizer is AdamW, and with DeMoCallback only DeMo and LocalDeMo"):
        trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_accelerate_register_refuses_another_optimizer() -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: make test-integrations")
    from accelerate import Accelerator

    from demopt.integrations.accelerate import register

    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"the optimizer is AdamW, and after demopt\.unsync only"):
        register(accelerator, accelerator.prepare(_optimizer(model.parameters())))
    register(accelerator, accelerator.prepare(demopt.DeMo(model.parameters())))


def test_lightning_strategy_refuses_another_optimizer() -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs Lightning: make test-integrations")
    from demopt.integrations.lightning import DeMoStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def configure_optimizers(self) -> Any:
            return _optimizer([nn.Parameter(torch.ones(2))])

    trainer = lightning.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False)
    strategy, module = DeMoStrategy(), Module()
    strategy._lightning_module = module
    module.trainer = trainer
    with pytest.raises(TypeError, match="the optimizer is AdamW, and with DeMoStrategy only DeMo and LocalDeMo"):
        strategy.setup_optimizers(trainer)
