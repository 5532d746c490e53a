"""Trains a tiny model for many steps and watches what must not grow: memory and open handles of every rank.

    python benchmarks/soak.py --steps 20000 --results benchmarks/results/soak.json

Real processes over gloo on this machine, DeMo with overlap and then LocalDeMo with delay. Now and then a rank has a NaN
in its gradient, a parameter is frozen and thawed, the state is saved and loaded, and the ranks regroup. Prints a line
for each optimizer; exits with 1 if resident memory at the end is more than 2 % above that after step 1,000 (after a
twentieth of fewer steps), if a rank has more open handles than then, or if fingerprints differ.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import demopt

WARM_STEPS = 1000
REGROUP_EVERY, FREEZE_EVERY, SAVE_EVERY, NAN_EVERY = 1000, 700, 450, 130
MOST_GROWTH = 0.02


def make(kind: str, model: torch.nn.Module) -> Any:
    """Returns the optimizer."""
    if kind == "demo":
        return demopt.DeMo(model.parameters(), lr=1e-3, overlap=2, chunk=16, top_k=8)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return demopt.LocalDeMo(inner, sync_every=2, top_k=8, chunk=16, delay=1)


def disturb(step: int, model: torch.nn.Module, optimizer: Any) -> None:
    """What a long run meets, before some of the steps."""
    first = next(model.parameters())
    between = getattr(optimizer, "local_steps", 0) == 0
    if step % FREEZE_EVERY == 0 and between:
        first.requires_grad_(not first.requires_grad)
    if step % SAVE_EVERY == 0:
        optimizer.load_state_dict(optimizer.state_dict(in_flight=True))
    if step % REGROUP_EVERY == 0 and between:
        optimizer.regroup(None)


def measured() -> dict[str, int]:
    """Returns this process's resident bytes and open handles."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"), "handles": len(os.listdir("/proc/self/fd"))}


def train(rank: int, world_size: int, kind: str, steps: int, folder: str) -> None:
    """One rank; writes what it measured to `folder`."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 7))
    optimizer = make(kind, model)
    data = torch.Generator().manual_seed(rank)
    told: list[dict[str, Any]] = []
    warm = min(WARM_STEPS, max(1, steps // 20))
    for step in range(1, steps + 1):
        disturb(step, model, optimizer)
        optimizer.zero_grad()
        loss = model(torch.randn(8, 24, generator=data)).square().mean()
        (loss * float("nan") if step % NAN_EVERY == rank else loss).backward()
        optimizer.step()
        if step in (warm, steps):
            told.append({"step": step, **measured()})
    optimizer.flush()
    told[-1]["fingerprint"] = optimizer.fingerprint()
    Path(f"{folder}/{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    os._exit(0)


def soak(kind: str, world_size: int, steps: int) -> dict[str, Any]:
    """Returns the measurements of all ranks, and what is wrong with them."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (world_size, kind, steps, folder), nprocs=world_size)
        ranks = [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(world_size)]
    growth = max(end["resident_bytes"] / warm["resident_bytes"] - 1 for warm, end in ranks)
    handles = max(end["handles"] - warm["handles"] for warm, end in ranks)
    wrong = [f"resident memory grew by {growth:.1%}"] if growth > MOST_GROWTH else []
    wrong += [f"{handles} more open handles"] if handles > 0 else []
    wrong += ["fingerprints differ"] if len({end["fingerprint"] for _, end in ranks}) > 1 else []
    told = {"optimizer": kind, "steps": steps, "workers": world_size, "seconds": round(time.monotonic() - began)}
    return {**told, "memory_growth": growth, "more_handles": handles, "wrong": wrong, "ranks": ranks}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--only", choices=["demo", "local"])
    parser.add_argument("--results", type=Path, help="a JSON file for the measurements")
    given = parser.parse_args()
    found = []
    for kind in (given.only,) if given.only else ("demo", "local"):
        result = soak(kind, given.workers, given.steps)
        found.append(result)
        verdict = "; ".join(result["wrong"]) or "flat"
        growth, handles = result["memory_growth"], result["more_handles"]
        print(f"{kind}: {given.steps:,} steps, memory {growth:+.2%}, handles {handles:+}: {verdict}", flush=True)
        if given.results is not None:
            given.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if any(result["wrong"] for result in found) else 0


if __name__ == "__main__":
    sys.exit(main())
