"""Muon on a CPU: torch's, but for the precision of its Newton-Schulz iteration."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import problems
from demopt.core.orthogonal import orthogonal

if not hasattr(torch.optim, "Muon"):
    pytest.skip("this torch has no Muon", allow_module_level=True)

from demopt.train.muon import Float32Muon, build_muon

SHAPES = [(16, 16), (12, 30), (40, 9)]
SETTINGS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"}


def _steps(optimizer: torch.optim.Optimizer, numbers: range) -> list[Tensor]:
    """Returns copies of the parameters after these steps; every other step has no gradient for the first of them."""
    parameters = problems.all_parameters(optimizer)
    for number in numbers:
        for place, parameter in enumerate(parameters):
            parameter.grad = problems.draw(parameter.shape, number, 0, place).to(parameter.dtype)
        if number % 2:
            parameters[0].grad = None
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("nesterov", [True, False])
def test_float32_muon_is_torchs_muon_with_a_float32_iteration(monkeypatch: pytest.MonkeyPatch, nesterov: bool) -> None:
    ours = _steps(Float32Muon(problems.parameters(SHAPES), nesterov=nesterov, **SETTINGS), range(6))
    rounded = _steps(torch.optim.Muon(problems.parameters(SHAPES), nesterov=nesterov, **SETTINGS), range(6))
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", lambda update, *_: orthogonal(update))
    theirs = _steps(torch.optim.Muon(problems.parameters(SHAPES), nesterov=nesterov, **SETTINGS), range(6))
    torch.testing.assert_close(ours, theirs)
    start = problems.parameters(SHAPES)
    for one, other, before in zip(ours, rounded, start, strict=True):
        assert (one - other).norm() < 0.05 * (one - before.detach()).norm()  # bfloat16 has three digits, steps add up


def test_float32_muon_goes_on_from_the_state_of_torchs_muon_and_back() -> None:
    torchs = torch.optim.Muon(problems.parameters(SHAPES), **SETTINGS)
    _steps(torchs, range(3))
    ours = Float32Muon(problems.parameters(SHAPES), **SETTINGS)
    ours.load_state_dict(torchs.state_dict())
    again = torch.optim.Muon(problems.parameters(SHAPES), **SETTINGS)
    again.load_state_dict(ours.state_dict())
    for one, other in zip(torchs.state.values(), again.state.values(), strict=True):
        assert problems.same(list(one.values()), list(other.values()))
    assert [group.keys() for group in again.param_groups] == [group.keys() for group in torchs.param_groups]


def test_float32_muon_keeps_bfloat16_parameters_and_returns_the_closures_loss() -> None:
    parameter = Parameter(torch.ones(4, 6, dtype=torch.bfloat16))
    optimizer = Float32Muon([parameter], **SETTINGS)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = (parameter.float() * torch.arange(24.0).view(4, 6)).sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    assert optimizer.step(loss).item() == sum(range(24))
    assert parameter.dtype == torch.bfloat16
    assert not torch.equal(parameter.detach(), torch.ones(4, 6, dtype=torch.bfloat16))


def test_float32_muon_refuses_another_scale_than_its_own() -> None:
    with pytest.raises(ValueError, match="adjust_lr_fn is 'original'; Float32Muon has 'match_rms_adamw' alone"):
        Float32Muon([Parameter(torch.ones(2, 3))], lr=0.1, adjust_lr_fn="original")


@pytest.mark.parametrize(("device", "kind"), [("cpu", "Float32Muon"), ("meta", "Muon")])
def test_build_muon_takes_torchs_own_except_on_a_cpu(device: str, kind: str) -> None:
    assert type(build_muon([Parameter(torch.ones(2, 3, device=device))], lr=0.1)).__name__ == kind
