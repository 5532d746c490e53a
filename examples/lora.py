"""LoRA adapters of a transformers model, with peft: only the adapters train and travel.

torchrun --nproc-per-node 2 examples/lora.py     # again: it resumes from the middle, and ends with the same bits
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import GPT2Config, GPT2LMHeadModel

import demopt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--out", type=Path, default=Path("runs/lora"))
args = parser.parse_args()
TEXT = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()


def batch(step):  # different on every rank and in every step
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(TEXT) - 33, (8,), generator=generator)
    return torch.stack([TEXT[start : start + 33] for start in starts])


dist.init_process_group("gloo")
torch.manual_seed(0)  # stands for a pretrained model, the same on every rank
small = {"vocab_size": 256, "n_positions": 33, "n_embd": 64, "n_layer": 2, "n_head": 4}
no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}  # so that a resumed run has the same bits
base = GPT2LMHeadModel(GPT2Config(**small, **no_dropout, bos_token_id=0, eos_token_id=0))
adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
model = get_peft_model(base, adapters)  # <- 1: freezes the base, which then neither trains nor travels
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = demopt.LocalDeMo(torch.optim.AdamW(trained, lr=1e-2), sync_every=5)  # <- 2

checkpoint, first = args.out / f"rank{dist.get_rank()}.pt", 0
if checkpoint.exists():
    saved = torch.load(checkpoint)
    set_peft_model_state_dict(model, saved["adapters"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
sent = 0
for step in range(first, args.steps):
    tokens = batch(step)
    loss = model(tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sent += optimizer.stats.sent_bytes
    if step + 1 == args.steps // 2:
        args.out.mkdir(parents=True, exist_ok=True)
        with optimizer.shared():  # the global adapters, the same on all ranks
            state = {"adapters": get_peft_model_state_dict(model), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": step + 1}, checkpoint)

count, everything = sum(p.numel() for p in trained), sum(p.numel() for p in base.parameters())
print(
    f"{sent / (args.steps - first):,.0f} bytes per step for {count:,} of {everything:,} parameters\n"
    f"steps {first} to {args.steps}: loss {loss.item():.3f}, fingerprint {optimizer.fingerprint():016x}"
)
