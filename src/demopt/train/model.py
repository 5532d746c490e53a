"""The decoder: transformers builds it with fresh weights; and its loss on a batch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from demopt.train.config import PRESETS, TrainConfig


def build(config: TrainConfig) -> nn.Module:
    """Builds a decoder with fresh weights, the same on every rank with the same config."""
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
    """Counts the parameters that train, tied ones once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def precision(config: TrainConfig, device: torch.device) -> AbstractContextManager[None]:
    """Returns the autocast context: bfloat16 if configured, or by default on a GPU."""
    wanted = config.precision == "bfloat16" or (config.precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted)


def loss_sum(forward: nn.Module, windows: NDArray[np.int64], device: torch.device) -> Tensor:
    """Returns the sum of the cross-entropy of windows [batch, sequence + 1], in nats."""
    tokens = torch.from_numpy(windows).to(device)
    logits = forward(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def backward(forward: nn.Module, windows: NDArray[np.int64], config: TrainConfig, device: torch.device) -> float:
    """Backpropagates this pass's part of the mean loss over the step's tokens, and returns that part."""
    scale = 1 / (windows[:, 1:].size * config.accumulate)
    with precision(config, device):
        loss = loss_sum(forward, windows, device) * scale
    loss.backward()
    return loss.item()
