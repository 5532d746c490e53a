"""Which parameters Muon's update gets."""

import pytest
import torch
from torch import nn

import demopt
from demopt.exchange import SingleRank
from demopt.train import model
from demopt.train.config import TrainConfig


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.inside, self.picture, self.head = nn.Linear(8, 8), nn.Conv2d(1, 2, 3), nn.Linear(8, 10)
        self.bag = nn.EmbeddingBag(10, 8)


def _names(module: nn.Module, parameters: list[nn.Parameter]) -> list[str]:
    return [name for name, parameter in module.named_parameters() if any(parameter is each for each in parameters)]


def test_muon_groups_takes_inner_matrices_and_loses_nothing() -> None:
    plain = _Plain()
    matrices, others = demopt.muon_groups(plain, 0.5, others=[plain.head])
    assert _names(plain, matrices["params"]) == ["inside.weight"]
    assert (matrices["update"], matrices["lr"], others["update"], others["lr"]) == ("muon", 0.5, "adamw", 0.1)
    assert len(others["params"]) == len(list(plain.parameters())) - 1


def test_muon_groups_finds_ends_of_transformers_models() -> None:
    config = TrainConfig(preset="tiny", vocab_size=256)
    decoder = model.build(model.resolve(config))
    _, others = demopt.muon_groups(decoder, 0.5)
    names = _names(decoder, others["params"])
    assert "model.embed_tokens.weight" in names
    assert not any("proj" in name for name in names)
    decoder.lm_head.weight = nn.Parameter(torch.zeros(256, 64))
    for whole in (decoder, nn.Sequential(decoder)):  # also inside another module
        _, untied = demopt.muon_groups(whole, 0.5)
        assert "lm_head.weight" in _names(decoder, untied["params"])


def test_muon_groups_refuses_a_model_without_matrices() -> None:
    with pytest.raises(ValueError, match="none of the model's 2 parameters is a matrix"):
        demopt.muon_groups(nn.LayerNorm(8), 0.1)


def test_muon_groups_keeps_a_frozen_matrix_for_later() -> None:
    plain = _Plain()
    plain.inside.weight.requires_grad_(False)
    optimizer = demopt.DeMo(demopt.muon_groups(plain, 0.1, others=[plain.head]), process_group=SingleRank())
    before = plain.inside.weight.clone()
    for trained in (False, True):
        plain.inside.weight.requires_grad_(trained)
        plain.inside(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        assert torch.equal(plain.inside.weight, before) == (not trained)
