"""transformers' Trainer.

torchrun --nproc-per-node 2 examples/hf_trainer.py   # again: it resumes from the middle, and ends with the same bits
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import demopt
from demopt.integrations.transformers import DeMoCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--out", type=Path, default=Path("runs/hf_trainer"))
parser.add_argument("--demo", action="store_true", help="DeMo instead of LocalDeMo around Muon and AdamW")
args = parser.parse_args()

text = list(Path(__file__).read_bytes())
data = [{"input_ids": text[at : at + 32], "labels": text[at : at + 32]} for at in range(0, len(text) - 32, 4)]
set_seed(0)
small = {"vocab_size": 256, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(**small, bos_token_id=0, eos_token_id=0))

optimizer = demopt.LocalDeMo(demopt.muon_adamw(model, lr=0.02))  # <- 1: finds the tied head
if args.demo:
    optimizer = demopt.DeMo(demopt.muon_groups(model, lr=0.02), momentum_decay=0.95)

trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=str(args.out),
        max_steps=args.steps,
        save_steps=args.steps // 2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        lr_scheduler_type="constant",
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
        use_cpu=torch.cuda.device_count() < 2,
    ),
    train_dataset=data,
    optimizers=(optimizer, None),
    callbacks=[DeMoCallback()],  # <- 2
)
middle = args.out / f"checkpoint-{args.steps // 2}"
first = args.steps // 2 if middle.exists() else 0
trainer.train(resume_from_checkpoint=str(middle) if first else None)

with torch.no_grad():
    batch = torch.tensor([each["input_ids"] for each in data[:32]], device=model.device)
    loss = model(batch, labels=batch).loss.item()
print(f"steps {first} to {args.steps}: loss {loss:.3f}, fingerprint {optimizer.fingerprint():016x}")
