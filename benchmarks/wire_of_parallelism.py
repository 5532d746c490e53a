"""Bytes on the wire of a step, of all ranks together, as the kernel counts them on the loopback device.

Needs a network namespace of its own, so that nothing else is counted (as root):

    unshare -n sh -c 'ip link set lo up; torchrun --standalone --nproc-per-node 4 benchmarks/wire_of_parallelism.py'
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import demopt

STEPS = 20
KINDS = ("plain", "ddp", "ddp, unsync", "fsdp2", "hsdp", "hsdp, unsync", "fsdp2, muon")


def counted() -> int:
    """Bytes that the loopback device has received so far."""
    with open("/proc/net/dev") as file:
        return next(int(line.split(":")[1].split()[0]) for line in file if line.strip().startswith("lo:"))


def measure(kind: str) -> tuple[float, int]:
    """Returns the bytes of a step on the wire, and what this rank sends to others in DeMo's messages."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
    group = None
    if kind.startswith("ddp"):
        model = DistributedDataParallel(model)
    if kind.startswith(("hsdp", "fsdp2")):
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh if kind.startswith("hsdp") else mesh["shard"])
        group = mesh["replicate"]
    if kind.endswith("unsync"):
        demopt.unsync(model)
    parameters = demopt.muon_groups(model, lr=0.02) if kind.endswith("muon") else model.parameters()
    optimizer = demopt.DeMo(parameters, process_group=group)
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    before = 0
    for step in range(3 + STEPS):
        if step == 3:
            dist.barrier()
            before = counted()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    dist.barrier()
    return (counted() - before) / STEPS, optimizer.stats.sent_bytes


warnings.simplefilter("ignore")
dist.init_process_group("gloo")
for kind in KINDS:
    on_the_wire, sent = measure(kind)
    if dist.get_rank() == 0:
        print(f"{kind:14} {on_the_wire:12,.0f} B a step; DeMo's messages: {sent:,} B a rank", flush=True)
dist.destroy_process_group()
