"""A long run of four processes: the memory and the open handles of a rank do not grow, and replicas stay equal.

Now and then a rank has a NaN in its gradient, a parameter is frozen and thawed, the state is saved and loaded, and the
ranks regroup.
"""

import gc
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import demopt
import ranks

STEPS, WARM_STEPS, WORLD_SIZE = 20_000, 1000, 4
REGROUP_EVERY, FREEZE_EVERY, SAVE_EVERY, NAN_EVERY = 1000, 700, 450, 130
MOST_GROWTH = 0.02


def make(kind: str, model: torch.nn.Module) -> Any:
    if kind == "demo":
        return demopt.DeMo(model.parameters(), lr=1e-3, chunk=16, top_k=8)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return demopt.LocalDeMo(inner, sync_every=2, top_k=8, chunk=16, delay=1)


def disturb(step: int, model: torch.nn.Module, optimizer: Any) -> None:
    first, between = next(model.parameters()), getattr(optimizer, "local_steps", 0) == 0
    if step % FREEZE_EVERY == 0 and between:
        first.requires_grad_(not first.requires_grad)
    if step % SAVE_EVERY == 0:
        in_flight = {"in_flight": True} if isinstance(optimizer, demopt.LocalDeMo) else {}
        optimizer.load_state_dict(optimizer.state_dict(**in_flight))
    if step % REGROUP_EVERY == 0 and between:
        optimizer.regroup(None)


def measured() -> dict[str, int]:
    """This process's resident bytes and open handles."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"), "handles": len(os.listdir("/proc/self/fd"))}


def train(rank: int, world_size: int, kind: str) -> tuple[dict[str, int], dict[str, int], int]:
    """This process's measurements when it is warm and at the end, and its fingerprint."""
    warnings.simplefilter("ignore")  # of gradients that are not finite
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 7))
    optimizer = make(kind, model)
    data = torch.Generator().manual_seed(rank)
    for step in range(1, STEPS + 1):
        disturb(step, model, optimizer)
        optimizer.zero_grad()
        loss = model(torch.randn(8, 24, generator=data)).square().mean()
        (loss * float("nan") if step % NAN_EVERY == rank else loss).backward()
        optimizer.step()
        if step == WARM_STEPS:
            warm = measured()
    end = measured()
    if isinstance(optimizer, demopt.LocalDeMo):
        optimizer.flush()
    return warm, end, optimizer.fingerprint()


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
@pytest.mark.parametrize("kind", ["demo", "local"])
def test_a_long_run_keeps_its_memory_its_handles_and_equal_replicas(kind: str) -> None:
    found = ranks.run(train, WORLD_SIZE, kind, seconds=7000.0)
    for warm, end, _ in found:
        assert end["resident_bytes"] <= (1 + MOST_GROWTH) * warm["resident_bytes"]
        assert end["handles"] <= warm["handles"]
    assert len({fingerprint for *_, fingerprint in found}) == 1
