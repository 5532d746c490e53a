"""demopt.integrations.transformers: the callback alone; examples/hf_trainer.py trains and resumes with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector

import demopt
import problems
import ranks
from forked import accelerate_rank

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="needs accelerate: make test-integrations")


def test_callback_applies_a_round_in_flight_before_the_trainer_saves() -> None:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from demopt.integrations.transformers import DeMoCallback

    parameters = problems.parameters([(4, 4)])
    optimizer = demopt.LocalDeMo(torch.optim.SGD(parameters, lr=0.1), sync_every=1, delay=1)
    for step, control in enumerate((TrainerControl(), TrainerControl(should_save=True))):
        problems.set_gradients(parameters, step)
        optimizer.step()
        DeMoCallback().on_step_end(TrainingArguments("unused"), TrainerState(), control, optimizer=optimizer)
        assert optimizer.replicator.in_flight == (not control.should_save)


def test_callback_refuses_the_trainers_default_optimizer_before_training() -> None:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from demopt.integrations.transformers import DeMoCallback

    parts = {"optimizer": torch.optim.AdamW(problems.parameters([(4, 4)])), "model": torch.nn.Linear(2, 2)}
    with pytest.raises(TypeError, match="the optimizer is AdamW, and with DeMoCallback only DeMo and LocalDeMo"):
        DeMoCallback().on_train_begin(TrainingArguments("unused"), TrainerState(), TrainerControl(), **parts)


def _model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    small = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**small, **rates, bos_token_id=0, eos_token_id=0))


def _trained(rank: int, world_size: int, rows: list[dict[str, torch.Tensor]], over_all_ranks: bool, out: str) -> Any:
    """The weights after a step in which DeMo without momentum sends all gradients as they are, and takes their mean."""
    from transformers import Trainer, TrainingArguments

    from demopt.integrations.transformers import DeMoCallback

    everything = {"update": "sgd", "momentum_decay": 0.0, "top_k": 4096, "values": "float32", "reduction": "mean"}
    with accelerate_rank(rank, world_size):
        arguments = TrainingArguments(
            out, max_steps=1, per_device_train_batch_size=2, report_to="none", max_grad_norm=0.0, use_cpu=True,
            learning_rate=0.5, lr_scheduler_type="constant", save_strategy="no", disable_tqdm=True,
            average_tokens_across_devices=over_all_ranks,
        )  # fmt: skip
        chosen = (demopt.DeMo, {"lr": 0.5, "weight_decay": 0.0, "transform": "identity", **everything})
        model, callbacks = _model(), [DeMoCallback()]
        Trainer(model, arguments, train_dataset=rows, optimizer_cls_and_kwargs=chosen, callbacks=callbacks).train()
        return parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("over_all_ranks", [True, False])
def test_trainer_with_demo_averages_over_the_tokens_of_all_ranks(over_all_ranks: bool, tmp_path: Path) -> None:
    tokens = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, 0] = -100  # nothing predicts it
    for row, known in enumerate((2, 7, 12, 16)):  # unequally many tokens have a label
        labels[row, known:] = -100
    rows = [{"input_ids": one, "labels": other} for one, other in zip(tokens, labels, strict=True)]
    expected = _model()
    expected(input_ids=tokens, labels=labels).loss.backward()
    torch.optim.SGD(expected.parameters(), lr=0.5).step()
    sgd = parameters_to_vector(expected.parameters()).detach()
    for weights in ranks.run(_trained, 2, rows, over_all_ranks, str(tmp_path)):
        apart = (weights - sgd).abs().max()
        assert apart < 1e-5 if over_all_ranks else apart > 1e-3
