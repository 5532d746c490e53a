"""The parameters that Muon gets; `muon_adamw` and its Muon: torch's, except for precision and batches of matrices."""

import math

import numpy
import pytest
import torch
from torch import nn
from torch.nn import Parameter

import demopt
import problems
from demopt.core.rules import newton_schulz
from demopt.optim.inner import InnerOptimizers
from demopt.optim.muon import BatchedMuon
from problems import NEEDS_MUON

SHAPES = [(16, 16), (12, 30), (40, 9)]
SETTINGS = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}


class _Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.inside, self.picture, self.head = nn.Linear(8, 8), nn.Conv2d(1, 2, 3), nn.Linear(8, 10)
        self.bag, self.frozen = nn.EmbeddingBag(10, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.quantized = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)


def _names(module, parameters):
    return [name for name, parameter in module.named_parameters() if any(parameter is each for each in parameters)]


def test_muon_groups_takes_inner_matrices_and_loses_nothing_that_trains():
    plain = _Plain()
    matrices, others = demopt.muon_groups(plain, 0.5, others=[plain.head])
    assert _names(plain, matrices["params"]) == ["inside.weight"]
    assert (matrices["update"], matrices["lr"], others["update"], others["lr"]) == ("muon", 0.5, "adamw", 0.1)
    assert len(others["params"]) == sum(p.requires_grad for p in plain.parameters()) - 1
    demopt.DeMo([matrices, others])
    _, others = demopt.muon_groups(plain, 0.5, others_update=demopt.AdamW(beta2=0.5))
    assert demopt.DeMo([others]).param_groups[0]["update"] == "adamw(beta2=0.5, eps=1e-08)"


def test_muon_groups_finds_embeddings_and_heads_of_transformers_models():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    decoder = transformers.LlamaForCausalLM(config)
    names = _names(decoder, demopt.muon_groups(decoder, 0.5)[1]["params"])
    assert "model.embed_tokens.weight" in names
    assert not any("proj" in name for name in names)
    decoder.lm_head.weight = nn.Parameter(torch.zeros(256, 64))
    for whole in (decoder, nn.Sequential(decoder)):  # also inside another module
        _, untied = demopt.muon_groups(whole, 0.5)
        assert "lm_head.weight" in _names(decoder, untied["params"])


@pytest.mark.parametrize("lr", [-1.0, "fast"])
def test_muon_groups_and_muon_adamw_refuse_what_is_no_model_that_they_can_split(lr):
    with pytest.raises(ValueError, match="none of the model's 2 parameters that train is a matrix"):
        demopt.muon_groups(nn.LayerNorm(8), 0.1)
    splits = [demopt.muon_groups, *([demopt.muon_adamw] if hasattr(torch.optim, "Muon") else [])]
    for call in splits:
        for frozen in (nn.Linear(2, 2).requires_grad_(False), nn.ReLU()):
            with pytest.raises(ValueError, match="no parameter of the model trains"):
                call(frozen, 0.1)
        with pytest.raises(ValueError, match="a parameter of a lazy module has no shape yet"):
            call(nn.LazyLinear(3), 0.1)
        with pytest.raises((TypeError, ValueError), match="lr is "):
            call(nn.Linear(2, 2), lr)
    for call in (lambda given: splits[-1](given, lr=0.1), demopt.unsync, demopt.broadcast_buffers):
        with pytest.raises(TypeError, match=r"got a list where a torch\.nn\.Module is expected; put several into"):
            call([*nn.LayerNorm(8).parameters()])


@NEEDS_MUON
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        *(
            ({"betas": betas}, "betas is .*; give two numbers")
            for betas in (0.9, (), {}, (0.9,), torch.tensor(0.5), "ab")
        ),
        *(({"betas": betas}, r"betas\[1\] is ") for betas in ((0.9, None), (0.9, 1.0), [0.9, math.nan])),
        *(({"weight_decay": w}, "weight_decay is ") for w in (None, "1", -1, math.inf, 10**400, torch.zeros(2), True)),
        *(({"others": others}, "got a .* where a torch") for others in (torch.tensor(2), None, 3)),
    ],
)
def test_muon_adamw_refuses_impossible_settings_by_name(wrong, told):
    with pytest.raises((TypeError, ValueError), match=told):
        demopt.muon_adamw(nn.Linear(2, 3), 0.1, **wrong)


def _steps(optimizer, numbers):
    """Returns copies of the parameters after these steps; every other step has no gradient for the first parameter."""
    parameters = problems.all_parameters(optimizer)
    for number in numbers:
        problems.set_gradients(parameters, number)
        if number % 2:
            parameters[0].grad = None
        optimizer.step()
    return problems.values(optimizer)


