"""From DDP and AdamW to LocalDeMo in a custom loop: decay groups, a tied head, accumulation, a checkpoint per rank.

torchrun --nproc-per-node 2 examples/raw_loop.py     # again: it resumes from the middle, and ends with the same bits
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import demopt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--out", type=Path, default=Path("runs/raw_loop"))
parser.add_argument("--demo", action="store_true", help="DeMo instead of LocalDeMo around Muon and AdamW")
args = parser.parse_args()
ACCUMULATE = 2
TEXT = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        nn.init.normal_(self.embedding.weight, std=0.02)  # it is also the head
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(64), enable_nested_tensor=False)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.layers(self.embedding(tokens), mask=mask, is_causal=True)
        return F.linear(hidden, self.embedding.weight)  # the head is tied: muon_adamw finds it with the embedding


def batch(number):  # different on every rank and in every step, as with a DistributedSampler
    generator = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(TEXT) - 33, (8,), generator=generator)
    return torch.stack([TEXT[start : start + 33] for start in starts])


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model()  # <- 1: the plain model, where DistributedDataParallel(model) was
muon, adamw = demopt.muon_adamw(model, lr=0.02)
small = [parameter for parameter in adamw.param_groups[0]["params"] if parameter.dim() < 2]
adamw.param_groups[0]["params"] = [p for p in adamw.param_groups[0]["params"] if p.dim() >= 2]
adamw.add_param_group({"params": small, "weight_decay": 0.0})  # biases and norms: no decay
optimizer = demopt.LocalDeMo([muon, adamw])  # <- 2: where torch.optim.AdamW(model.parameters(), ...) was
if args.demo:
    optimizer = demopt.DeMo(demopt.muon_groups(model, lr=0.02), momentum_decay=0.95)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)

checkpoint, first = args.out / f"rank{dist.get_rank()}.pt", 0  # one file per rank: the errors differ
parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
if checkpoint.exists():
    saved = torch.load(checkpoint)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    first = saved["step"]
for step in range(first, args.steps):
    for number in range(ACCUMULATE):  # no model.no_sync(): nothing is sent before the step
        tokens = batch(step * ACCUMULATE + number)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        (loss / ACCUMULATE).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step + 1 == args.steps // 2:
        args.out.mkdir(parents=True, exist_ok=True)
        torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": step + 1}, checkpoint)
print(f"steps {first} to {args.steps}: loss {loss.item():.3f}, fingerprint {optimizer.fingerprint():016x}")
