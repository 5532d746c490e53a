"""On an accelerator whose memory the host may not touch, everything runs, with the CPU's bits."""

import copy
import functools
import importlib
import io
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toy
from torch import nn

import demopt
import ranks
from demopt.errors import MessageError
from demopt.exchange import Exchange, SingleRank
from demopt.optim.local_weights import LocalWeights
from demopt.wire.message import HEADER_BYTES
from demopt.wire.message import build as message_of

STEPS = 6
DRAWING = threading.Lock()


class Small(nn.Module):
    """Equal layers, matrices padded to chunks, vectors, a number, a frozen and an unused parameter."""

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
    "DeMo, clip to median, positions of a byte": (functools.partial(demo, clip_to_median=True, top_k=1), torch.float32),
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


class ThroughHost(Exchange):
    """Threads whose messages travel through the host, as between unlike machines."""

    def __init__(self, exchange: Exchange) -> None:
        self.rank, self.world_size, self._exchange = exchange.rank, exchange.world_size, exchange

    def all_gather(self, message_B: torch.Tensor) -> torch.Tensor:
        return self._exchange.all_gather(message_B.cpu())

    def all_to_all(self, parts_WB: torch.Tensor) -> torch.Tensor:
        return self._exchange.all_to_all(parts_WB.cpu())

    def broadcast(self, data_B: torch.Tensor, src: int) -> None:
        data = data_B.cpu()
        self._exchange.broadcast(data, src)
        data_B.copy_(data)


def _same_bits(rank: int, world_size: int, case: str) -> set[str]:
    toy.register()
    expected = ranks.threads(lambda exchange: tensors(*train(exchange, "cpu", case)), 2)
    toy.races()
    # threads do not order streams, as a background thread needs it
    between = ThroughHost if "delay" in case else lambda exchange: exchange
    found = ranks.threads(lambda exchange: tensors(*train(between(exchange), "toy", case)), 2)
    assert all(map(equal, found, expected)), [
        number
        for number, (mine, theirs) in enumerate(zip(found[0], expected[0], strict=True))
        if not torch.equal(mine, theirs)
    ]
    return toy.races()


@pytest.mark.parametrize("case", CASES)
def test_training_has_the_bits_of_the_cpu_and_no_races(on_toy: Any, case: str) -> None:
    assert on_toy(_same_bits, 1, case) == [set()]


def _unlike(rank: int, world_size: int, case: str, steps: int) -> list[list[torch.Tensor]]:
    toy.register()

    def work(exchange: Exchange) -> list[torch.Tensor]:
        model, optimizer = train(ThroughHost(exchange), ("toy", "cpu")[exchange.rank], case, steps=steps)
        with optimizer.shared() if hasattr(optimizer, "shared") else torch.no_grad():
            return [parameter.detach().cpu() for parameter in model.parameters()]

    return ranks.threads(work, 2)


@pytest.mark.parametrize("steps", [60, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("case", ["DeMo", "DeMo, bfloat16", "LocalDeMo", "LocalDeMo, owner"])
def test_a_rank_on_an_accelerator_and_one_on_a_cpu_stay_equal(on_toy: Any, case: str, steps: int) -> None:
    ((one, other),) = on_toy(_unlike, 1, case, steps)
    assert equal(one, other)


def _with_processes(rank: int, world_size: int, case: str, backend: str) -> tuple[bool, set[str]]:
    toy.register()
    group = None
    if backend != "gloo":
        toyccl = importlib.import_module("toyccl")  # once the device is there
        toyccl.register()
        toyccl.CALLS.clear()
        group = dist.new_group(backend=backend)
    model, optimizer = train(demopt.exchange.Collective(), "cpu", case)
    expected = tensors(model, optimizer)
    torch.accelerator.set_stream(torch.Stream("toy"))  # of the user: nothing orders the default one after it
    toy.races()
    exchange = demopt.exchange.Collective(group)
    model, optimizer = train(exchange, "toy", case)
    found = tensors(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the bytes that this takes
        optimizer.consolidate_state_dict()
    fingerprints = demopt.exchange.interface.gather_values(exchange, optimizer.fingerprint(), torch.device("toy"))
    assert backend == "gloo" or toyccl.CALLS.count("all_to_all" if "owner" in case else "all_gather") > 2
    torch.accelerator.set_stream(torch.Stream(stream_id=0, device_index=0, device_type=20))
    return equal(found, expected) and fingerprints[0] == fingerprints[1], toy.races()


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *((case, "gloo") for case in ("DeMo, owner", "LocalDeMo", "LocalDeMo, delay", "LocalDeMo, owner, delay")),
        *((case, "toyccl") for case in ("DeMo", "DeMo, owner", "LocalDeMo, delay", "LocalDeMo, owner, delay")),
    ],
)
def test_two_processes_exchange_through_the_host_with_gloo_or_between_devices(
    on_toy: Any, case: str, backend: str
) -> None:
    """Device tensors alone travel with a backend that has nccl's manners, and refuses others."""
    assert on_toy(_with_processes, 2, case, backend) == [(True, set()), (True, set())]


def _saved(optimizer: Any, device: str | None) -> Any:
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(**({"in_flight": True} if hasattr(optimizer, "flush") else {})), buffer)
    buffer.seek(0)
    return torch.load(buffer, map_location=device, weights_only=True)


