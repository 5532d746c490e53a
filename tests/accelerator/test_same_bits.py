"""On an accelerator whose memory the host may not touch, everything runs, with the CPU's bits."""

import copy
import functools
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import demopt
import ranks
import toy
from demopt.exchange import Exchange, SingleRank
from demopt.state import reshard

STEPS = 6
DRAWING = threading.Lock()


class Small(nn.Module):
    """Matrices, of which some are padded to chunks, equal layers, vectors, a number, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32)) for _ in range(3))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 47)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(7))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(self.norm(hidden)) * self.scale

    def matrices(self) -> list[nn.Parameter]:
        return [p for p in self.layers.parameters() if p.dim() == 2]

    def others(self) -> list[nn.Parameter]:
        inside = {id(p) for p in self.matrices()}
        return [p for p in self.parameters() if id(p) not in inside]


def drawn(dtype: torch.dtype = torch.float32) -> Small:
    with DRAWING:  # threads share a generator
        torch.manual_seed(0)
        return Small().to(dtype)


def fill(model: Small, rank: int, step: int, scale: float = 1.0) -> None:
    """Sets the gradients that a twin of the model on the CPU has, so that only the optimizer can differ."""
    draw = torch.Generator().manual_seed(1000 * rank + step)
    twin = copy.deepcopy(model).cpu().float()
    twin.zero_grad()
    output = twin(torch.randint(50, (16,), generator=draw))
    ((output - torch.randn(16, 47, generator=draw)).square().mean() * scale).backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        mine.grad = None if theirs.grad is None else theirs.grad.to(mine.device, mine.dtype)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, foreach=True)


def demo(model: Small, exchange: Exchange, **settings: Any) -> Any:
    base = {"chunk": 16, "top_k": 24, "momentum_decay": 0.9, "lr": 0.01, "kernels": "torch", "fingerprint_every": 2}
    return demopt.DeMo(model.parameters(), process_group=exchange, **{**base, **settings})


def demo_muon(model: Small, exchange: Exchange, **settings: Any) -> Any:
    groups = [{"params": model.matrices(), "update": "muon"}, {"params": model.others(), "update": "adamw"}]
    base = {"chunk": 16, "top_k": 24, "momentum_decay": 0.9, "lr": 0.01, "kernels": "torch"}
    return demopt.DeMo(groups, process_group=exchange, **{**base, **settings})


def local(model: Small, exchange: Exchange, **settings: Any) -> Any:
    base = {"chunk": 16, "sync_every": 2, "kernels": "torch", "fingerprint_every": 1}
    return demopt.LocalDeMo(adamw(model.parameters()), process_group=exchange, **{**base, **settings})


def local_muon(model: Small, exchange: Exchange, **settings: Any) -> Any:
    muon = torch.optim.Muon(model.matrices(), lr=1e-2)
    base = {"chunk": 16, "sync_every": 2, "kernels": "torch"}
    return demopt.LocalDeMo([muon, adamw(model.others())], process_group=exchange, **{**base, **settings})


CASES: dict[str, tuple[Callable[..., Any], torch.dtype]] = {
    "DeMo": (demo, torch.float32),
    "DeMo, owner": (functools.partial(demo, route="owner"), torch.float32),
    "DeMo, owner, two bits": (functools.partial(demo, route="owner", transform="identity"), torch.float32),
    "DeMo, muon": (demo_muon, torch.float32),
    "DeMo, int8, mean, weight decay": (
        functools.partial(demo, values="int8", reduction="mean", weight_decay=0.1, maximize=True), torch.float32
    ),
    "DeMo, floats": (functools.partial(demo, values="float32", update="lion"), torch.float32),
    "DeMo, clip to median": (functools.partial(demo, clip_to_median=True), torch.float32),
    "DeMo, bfloat16": (functools.partial(demo, weight_decay=0.1), torch.bfloat16),
    "DeMo, muon, bfloat16": (demo_muon, torch.bfloat16),
    "DeMo, float64": (demo, torch.float64),
    "LocalDeMo": (functools.partial(local, route="gather"), torch.float32),
    "LocalDeMo, owner": (functools.partial(local, route="owner"), torch.float32),
    "LocalDeMo, samples": (functools.partial(local, route="gather", samples=3), torch.float32),
    "LocalDeMo, top-k": (functools.partial(local, top_k=24), torch.float32),
    "LocalDeMo, delay": (functools.partial(local, delay=1), torch.float32),
    "LocalDeMo, owner, delay": (functools.partial(local, delay=1, route="owner"), torch.float32),
    "LocalDeMo, outer momentum": (functools.partial(local, outer_momentum=0.5), torch.float32),
    "LocalDeMo, bfloat16": (local, torch.bfloat16),
    "LocalDeMo, muon": (local_muon, torch.float32),
}  # fmt: skip


def train(exchange: Exchange, device: str, case: str, steps: int = STEPS) -> tuple[Any, Any]:
    make, dtype = CASES[case]
    model = drawn(dtype).to(device)
    optimizer = make(model, exchange)
    for step in range(steps):
        fill(model, exchange.rank, step)
        optimizer.step()
    return model, optimizer


def tensors(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Parameters and all state, on the CPU."""
    if hasattr(optimizer, "flush"):
        optimizer.flush()
    with optimizer.shared() if hasattr(optimizer, "shared") else torch.no_grad():
        found = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    state = optimizer.state_dict()["state"]
    for number in sorted(state):
        entry = state[number]
        found += [entry[name].cpu() for name in sorted(entry) if isinstance(entry[name], torch.Tensor)]
    return found


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _same_bits(rank: int, world_size: int, case: str) -> set[str]:
    toy.register()
    expected = ranks.threads(lambda exchange: tensors(*train(exchange, "cpu", case)), 2)
    toy.races()
    found = ranks.threads(lambda exchange: tensors(*train(exchange, "toy", case)), 2)
    assert all(map(equal, found, expected)), [
        (n, float((a.double() - b.double()).abs().max())) for n, (a, b) in enumerate(zip(found[0], expected[0]))
        if not torch.equal(a, b)
    ]  # fmt: skip
    return toy.races()


@pytest.mark.parametrize("case", CASES)
def test_training_has_the_bits_of_the_cpu_and_no_races(on_toy: Any, case: str) -> None:
    assert on_toy(_same_bits, 1, case) == [set()]
