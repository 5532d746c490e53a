"""Accelerate.

torchrun --nproc-per-node 2 examples/hf_accelerate.py    # again: it resumes from the middle; `accelerate launch` works
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.nn import functional as F

import demopt
from demopt.integrations.accelerate import register

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--out", type=Path, default=Path("runs/hf_accelerate"))
parser.add_argument("--demo", action="store_true", help="DeMo instead of LocalDeMo around Muon and AdamW")
args = parser.parse_args()

seedable = DataLoaderConfiguration(use_seedable_sampler=True)  # a resumed run reads the same batches
accelerator = Accelerator(cpu=torch.cuda.device_count() < 2, gradient_accumulation_steps=2, dataloader_config=seedable)
set_seed(0)
files = sorted(Path(__file__).parent.glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8).long()
data = text.unfold(0, 17, 1)  # 16 bytes, and the next
model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 128), nn.GELU(), nn.Linear(128, 256))
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)

optimizer = demopt.LocalDeMo(demopt.muon_adamw(model, lr=0.02, others=[model[4]]))
if args.demo:
    optimizer = demopt.DeMo(demopt.muon_groups(model, lr=0.02, others=[model[4]]), momentum_decay=0.95)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
demopt.unsync(model)  # <- 1: prepare wrapped it in DistributedDataParallel
demo = register(accelerator, optimizer)  # <- 2: for save_state and load_state; unwraps the optimizer

first = 0
if args.out.exists():
    accelerator.load_state(str(args.out))
    first = args.steps // 2
batches = iter(accelerator.skip_first_batches(loader, 2 * first))
for step in range(first, args.steps):
    for _ in range(2):
        with accelerator.accumulate(model):
            tokens = next(batches)
            loss = F.cross_entropy(model(tokens[:, :-1]), tokens[:, -1])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if step + 1 == args.steps // 2:
        accelerator.save_state(str(args.out))
print(f"steps {first} to {args.steps}: loss {loss.item():.3f}, fingerprint {demo.fingerprint():016x}")
accelerator.end_training()
