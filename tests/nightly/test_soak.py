"""A long run of four processes, with disturbances: its memory and open handles do not grow, and replicas stay equal."""

import gc
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import demopt
import problems

STEPS, WARM_STEPS, WORLD_SIZE = 20_000, 1000, 4
REGROUP_EVERY, FREEZE_EVERY, SAVE_EVERY, NAN_EVERY = 1000, 700, 450, 130
MOST_GROWTH = 0.02


def disturb(step, model, optimizer):
    first, between = next(model.parameters()), getattr(optimizer, "local_steps", 0) == 0
    if step % FREEZE_EVERY == 0 and between:
        first.requires_grad_(not first.requires_grad)
    if step % SAVE_EVERY == 0:
        optimizer.load_state_dict(optimizer.state_dict())
    if step % REGROUP_EVERY == 0 and between:
        optimizer.regroup(None)


def measured():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"), "handles": len(os.listdir("/proc/self/fd"))}


def train(rank, kind, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 7))
    optimizer = problems.optimizer_of(kind, model.parameters(), **({} if kind == "DeMo" else {"delay": 1}))
    data = torch.Generator().manual_seed(rank)
    found = []
    for step in range(1, STEPS + 1):
        disturb(step, model, optimizer)
        optimizer.zero_grad()
        loss = model(torch.randn(8, 24, generator=data)).square().mean()
        (loss * float("nan") if step % NAN_EVERY == rank else loss).backward()
        optimizer.step()
        if step in (WARM_STEPS, STEPS):
            found.append(measured())
    if isinstance(optimizer, demopt.LocalDeMo):
        optimizer.flush()
    found[-1]["fingerprint"] = optimizer.fingerprint()
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_a_long_run_keeps_its_memory_its_handles_and_equal_replicas(kind, tmp_path):
    torch.multiprocessing.spawn(train, (kind, str(tmp_path)), nprocs=WORLD_SIZE)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    for warm, end in ranks:
        assert end["resident_bytes"] <= (1 + MOST_GROWTH) * warm["resident_bytes"]
        assert end["handles"] <= warm["handles"]
    assert len({end["fingerprint"] for _, end in ranks}) == 1
