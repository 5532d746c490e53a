"""The rest of the library on an accelerator: buffers, checkpoints, folders, memory, waits, and state on the host."""

import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import toy
from test_same_bits import CASES, DRAWING, fill, go_on_alike, train
from torch import nn

import demopt
import problems
import ranks
from demopt.checkpoint import LoadPlanner, OptimizerState
from demopt.exchange import Exchange, SingleRank, Threads
from demopt.runs.store import ObjectStore
from demopt.runs.weights import weights_digest
from laboratory import gpu


def _buffers(rank: int, world_size: int) -> list[list[float]]:
    model = nn.BatchNorm1d(3).to("toy")
    model.running_mean.fill_(float(rank + 1))
    demopt.broadcast_buffers(model, src=1)
    return [model.running_mean.cpu().tolist(), [float(model.num_batches_tracked)]]


def test_buffers_of_an_accelerator_are_broadcast(on_toy):
    assert on_toy(_buffers, 2) == 2 * [[[2.0, 2.0, 2.0], [0.0]]]


def _through_dcp(rank: int, world_size: int, case: str, folder: str) -> None:
    warnings.simplefilter("ignore")  # of saving between rounds, to compare
    for source, target in (("toy", "cpu"), ("cpu", "toy")):
        model, optimizer = train(SingleRank(), source, case, steps=4)
        twin, again = train(SingleRank(), target, case, steps=0)
        with optimizer.shared() if case != "DeMo" else torch.no_grad():
            dcp.save({"optimizer": OptimizerState(optimizer)}, checkpoint_id=f"{folder}/{source}")
            twin.load_state_dict(model.state_dict())
        dcp.load({"optimizer": OptimizerState(again)}, checkpoint_id=f"{folder}/{source}", planner=LoadPlanner())
        go_on_alike(0, case, (model, optimizer), (twin, again))


@pytest.mark.parametrize("case", ["DeMo", "LocalDeMo"])
def test_dcp_moves_a_state_between_accelerator_and_cpu(on_toy, case, tmp_path):
    on_toy(_through_dcp, 1, case, str(tmp_path))


def _folder(rank: int, world_size: int, case: str) -> None:
    store, digests = ObjectStore(), {}
    for device in ("toy", "cpu"):
        model, optimizer = train(demopt.FolderExchange(store, patience=0.0), device, case, steps=0)
        optimizer.join()
        if device == "toy":
            for step in range(4):
                fill(model, 0, step)
                optimizer.step()
            optimizer.replicator.session.exchange.wait_for_uploads()
        digests[device] = weights_digest(optimizer.replicator)
    assert digests["toy"] == digests["cpu"]


@pytest.mark.parametrize("case", ["LocalDeMo", "LocalDeMo, host"])
def test_a_cpu_joins_the_run_in_a_folder_of_an_accelerator_with_its_bits(on_toy, case):
    on_toy(_folder, 1, case)


TABLES = 9 << 19  # bytes of the codec's own tables, for any model
#: What is known to be held, in parameters: they, gradients, momentum or error, global weights, the owner's errors. Then
#: the most beyond it, at rest and in a step, in parameters: places of lines; two tensors of a block, one of its
#: directions, and small ones. An owner has in their place the sums of its share, and their magnitudes.
MOST: dict[str, tuple[int, float, float]] = {
    "DeMo": (3, 0.05, 3.5), "DeMo, muon": (3, 0.05, 3.5), "LocalDeMo": (4, 0.05, 3.5), "LocalDeMo, owner": (5, 0.05, 4),
    **{f"LocalDeMo, host{more}": (2, 0.0, 0.0) for more in ("", ", owner", ", top-k", ", delay")},
}  # fmt: skip


def _memory(rank: int, world_size: int, kind: str) -> tuple[float, float]:
    """The bytes beyond what is known, at rest and at most in a step, per byte of parameters."""
    before, _ = toy.memory()  # of other tests in this process
    params = [nn.Parameter(torch.zeros(1024, 1024, device="toy")) for _ in range(4)]
    on_host = "host" in kind
    if kind.startswith("DeMo"):
        rule = "muon" if "muon" in kind else "signum"
        optimizer = demopt.DeMo(params, update=rule, process_group=SingleRank())
    else:
        inner = torch.optim.SGD(params, lr=0.1, foreach=True)
        optimizer = demopt.LocalDeMo(inner, sync_every=1, process_group=SingleRank(), **CASES[kind])
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    weights = 4 * (1 << 20) * 4
    known = before + weights * MOST[kind][0] + (0 if on_host else TABLES)
    with mock.patch("demopt.codec.steps._BATCH_ELEMENTS", 1 << 20):  # a matrix
        for _ in range(3):
            toy.memory()
            optimizer.step()
    if on_host:
        optimizer.flush()
        with optimizer.shared():
            optimizer.fingerprint()
    held, peak = toy.memory()
    return (held - known) / weights, (peak - known) / weights


