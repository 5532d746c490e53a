"""demopt.integrations.transformers beside what DistributedDataParallel does; examples/hf_trainer.py resumes."""

import re
from pathlib import Path

import pytest
import torch

import demopt
import forked
import problems

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="needs accelerate: make test-integrations")


def test_trainer_with_demo_averages_over_the_tokens_of_all_ranks_as_ddp_does(tmp_path: Path) -> None:
    done = forked.torchrun(Path(__file__).with_name("token_mean.py"), ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "bit-identical" not in done.stderr
    told = re.findall(r"apart ([\d.e+-]+), without ([\d.e+-]+)", done.stdout)
    assert len(told) == 2
    for apart, without in told:
        assert float(apart) < 1e-5 < 1e-3 < float(without)  # float32 sums in another order; what the setting changes


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
