"""Saves the trained model in transformers' format, and generates a sample of text."""

from __future__ import annotations

from typing import Any

import torch

from demopt.train.config import TrainConfig
from demopt.train.folder import RunFolder


def save_model(model: Any, tokenizer: Any, folder: RunFolder) -> None:
    """Save for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder.model)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder.model)


@torch.no_grad()
def write_sample(model: Any, tokenizer: Any, config: TrainConfig) -> str | None:
    """Return the prompt and the model's continuation, None if the model's output is not finite.

    It is seeded, so the same model writes the same text.
    """
    encoded = tokenizer(config.prompt, add_special_tokens=False, return_tensors="pt").to(model.device)
    room = (config.sequence or 0) - encoded["input_ids"].shape[1]
    if room < 1 or not encoded["input_ids"].shape[1]:
        return config.prompt
    torch.manual_seed(config.seed)
    model.eval()
    if not torch.isfinite(model(input_ids=encoded["input_ids"]).logits).all():
        return None
    tokens = model.generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        max_new_tokens=min(config.sample_tokens, room),
        do_sample=True,
        temperature=0.8,
        top_k=50,
        pad_token_id=tokenizer.eos_token_id,
    )
    text: str = tokenizer.decode(tokens[0], skip_special_tokens=True)
    return text