@NEEDS_MUON
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("torchs_first", [True, False])
def test_batched_muon_is_torchs_muon_and_goes_on_from_its_state(torchs_first, nesterov, monkeypatch):
    """And torch's goes on from ours. Only the iterations differ, so torch's Muon gets ours."""
    both = (torch.optim.Muon, BatchedMuon)
    before, after = both if torchs_first else reversed(both)
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", lambda update, *_: newton_schulz(update))
    settings = {**SETTINGS, "nesterov": nesterov}
    whole = _steps(before(problems.parameters(SHAPES), **settings), range(6))
    saved = before(problems.parameters(SHAPES), **settings)
    _steps(saved, range(3))
    resumed = after(problems.twins(saved), **settings)
    resumed.load_state_dict(saved.state_dict())
    torch.testing.assert_close(_steps(resumed, range(3, 6)), whole)


@pytest.mark.parametrize("kind", ["DeMo", pytest.param("BatchedMuon", marks=NEEDS_MUON)])
def test_muon_iterates_in_float32_where_a_script_steps_inside_autocast(kind):
    def trained(autocasts):
        matrices = problems.parameters(SHAPES)
        optimizer = demopt.DeMo(matrices, update="muon") if kind == "DeMo" else BatchedMuon(matrices, **SETTINGS)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            return _steps(optimizer, range(3))

    assert problems.same(trained(True), trained(False))


@NEEDS_MUON
def test_batched_muon_keeps_bfloat16_parameters_and_returns_the_closures_loss():
    parameter = Parameter(torch.ones(4, 6, dtype=torch.bfloat16))
    optimizer = BatchedMuon([parameter], **SETTINGS)

    def loss():
        optimizer.zero_grad()
        value = (parameter.float() * torch.arange(24.0).view(4, 6)).sum()
        value.backward()
        return value

    assert optimizer.step(loss).item() == sum(range(24))
    assert parameter.dtype == torch.bfloat16
    assert not torch.equal(parameter.detach(), torch.ones(4, 6, dtype=torch.bfloat16))


@NEEDS_MUON
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_batched_muon_goes_on_after_its_model_was_converted(dtype):
    model = nn.Linear(6, 4, bias=False)
    optimizer = BatchedMuon(list(model.parameters()), **SETTINGS)
    for given in (torch.float32, dtype):
        model.to(given)
        before = model.weight.detach().clone()
        model.weight.grad = torch.randn_like(model.weight)
        optimizer.step()
        assert model.weight.isfinite().all()
        assert not torch.equal(model.weight, before)
    assert optimizer.state[model.weight]["momentum_buffer"].dtype == dtype


@NEEDS_MUON
def test_muon_adamw_splits_as_muon_groups_sets_torchs_names_and_trains_along_with_torchs():
    head = nn.Linear(4, 2)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), head)
    muon, adamw = demopt.muon_adamw(
        model, 0.1, momentum=0.5, weight_decay=0.2, betas=numpy.array([0.8, 0.7]), others=[head]
    )
    for each, group in zip((muon, adamw), demopt.muon_groups(model, lr=0.1, others=[head]), strict=True):
        assert [*map(id, each.param_groups[0]["params"])] == [*map(id, group["params"])]
        assert each.param_groups[0]["lr"] == 0.1
        assert each.param_groups[0]["weight_decay"] == 0.2
    assert isinstance(muon, BatchedMuon)
    assert InnerOptimizers([muon, adamw]).facts()["inner"] == "Muon, AdamW"
    assert muon.param_groups[0]["momentum"] == 0.5
    assert adamw.param_groups[0]["betas"] == (0.8, 0.7)


@NEEDS_MUON
def test_muon_adamw_trains_on_where_weights_move_to_channels_last():
    def trained(moves):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3)
        (optimizer,) = demopt.muon_adamw(model, lr=0.01)
        for step in range(4):
            if moves and step == 2:
                model.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            model(problems.draw((2, 3, 5, 5), step)).square().mean().backward()
            optimizer.step()
        return model.weight.detach().flatten()

    torch.testing.assert_close(trained(True), trained(False))


@NEEDS_MUON
@pytest.mark.parametrize("model", [nn.Linear(2, 3, bias=False), nn.LayerNorm(3)])
def test_muon_adamw_leaves_out_an_optimizer_without_parameters(model):
    (only,) = demopt.muon_adamw(model, lr=0.1)
    assert len(problems.all_parameters(only)) == len([*model.parameters()])


@NEEDS_MUON
def test_muon_adamw_says_that_torch_is_too_old(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(RuntimeError, match=r"torch.optim.Muon came with torch 2.9, and this is torch .*; update torch"):
        demopt.muon_adamw(nn.Linear(2, 3), lr=0.1)
