"""A tiny causal language model of transformers in a folder, with a tokenizer of bytes that has a chat template."""

import json
import random
from pathlib import Path

import torch

from demopt.train.data import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_tiny(folder: Path, dtype: torch.dtype = torch.float32, template: str = TEMPLATE, seed: int = 1) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(shape).to(dtype).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def save_chats(file: Path, number: int = 40) -> Path:
    draw, lines = random.Random(0), []
    for _ in range(number):
        one, other = draw.randrange(10), draw.randrange(100)
        turns = (("user", f"{one}+{other}?"), ("assistant", str(one + other)), ("user", "Sure?"), ("assistant", "Yes."))
        lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    file.write_text("\n".join(lines) + "\n")
    return file
