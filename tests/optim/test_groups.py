"""The parameters that Muon's update gets; and replicas are equal bit for bit however parameters are grouped."""

import pytest
import torch
from torch import nn

import demopt


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.inside, self.picture, self.head = nn.Linear(8, 8), nn.Conv2d(1, 2, 3), nn.Linear(8, 10)
        self.bag, self.frozen = nn.EmbeddingBag(10, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.quantized = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)


def _names(module: nn.Module, parameters: list[nn.Parameter]) -> list[str]:
    return [name for name, parameter in module.named_parameters() if any(parameter is each for each in parameters)]


def test_muon_groups_takes_inner_matrices_and_loses_nothing_that_trains() -> None:
    plain = _Plain()
    matrices, others = demopt.muon_groups(plain, 0.5, others=[plain.head])
    assert _names(plain, matrices["params"]) == ["inside.weight"]
    assert (matrices["update"], matrices["lr"], others["update"], others["lr"]) == ("muon", 0.5, "adamw", 0.1)
    assert len(others["params"]) == sum(p.requires_grad for p in plain.parameters()) - 1
    demopt.DeMo([matrices, others])
    _, others = demopt.muon_groups(plain, 0.5, others_update=demopt.AdamW(beta2=0.5))
    assert demopt.DeMo([others]).param_groups[0]["update"] == "adamw(beta2=0.5, eps=1e-08)"


def test_muon_groups_finds_embeddings_and_heads_of_transformers_models() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    decoder = transformers.LlamaForCausalLM(config)
    _, others = demopt.muon_groups(decoder, 0.5)
    names = _names(decoder, others["params"])
    assert "model.embed_tokens.weight" in names
    assert not any("proj" in name for name in names)
    decoder.lm_head.weight = nn.Parameter(torch.zeros(256, 64))
    for whole in (decoder, nn.Sequential(decoder)):  # also inside another module
        _, untied = demopt.muon_groups(whole, 0.5)
        assert "lm_head.weight" in _names(decoder, untied["params"])


def test_muon_groups_and_muon_adamw_refuse_what_is_no_model_that_they_can_split() -> None:
    with pytest.raises(ValueError, match="none of the model's 2 parameters that train is a matrix"):
        demopt.muon_groups(nn.LayerNorm(8), 0.1)
    for call in (demopt.muon_groups, demopt.muon_adamw):
        for frozen in (nn.Linear(2, 2).requires_grad_(False), nn.ReLU()):
            with pytest.raises(ValueError, match="no parameter of the model trains"):
                call(frozen, 0.1)
        with pytest.raises(ValueError, match="a parameter of a lazy module has no shape yet"):
            call(nn.LazyLinear(3), 0.1)
    for call in (lambda given: demopt.muon_adamw(given, lr=0.1), demopt.unsync, demopt.broadcast_buffers):
        with pytest.raises(TypeError, match=r"got a list where a torch\.nn\.Module is expected"):
            call([*nn.LayerNorm(8).parameters()])
