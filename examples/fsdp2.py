"""FSDP2 inside a node, LocalDeMo between nodes. Here: two "nodes" on one machine, or one with --nodes 1:

    torchrun --nproc-per-node 4 examples/fsdp2.py --nodes 2

On real nodes, start it with torchrun on each, without --nodes. See docs/parallelism.md.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import demopt

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=0, help="0: as many as torchrun was started on")
parser.add_argument("--steps", type=int, default=30)
arguments = parser.parse_args()

device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cuda:nccl,cpu:gloo" if device == "cuda" else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
nodes = arguments.nodes or world_size // int(os.environ["LOCAL_WORLD_SIZE"])
mesh = init_device_mesh(device, (nodes, world_size // nodes), mesh_dim_names=("replicate", "shard"))

torch.manual_seed(0)  # the same weights on every rank
blocks = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4)]
model = nn.Sequential(nn.Linear(64, 128), *blocks, nn.Linear(128, 8)).to(device)
for block in blocks:
    fully_shard(block, mesh=mesh["shard"])  # <- 1: shards over a node's fast links, not the whole mesh
fully_shard(model, mesh=mesh["shard"])

inner = demopt.muon_adamw(model, lr=0.02, others=[model[0], model[-1]])
optimizer = demopt.LocalDeMo(inner, sync_every=5, process_group=mesh["replicate"])  # <- 2: over the slow ones

teacher = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).to(device) / 8
for step in range(arguments.steps):
    generator = torch.Generator().manual_seed(step * world_size + rank)  # different data on every rank
    inputs = torch.randn(64, 64, generator=generator).to(device)
    loss = (model(inputs) - (inputs @ teacher).tanh()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if rank == 0 and (step + 1) % 10 == 0:
        sent, gradient = optimizer.stats.sent_bytes, 4 * sum(p.to_local().numel() for p in model.parameters())
        print(f"step {step + 1}: loss {loss.item():.3f}, {sent:,} bytes sent; the gradient of a shard has {gradient:,}")

dist.destroy_process_group()
