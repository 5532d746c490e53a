"""The decoder: presets, and the model that transformers builds from them with fresh weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from demopt.core.names import wanted
from demopt.optim.presets import LOCAL as LOCAL_DEFAULTS
from demopt.train.config import InputError, TrainConfig

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Preset:
    """Dimensions of a model. `family` is the transformers architecture; each number has a flag that overrides it."""

    layers: int
    width: int
    heads: int
    mlp: int
    sequence: int
    vocab_size: int = 0  # 0: the size of the tokenizer's vocabulary
    family: str = "llama"

    def describe(self) -> str:
        """One line for the help text."""
        rows = f", {self.vocab_size:,} tokens" if self.vocab_size else ""
        return f"{self.layers} layers, width {self.width}, {self.heads} heads, sequence {self.sequence}{rows}"


# demo-300m and demo-1b are the two models of the paper, 319.9M and 1,176.8M parameters (OLMo: non-affine LayerNorm,
# SwiGLU, RoPE, no biases, tied embedding; its mlp_ratio of 8 makes `mlp` 4 x width, because SwiGLU halves it).
PRESETS = {
    "tiny": Preset(2, 64, 2, 192, 64),
    "small": Preset(2, 192, 4, 512, 256),
    "medium": Preset(8, 384, 6, 1024, 512),
    "124m": Preset(12, 768, 12, 2048, 1024, 50304),
    "demo-300m": Preset(16, 1024, 8, 4096, 2048, 50304, "olmo"),
    "demo-1b": Preset(16, 2048, 16, 8192, 2048, 50304, "olmo"),
}

# Defaults by optimizer, and of DeMo by update rule; the measurements are in docs/experiments.md.
DEFAULTS: dict[str, dict[str, float]] = {
    "adamw": {"lr": 1.5e-3, "weight_decay": 0.1, "beta2": 0.95},
    "muon": {"lr": 0.015, "weight_decay": 0.1, "beta2": 0.95, "momentum": 0.8},
    "local": {"lr": 0.015, "weight_decay": 0.1, "beta2": 0.95, "momentum": 0.8, "top_k": LOCAL_DEFAULTS["top_k"]},
    "demo": {"momentum": 0.99, "lr": 1e-3, "weight_decay": 0.0, "beta2": 0.99, "top_k": 32, "relay_top_k": 64},
}
RULE_DEFAULTS: dict[str, dict[str, float]] = {
    "muon": {"momentum": 0.95, "lr": 0.02},
    "sgd": {"lr": 32.0},
    "nesterov": {"lr": 1.0},
}


def resolve(config: TrainConfig) -> TrainConfig:
    """Fill in what the preset and the optimizer decide, so that the record is complete.

    Examples:
        >>> resolve(TrainConfig(preset="tiny", heads=4)).width
        64
    """
    if config.preset not in PRESETS:
        raise InputError(f"--preset is {wanted(config.preset, PRESETS)}")
    filled = dataclasses.asdict(PRESETS[config.preset])
    del filled["family"]
    filled |= DEFAULTS[config.optimizer]
    if config.optimizer == "demo":
        filled["update"] = config.update or ("signum" if config.route == "owner" else "muon")
        filled |= RULE_DEFAULTS.get(filled["update"].partition("(")[0], {})
    missing = {name: value for name, value in filled.items() if getattr(config, name) is None}
    if missing.get("vocab_size") == 0:
        del missing["vocab_size"]
    config = dataclasses.replace(config, **missing)
    assert config.width
    assert config.heads
    if config.width % (2 * config.heads):
        raise InputError(
            f"--width is {config.width}, wanted an even multiple of --heads {config.heads} "
            "(rotary embedding turns pairs of elements)"
        )
    return config


def build(config: TrainConfig) -> nn.Module:
    """Build a decoder with fresh weights, the same on every rank with the same config."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, OlmoConfig

    family = {"llama": LlamaConfig, "olmo": OlmoConfig}[PRESETS[config.preset].family]
    shape: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.sequence,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0 if config.tokenizer == "bytes" else None,
        "pad_token_id": None,
    }
    torch.manual_seed(config.seed)
    model: nn.Module = AutoModelForCausalLM.from_config(family(**shape), attn_implementation="sdpa")
    return model


def count_parameters(model: nn.Module) -> int:
    """Count the trained parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
