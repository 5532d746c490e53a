"""torch.compile around models and around `step`."""

import pytest
import torch
from torch import nn

import problems
from demopt.exchange import SingleRank

STEPS = 4


def _trained(kind, compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    parameters = list(model.parameters())
    optimizer = problems.optimizer_of(kind, parameters, process_group=SingleRank())
    if compiled == "model":
        model = torch.compile(model, backend="eager")
    step = torch.compile(optimizer.step, backend="eager") if compiled == "step" else optimizer.step

    def train(inputs):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        step()

    if compiled == "loop":
        train = torch.compile(train, backend="eager")
    for number in range(STEPS):
        train(problems.draw((5, 16), number))  # torch 2.6 compiles no Generator
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
@pytest.mark.parametrize("compiled", ["model", "step", "loop"])
def test_torch_compile_changes_nothing(kind, compiled):
    torch._dynamo.reset()
    assert problems.same(_trained(kind, compiled), _trained(kind, "nothing"))
