"""demopt.integrations.transformers: the callback alone; examples/hf_trainer.py trains and resumes with it."""

import pytest
import torch

import demopt
import problems

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