@pytest.mark.parametrize("kind", MOST)
def test_extra_memory_stays_in_bounds(on_toy, kind):
    ((at_rest, at_most),) = on_toy(_memory, 1, kind)
    assert at_rest <= MOST[kind][1]
    assert at_most <= MOST[kind][2]


WAITS = {"DeMo": 2, "DeMo muon": 2, "LocalDeMo": 2, "LocalDeMo owner": 3}


def _waits(rank: int, world_size: int, name: str) -> list[int]:
    """Of the third step of each of two ranks in threads, without the exchange itself."""

    def uncounted(threads: Threads, combine: Callable[[Threads], None] = Threads._combine) -> None:
        with toy.counting(False):
            combine(threads)

    def work(exchange: Exchange) -> int:
        params = [nn.Parameter(p.detach().to("toy")) for p in problems.parameters([(96, 64), (64, 64), (64, 200)])]
        kind, _, more = name.partition(" ")
        if kind == "DeMo":
            optimizer = demopt.DeMo(params, update=more or "signum", process_group=exchange)
        else:
            inner = problems.SGD(params)
            optimizer = demopt.LocalDeMo(inner, sync_every=1, route=more or "gather", process_group=exchange)
        for step in range(3):
            for number, parameter in enumerate(params):
                parameter.grad = problems.draw(parameter.shape, step, exchange.rank, number).to("toy")
            with toy.counting() as found:
                optimizer.step()
        assert found["launches"] > 10  # or nothing was seen
        return found.get("syncs", 0)

    with mock.patch.object(Threads, "_combine", uncounted):
        return Threads(2, timeout=300.0).run(work)


@pytest.mark.parametrize("name", WAITS)
def test_a_step_waits_for_the_device_where_its_message_leaves_and_messages_arrive(on_toy, name):
    """On route owner they arrive twice, and before it answers an owner must know on the host that all parts are whole.

    It must also know which of them are flagged, and their weights: that is the third.
    """
    assert max(on_toy(_waits, 1, name)[0]) <= WAITS[name]


# With its state on the host, LocalDeMo runs only copies on an accelerator

SHAPES = [(64, 48), (33, 20), (70,), ()]


def _launches(rank: int, world_size: int, case: str, dtype: torch.dtype) -> tuple[list[dict[str, int]], set[str]]:
    """What four steps, looks at the weights, and saving run on the device, with LocalDeMo and without."""

    def work(exchange: Exchange) -> list[dict[str, int]]:
        counts = []
        for wrapped in (True, False):
            with DRAWING:
                parameters = [nn.Parameter(problems.draw(shape, 1).to("toy", dtype)) for shape in SHAPES]
            parameters.append(nn.Parameter(torch.ones(7, device="toy"), requires_grad=False))
            inner = torch.optim.AdamW(parameters, lr=0.01, foreach=True)
            optimizer = inner
            if wrapped:
                between = gpu.ThroughHost(exchange) if "delay" in case else exchange
                more = {"chunk": 16, "process_group": between, **CASES[case]}
                with toy.counting() as found:
                    optimizer = demopt.LocalDeMo(inner, sync_every=2, fingerprint_every=1, **more)
                counts.append(found)
            for step in range(4):
                for parameter, shape in zip(parameters, SHAPES, strict=False):
                    parameter.grad = problems.draw(shape, step, exchange.rank).to("toy", dtype)
                with toy.counting() as found:
                    optimizer.step()
                counts.append(found)
            if wrapped:
                with toy.counting() as found:
                    optimizer.flush()
                    with optimizer.shared():
                        optimizer.fingerprint()
                    optimizer.state_dict()
                counts.append(found)
        return counts

    toy.races()
    return ranks.threads(work, 2)[0], toy.races()


def _kernels(counts: dict[str, int]) -> dict[str, int]:
    """What ran but copies, and waits for them."""
    copies = {"to host", "to device", "syncs"}
    return {key: n for key, n in counts.items() if key not in copies and not key.startswith("sync ")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [case for case in MOST if "host" in case])
def test_nothing_but_copies_runs_on_the_device(on_toy, case, dtype):
    ((counts, races),) = on_toy(_launches, 1, case, dtype)
    built, *steps, looks = counts[:6]
    alone = counts[6:]
    for mine, theirs in zip([built, *steps, looks], [{}, *alone, {}], strict=True):
        assert _kernels(mine) == _kernels(theirs)
    assert steps[1]["to host"] > 0
    assert steps[1]["to device"] > 0
    assert alone[1]["launches"] > 0
    assert races == set()
