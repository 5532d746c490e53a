"""`muon_adamw`, and its Muon: torch's, but for precision and batches of the Newton-Schulz iteration."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import demopt
import problems
from demopt.core.rules import newton_schulz

if not hasattr(torch.optim, "Muon"):
    pytest.skip("this torch has no Muon", allow_module_level=True)

from demopt.optim.inner import InnerOptimizers
from demopt.optim.muon import BatchedMuon

SHAPES = [(16, 16), (12, 30), (40, 9)]
SETTINGS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}


def _steps(optimizer: torch.optim.Optimizer, numbers: range) -> list[Tensor]:
    """Returns copies of the parameters after these steps; every other step has no gradient for the first of them."""
    parameters = problems.all_parameters(optimizer)
    for number in numbers:
        problems.set_gradients(parameters, number)
        if number % 2:
            parameters[0].grad = None
        optimizer.step()
    return problems.values(optimizer)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("before", "after"), [(torch.optim.Muon, BatchedMuon), (BatchedMuon, torch.optim.Muon)])
def test_batched_muon_is_torchs_muon_and_goes_on_from_its_state(
    before: type, after: type, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And torch's from that of ours; but for the iteration, so torch's gets ours."""
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", lambda update, *_: newton_schulz(update))
    settings = {**SETTINGS, "nesterov": nesterov}
    whole = _steps(before(problems.parameters(SHAPES), **settings), range(6))
    saved = before(problems.parameters(SHAPES), **settings)
    _steps(saved, range(3))
    resumed = after(problems.twins(saved), **settings)
    resumed.load_state_dict(saved.state_dict())
    torch.testing.assert_close(_steps(resumed, range(3, 6)), whole)


def test_batched_muon_keeps_bfloat16_parameters_and_returns_the_closures_loss() -> None:
    parameter = Parameter(torch.ones(4, 6, dtype=torch.bfloat16))
    optimizer = BatchedMuon([parameter], **SETTINGS)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = (parameter.float() * torch.arange(24.0).view(4, 6)).sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    assert optimizer.step(loss).item() == sum(range(24))
    assert parameter.dtype == torch.bfloat16
    assert not torch.equal(parameter.detach(), torch.ones(4, 6, dtype=torch.bfloat16))


def test_muon_adamw_splits_as_muon_groups_sets_torchs_names_and_trains_along_with_torchs() -> None:
    head = nn.Linear(4, 2)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), head)
    muon, adamw = demopt.muon_adamw(model, 0.1, momentum=0.5, weight_decay=0.2, betas=(0.8, 0.7), others=[head])
    groups = demopt.muon_groups(model, lr=0.1, others=[head])
    for each, group in zip((muon, adamw), groups, strict=True):
        assert [*map(id, each.param_groups[0]["params"])] == [*map(id, group["params"])]
        assert each.param_groups[0]["lr"] == 0.1
        assert each.param_groups[0]["weight_decay"] == 0.2
    assert isinstance(muon, BatchedMuon)
    assert InnerOptimizers([muon, adamw]).facts()["inner"] == "Muon, AdamW"
    assert muon.param_groups[0]["momentum"] == 0.5
    assert adamw.param_groups[0]["betas"] == (0.8, 0.7)


@pytest.mark.parametrize("model", [nn.Linear(2, 3, bias=False), nn.LayerNorm(3)])
def test_muon_adamw_leaves_out_an_optimizer_without_parameters(model: nn.Module) -> None:
    (only,) = demopt.muon_adamw(model, lr=0.1)
    assert len(problems.all_parameters(only)) == len([*model.parameters()])


def test_muon_adamw_says_that_torch_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(RuntimeError, match=r"torch.optim.Muon came with torch 2.9, and this is torch .*; update torch"):
        demopt.muon_adamw(nn.Linear(2, 3), lr=0.1)
