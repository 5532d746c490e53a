"""Saving a checkpoint never runs a step.

torch.distributed.checkpoint.state_dict initialises an optimizer without state by stepping it, which would change
momenta, and hang if only one rank saves.
"""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import problems
from demopt import DeMo


class Model(torch.nn.Module):
    """A frozen layer and three kinds of parameters, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(17, 20, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(20, 2, bias=False, dtype=torch.bfloat16)
        self.frozen = torch.nn.Linear(3, 3, bias=False).requires_grad_(False)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("flat", [False, True])
def test_torch_checkpoint_state_dicts_run_no_step(steps: int, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, other = Model(), Model()
    recorder = problems.Recorder()
    optimizer, loaded = (DeMo(each.parameters(), **problems.SMALL, process_group=recorder) for each in (model, other))
    problems.train(optimizer, range(steps))
    before, sent = (problems.momenta(optimizer), problems.values(optimizer)), list(recorder.lengths)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, loaded, state, options=options)
    loaded.load_state_dict(loaded.state_dict())
    assert recorder.lengths == sent
    assert problems.same(problems.momenta(optimizer), before[0])
    assert problems.same(problems.values(optimizer), before[1])
    expected = problems.train(optimizer, range(steps, steps + 2))
    assert problems.same_history(problems.train(loaded, range(steps, steps + 2)), expected)