def _checkpoints(rank: int, world_size: int, case: str) -> None:
    toy.register()
    warnings.simplefilter("ignore")  # of saving between rounds, and of loading another number of ranks' states

    ways = [("toy", "cpu", None), ("toy", "cpu", "cpu"), ("cpu", "toy", "toy"), ("toy", "toy", None)]
    groups = [demopt.exchange.thread_exchanges(2, 60.0) for _ in range(8)]  # exchanges in the background need their own

    def work(exchange: Exchange) -> None:
        mine = iter([ThroughHost(group[exchange.rank]) for group in groups])
        for source, target, where in ways:
            model, optimizer = train(next(mine), source, case, steps=4)
            twin = copy.deepcopy(model).to(target)
            again = CASES[case][0](twin, next(mine))
            again.load_state_dict(_saved(optimizer, where))
            for step in (4, 5):
                for each, its in ((model, optimizer), (twin, again)):
                    fill(each, exchange.rank, step)
                    its.step()
            assert equal(tensors(model, optimizer), tensors(twin, again)), (source, target, where)
        optimizer.consolidate_state_dict()
        if exchange.rank == 0:
            single = drawn(CASES[case][1]).to("toy")
            alone = CASES[case][0](single, SingleRank())
            alone.load_state_dict(optimizer.state_dict())
            fill(single, 0, 0)
            alone.step()

    ranks.threads(work, 2)


@pytest.mark.parametrize("case", ["DeMo", "LocalDeMo", "LocalDeMo, owner", "LocalDeMo, delay"])
def test_states_move_between_accelerator_and_cpu_and_to_other_numbers_of_ranks(on_toy: Any, case: str) -> None:
    on_toy(_checkpoints, 1, case)


def _regroup(rank: int, world_size: int) -> bool:
    toy.register()
    exchanges = [demopt.exchange.thread_exchanges(2, 20.0) for _ in range(2)]

    def work(exchange: Exchange) -> list[torch.Tensor]:
        model, optimizer = train(exchange, "toy", "LocalDeMo, delay", steps=5)
        optimizer.regroup(exchanges[0][exchange.rank])
        fill(model, exchange.rank, 5)
        optimizer.step()
        optimizer.resync(1)
        return tensors(model, optimizer)[: len(list(model.parameters()))]

    return equal(*ranks.threads(work, 2))


def test_members_change_on_an_accelerator(on_toy: Any) -> None:
    assert on_toy(_regroup, 1) == [True]


def _scaled(rank: int, world_size: int, case: str) -> bool:
    toy.register()

    def work(exchange: Exchange, device: str) -> list[torch.Tensor]:
        model = drawn().to(device)
        optimizer = CASES[case][0](model, exchange)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
        for step in range(4):
            fill(model, exchange.rank, step, scale=2.0**10)
            if step == 1 and exchange.rank == 1:
                model.scale.grad.fill_(float("inf"))
            scaler.scale(torch.ones((), device=device))
            with torch.autocast(device, torch.bfloat16):
                scaler.step(optimizer)
            scaler.update(2.0**10)
        return tensors(model, optimizer)

    return all(map(equal, *(ranks.threads(work, 2, device) for device in ("cpu", "toy"))))


@pytest.mark.parametrize("case", ["DeMo", "LocalDeMo"])
def test_a_gradient_scaler_works_as_on_a_cpu(on_toy: Any, case: str) -> None:
    assert on_toy(_scaled, 1, case) == [True]


def _moved(rank: int, world_size: int) -> None:
    toy.register()
    local_weight = nn.Parameter(torch.ones(2))
    weights = LocalWeights([local_weight])
    weights.global_of[local_weight] = nn.Parameter(torch.ones(2, device="toy"))
    with pytest.raises(RuntimeError, match="build LocalDeMo after"):
        weights.create()


def test_a_model_that_moves_after_local_demo_was_built_is_refused(on_toy: Any) -> None:
    on_toy(_moved, 1)


def _refused(rank: int, world_size: int, case: str) -> str:
    toy.register()
    model, optimizer = train(SingleRank(), "toy", case)
    fill(model, 0, STEPS)
    message = optimizer.extract()
    header = optimizer.replicator.round.header
    hostile = message_of(header, torch.full_like(message[HEADER_BYTES:], 0xFF), device=message.device)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(MessageError) as refused:
        optimizer.apply(optimizer.exchange(hostile))
    assert all(map(torch.equal, before, model.parameters()))
    return str(refused.value)


@pytest.mark.parametrize("case", ["DeMo", "DeMo, floats", "LocalDeMo", "LocalDeMo, top-k"])
def test_invalid_values_on_an_accelerator_are_refused_with_the_rank(on_toy: Any, case: str) -> None:
    assert "message of rank 0" in on_toy(_refused, 1, case)[0]
