"""On an accelerator whose memory the host may not touch, the whole library runs, with the CPU's bits."""

import copy
import functools
import re
import threading
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import toy
import toyccl
from safetensors.torch import load_file
from torch import nn

import demopt
import problems
import ranks
from demopt.checkpoint import LoadPlanner, OptimizerState
from demopt.core.constants import has_float64
from demopt.errors import MessageError
from demopt.exchange import SingleRank, Threads, process_group
from demopt.integrations.torchft import QuorumExchange
from demopt.optim import muon, staging
from demopt.runs.checkpoints import weights_digest
from demopt.runs.store import ObjectStore
from demopt.train.config import TrainConfig, resolve
from demopt.train.model import begin, save
from demopt.wire.message import HEADER_BYTES, pack_message
from laboratory import bench, gpu
from models import save_tiny

STEPS = 6
adamw = functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True)
DRAWING = threading.Lock()
SAME_PARAMETERS = "torch.__future__.get_swap_module_params_on_conversion"  # a moved model keeps its own, as on CUDA


class Small(nn.Module):
    """Equal layers, matrices padded to chunks, a convolution in another layout; one parameter frozen, one unused."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32)) for _ in range(3))
        self.convolution = nn.Conv2d(16, 16, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 47)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(7))

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        hidden = hidden + self.convolution(hidden.view(2, 16, 4, 4)).reshape(16, 32)
        return self.head(self.norm(hidden)) * self.scale


def fill(model, rank, step, scale=1.0):
    """Sets the gradients of a twin of the model on the CPU, so that only the optimizer can differ."""
    draw = torch.Generator().manual_seed(1000 * rank + step)
    twin = copy.deepcopy(model).cpu().float()
    twin.zero_grad()
    output = twin(torch.randint(50, (16,), generator=draw))
    ((output - torch.randn(16, 47, generator=draw)).square().mean() * scale).backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        mine.grad = None if theirs.grad is None else theirs.grad.to(mine.device, mine.dtype)


#: Settings by name; the name also says the optimizer, the dtype, and whether Muon updates the matrices.
CASES = {
    "DeMo": {},
    "DeMo, identity": {"transform": "identity"},
    "DeMo, muon": {},
    "DeMo, 2-bit, mean, weight decay": {"values": "2-bit", "reduction": "mean", "weight_decay": 0.1, "maximize": True},
    "DeMo, floats": {"values": "float32", "update": "lion"},
    "DeMo, clip to median, positions of a byte": {"clip_to_median": True, "top_k": 1},
    "DeMo, bfloat16": {"weight_decay": 0.1},
    "DeMo, muon, bfloat16": {},
    "DeMo, float64": {},
    "LocalDeMo": {"route": "gather"},
    "LocalDeMo, owner": {"route": "owner"},
    "LocalDeMo, samples": {"route": "gather", "samples": 3},
    "LocalDeMo, top-k": {"top_k": 24, "outer_momentum": 0.5},
    "LocalDeMo, delay": {"delay": 1},
    "LocalDeMo, owner, delay": {"delay": 1, "route": "owner"},
    "LocalDeMo, outer momentum": {"outer_momentum": 0.5},
    "LocalDeMo, bfloat16": {},
    "LocalDeMo, muon": {},
}
CASES |= {
    case.replace("LocalDeMo", "LocalDeMo, host"): {**settings, "state_device": "cpu"}
    for case, settings in CASES.items()
    if case.startswith("LocalDeMo")
}
CASES["LocalDeMo, host, kernels"] = {"state_device": "cpu", "kernels": "auto"}


def optimizer_of(case, model, exchange, **more):
    usual = {"chunk": 16, "kernels": "torch", "fingerprint_every": 1, "process_group": exchange}
    settings = {**usual, **CASES[case], **more}
    matrices = [p for p in model.layers.parameters() if p.dim() == 2] if "muon" in case else []
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    if case.startswith("LocalDeMo"):
        inner = [adamw(others)]
        inner += [torch.optim.Muon(matrices, lr=1e-2)] if matrices else []
        return demopt.LocalDeMo(inner, sync_every=2, **settings)
    groups = [{"params": matrices, "update": "muon"}, {"params": others, "update": "adamw"}] if matrices else others
    base = {"top_k": 24, "momentum_decay": 0.9, "lr": 0.01}
    return demopt.DeMo(groups, **{**base, **settings})


def small(device, dtype):
    with DRAWING:  # threads share a generator
        torch.manual_seed(0)
        return Small().to(device, dtype)


def train(exchange, device, case, steps=STEPS, **more):
    model = small(device, getattr(torch, re.search("bfloat16|float64|$", case)[0] or "float32"))
    assert not model.convolution.weight.is_contiguous()
    optimizer = optimizer_of(case, model, exchange, **more)
    steps_on(model, optimizer, exchange.rank, range(steps))
    return model, optimizer


def shown(optimizer):
    return optimizer.shared() if isinstance(optimizer, demopt.LocalDeMo) else nullcontext()


def tensors(model, optimizer):
    """Parameters and all state, on the CPU."""
    if isinstance(optimizer, demopt.LocalDeMo):
        optimizer.flush()
    with shown(optimizer):
        found = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    for _, entry in sorted(optimizer.state_dict()["state"].items()):
        found += [value.cpu() for _, value in sorted(entry.items()) if isinstance(value, torch.Tensor)]
    return found


@pytest.mark.parametrize("case", CASES)
@toy.each(1)
def test_training_has_the_bits_of_the_cpu_and_no_races(case):
    expected = ranks.threads(lambda exchange: tensors(*train(exchange, "cpu", case)), 2)
    toy.races()
    # `Threads` does not order streams, which a background thread needs: messages then go through the host
    between = gpu.ThroughHost if "delay" in case else lambda exchange: exchange
    with mock.patch.object(staging, "PIECE_BYTES", 256):  # tensors pass in several pieces
        found = ranks.threads(lambda exchange: tensors(*train(between(exchange), "toy", case)), 2)
    assert all(map(problems.same, found, expected))
    assert toy.races() == set()


@pytest.mark.parametrize("case", [case for case in CASES if "float64" not in case and "host" not in case])
@toy.each(1)
def test_device_without_float64_trains_with_the_bits_of_the_cpu(case):
    count = 3 if "clip" in case else 2  # of two ranks none is left out
    expected = ranks.threads(lambda exchange: tensors(*train(exchange, "cpu", case)), count)
    between = gpu.ThroughHost if "delay" in case else lambda exchange: exchange
    has_float64.cache_clear()
    with mock.patch.object(toy, "LACKING", {torch.float64}):
        found = ranks.threads(lambda exchange: tensors(*train(between(exchange), "toy", case)), count)
    has_float64.cache_clear()
    assert all(map(problems.same, found, expected))


@toy.each(1)
def test_model_that_is_moved_to_the_cpu_inside_shared_or_before_it_is_no_change_of_weights():
    model = nn.Linear(8, 2).to("toy")
    optimizer = demopt.LocalDeMo(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with mock.patch(SAME_PARAMETERS, return_value=True):
        for _ in range(2):
            with optimizer.shared():
                model.cpu()


@toy.each(1)
def test_copies_to_and_from_another_device_than_the_current_one_leave_it_the_current_one():
    copies, there, back = staging.Staging(), torch.zeros(3, device="toy:0"), torch.zeros(3)
    torch.accelerator.set_device_index(1)
    try:
        copies.copy([(torch.ones(3), there)])
        copies.copy([(there, back)])
        assert torch.accelerator.current_device_index() == 1
    finally:
        torch.accelerator.set_device_index(0)
    assert back.sum() == 3


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *((case, "gloo") for case in ("DeMo", "LocalDeMo", "LocalDeMo, delay", "LocalDeMo, owner, delay")),
        *((case, "toyccl") for case in ("DeMo", "LocalDeMo, delay", "LocalDeMo, owner, delay")),
    ],
)
@toy.each(2)
def test_two_processes_exchange_through_the_host_with_gloo_or_between_devices(case, backend):
    """The backend that behaves as nccl's carries only device tensors, and refuses others."""
    group = None
    if backend != "gloo":
        toyccl.register()
        toyccl.CALLS.clear()
        group = dist.new_group(backend=backend)
    expected = tensors(*train(demopt.exchange.Collective(), "cpu", case))
    torch.accelerator.set_stream(torch.Stream("toy"))  # the user's own: nothing orders the default stream after it
    toy.races()
    exchange = demopt.exchange.Collective(group)
    model, optimizer = train(exchange, "toy", case)
    assert problems.same(tensors(model, optimizer), expected)
    problems.warned(optimizer.consolidate_state_dict)  # it warns of the bytes that it takes
    optimizer.regroup(exchange)
    steps_on(model, optimizer, exchange.rank, [STEPS])
    optimizer.resync(1)
    assert backend == "gloo" or toyccl.CALLS.count("all_to_all" if "owner" in case else "all_gather") > 2
    mark = optimizer.fingerprint()
    torch.accelerator.set_stream(torch.Stream(stream_id=0, device_index=0, device_type=20))
    assert toy.races() == set()
    return mark


@toy.each(2)
def test_group_for_the_background_is_made_on_the_device_of_the_messages_not_the_current_one():
    """Without set_device the first device is the current one on all ranks, but nccl takes only one rank per device."""
    toyccl.register()
    with mock.patch.object(process_group, "gather_values", wraps=process_group.gather_values) as told:
        train(demopt.exchange.Collective(dist.new_group(backend="toyccl")), "toy", "LocalDeMo, delay")
    assert [call.args[2] for call in told.call_args_list] == [torch.device("toy", 0)]


def steps_on(model, optimizer, rank, steps):
    for step in steps:
        fill(model, rank, step)
        optimizer.step()


def go_on_alike(rank, *pairs):
    """Two more steps of two models with their optimizers, which must stay equal."""
    for pair in pairs:
        steps_on(*pair, rank, (4, 5))
    assert problems.same(*(tensors(*pair) for pair in pairs))


@pytest.mark.parametrize("case", ["DeMo", "LocalDeMo", "LocalDeMo, owner", "LocalDeMo, delay"])
@toy.each(1)
def test_states_move_between_accelerator_and_cpu_and_to_other_numbers_of_ranks(case):
    warnings.simplefilter("ignore")  # of saving between rounds, and of loading another number of ranks' states
    ways = [("toy", "cpu", None), ("toy", "cpu", "cpu"), ("cpu", "toy", "toy"), ("toy", "toy", None)]
    groups = [demopt.exchange.Threads(2, 60.0).exchanges for _ in range(9)]  # one per optimizer, for its background

    def work(exchange):
        mine = iter([gpu.ThroughHost(group[exchange.rank]) for group in groups])
        for source, target, where in ways:
            model, optimizer = train(next(mine), source, case, steps=4)
            twin = copy.deepcopy(model).to(target)
            again = optimizer_of(case, twin, next(mine))
            if case != "DeMo":
                optimizer.flush()
            again.load_state_dict(problems.by_file(optimizer.state_dict(), where))
            go_on_alike(exchange.rank, (model, optimizer), (twin, again))
        if "owner" in case:  # the owner's error, loaded onto the host, enters a momentum on the device
            other = optimizer_of("LocalDeMo", copy.deepcopy(model), next(mine))
            other.load_state_dict(problems.by_file(optimizer.state_dict(), "cpu"))
        optimizer.consolidate_state_dict()
        if exchange.rank == 0:
            single, alone = train(SingleRank(), "toy", case, steps=0)
            alone.load_state_dict(optimizer.state_dict())
            steps_on(single, alone, 0, [0])

    ranks.threads(work, 2)


@pytest.mark.parametrize("case", ["DeMo", "LocalDeMo"])
@toy.each(1)
def test_a_gradient_scaler_works_as_on_a_cpu(case):
    def work(exchange, device):
        model, optimizer = train(exchange, device, case, steps=0)
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

    assert all(map(problems.same, *(ranks.threads(work, 2, device) for device in ("cpu", "toy"))))


def _muon_steps(kind, device):
    matrices = [nn.Parameter(problems.draw(shape, 7).to(device)) for shape in 2 * [(24, 40), (24, 40), (40, 24)]]
    optimizer = kind(matrices, lr=0.1, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for number, matrix in enumerate(matrices):
            matrix.grad = problems.draw(matrix.shape, step, number).to(device) if step or number else None
        with toy.counting() as found:
            optimizer.step()
    return [matrix.detach().cpu() for matrix in matrices], found.get("launches", 0)


@toy.each(1)
def test_muon_of_equal_matrices_in_batches_is_that_of_single_ones_in_fewer_launches():
    with mock.patch.multiple(muon, _DEVICE_DTYPE=torch.float32, _BATCH_ELEMENTS=3 * 24 * 40):  # batches of 3, 1 and 2
        found, launches = _muon_steps(muon.BatchedMuon, "toy")
    torch.testing.assert_close(found, _muon_steps(muon.BatchedMuon, "cpu")[0])
    assert 30 < launches < _muon_steps(torch.optim.Muon, "toy")[1]


@pytest.mark.parametrize(
    "case", ["DeMo", *(f"LocalDeMo{kind}" for kind in ("", ", owner", ", delay", ", host, delay"))]
)
@toy.each(1)
def test_model_that_moves_after_the_optimizer_was_built_trains_on_with_the_bits_of_one_that_stays(case):
    def work(exchange, moves):
        model = small("cpu", torch.float32)
        settings = {"chunk": 16, "kernels": "torch", "process_group": gpu.ThroughHost(exchange), **CASES[case]}
        if case == "DeMo":
            optimizer = demopt.DeMo(model.parameters(), lr=0.01, **settings)
        else:
            optimizer = demopt.LocalDeMo(adamw(model.parameters()), sync_every=2, **settings)
        for step in range(8):
            if device := moves[exchange.rank].get(step):
                with DRAWING, mock.patch(SAME_PARAMETERS, return_value=True):
                    model.to(device)
            if "delay" in case and step == 3:
                optimizer.flush()  # a move ends the round in flight: here it ends at the same step in each case
            steps_on(model, optimizer, exchange.rank, range(step, step + 1))
        return tensors(model, optimizer)

    expected = ranks.threads(work, 2, [{}, {}])
    for moves in ([{0: "toy"}] * 2, [{3: "toy"}] * 2, [{0: "toy", 3: "cpu"}, {}], [{3: "toy"}, {0: "toy", 3: "cpu"}]):
        assert all(map(problems.same, ranks.threads(work, 2, moves), expected))


@pytest.mark.parametrize("case", ["DeMo", *(f"LocalDeMo{kind}" for kind in ("", ", owner", ", top-k", ", delay"))])
@toy.each(1)
def test_model_on_the_host_and_on_an_accelerator_trains_with_the_bits_of_the_cpu(case):
    def work(exchange, on_toy):
        model = small("cpu", torch.float32)
        with DRAWING, mock.patch(SAME_PARAMETERS, return_value=True):
            for part in on_toy:
                getattr(model, part).to("toy")
        optimizer = optimizer_of(case, model, gpu.ThroughHost(exchange))
        steps_on(model, optimizer, exchange.rank, range(STEPS))
        return tensors(model, optimizer)[: len(list(model.parameters()))]  # errors depend on which chunks are together

    expected, *found = (ranks.threads(work, 2, parts) for parts in ([], ["head"], ["embedding", "norm"]))
    for each in found:
        assert all(map(problems.same, each, expected))


def test_local_demo_whose_model_has_lost_its_memory_is_refused_and_loading_changes_nothing():
    local_weight = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([local_weight], lr=1.0, momentum=0.9)
    optimizer = demopt.LocalDeMo(inner)
    state, groups = optimizer.state_dict(), inner.param_groups
    optimizer._weights.global_of[local_weight] = nn.Parameter(torch.ones(2, device="meta"))
    for call in (optimizer._weights.create, lambda: optimizer.load_state_dict(state)):
        with pytest.raises(RuntimeError, match="build LocalDeMo after"):
            call()
    assert inner.param_groups is groups


@pytest.mark.parametrize("case", ["DeMo", "DeMo, floats", "LocalDeMo", "LocalDeMo, top-k"])
@toy.each(1)
def test_invalid_values_on_an_accelerator_are_refused_with_the_rank(case):
    model, optimizer = train(SingleRank(), "toy", case)
    fill(model, 0, STEPS)
    message = optimizer.extract()
    body = torch.full_like(message[HEADER_BYTES:], 0xFF)
    hostile = pack_message(optimizer.replicator.round.header, body, device=message.device)
    with problems.unchanged(optimizer), pytest.raises(MessageError, match="message of rank 0"):
        optimizer.apply(optimizer.exchange(hostile))


@toy.each(2)
def test_buffers_on_one_device_of_a_rank_and_on_two_of_another_are_broadcast(rank):
    model = nn.Sequential(nn.BatchNorm1d(3).to("toy"), nn.BatchNorm1d(3).to("cpu" if rank else "toy"))
    for each in model:
        each.running_mean.fill_(float(rank + 1))
    demopt.broadcast_buffers(model, src=1)
    assert [each.running_mean.cpu().tolist() for each in model] == [[2.0] * 3] * 2


@toy.each(2)
def test_buffers_on_the_host_and_none_at_all_are_broadcast_by_a_group_that_moves_device_tensors_alone(rank):
    toyccl.register()
    group = dist.new_group(backend="toyccl")
    linear, norm = nn.Linear(2, 2).to("toy"), nn.BatchNorm1d(3)
    norm.running_mean.fill_(float(rank + 1))
    demopt.broadcast_buffers(nn.Sequential(norm, linear), src=1, process_group=group)
    assert norm.running_mean.tolist() == [2.0] * 3
    demopt.broadcast_buffers(linear, process_group=group)


@toy.each(2)
def test_torchft_exchange_takes_tensors_of_a_device_through_the_host(rank):
    exchange = QuorumExchange(SimpleNamespace(parent=dist.group.WORLD, abort=lambda: None))
    data = torch.full((3,), rank, dtype=torch.uint8, device="toy")
    assert exchange.all_gather(data).cpu().tolist() == [[0] * 3, [1] * 3]
    exchange.broadcast(data, 1)
    assert data.cpu().tolist() == [1] * 3


@pytest.mark.parametrize("lora", [None, 2])
@toy.each(1)
def test_model_is_saved_without_a_second_one_on_the_device(lora, tmp_path):
    folder = save_tiny(tmp_path / "base", torch.bfloat16)
    config, model = begin(resolve(TrainConfig(model=str(folder), lora=lora, device="cpu")))
    model.to("toy")
    before, _ = toy.memory()
    save(config, model, tmp_path / "out", merge=True)
    assert toy.memory() == (before, before)
    assert {each.device.type for each in (*model.parameters(), *model.buffers())} == {"toy"}
    one, other = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "out"))
    assert one.keys() == other.keys()
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())


@pytest.mark.parametrize("case", ["DeMo", "LocalDeMo"])
@toy.each(1)
def test_dcp_moves_a_state_between_accelerator_and_cpu(case, tmp_path):
    warnings.simplefilter("ignore")  # of saving between rounds, to compare
    for source, target in (("toy", "cpu"), ("cpu", "toy")):
        model, optimizer = train(SingleRank(), source, case, steps=4)
        twin, again = train(SingleRank(), target, case, steps=0)
        with shown(optimizer):
            dcp.save({"optimizer": OptimizerState(optimizer)}, checkpoint_id=tmp_path / source)
            twin.load_state_dict(model.state_dict())
        dcp.load({"optimizer": OptimizerState(again)}, checkpoint_id=tmp_path / source, planner=LoadPlanner())
        go_on_alike(0, (model, optimizer), (twin, again))


@pytest.mark.parametrize("case", ["LocalDeMo", "LocalDeMo, host"])
@toy.each(1)
def test_a_cpu_joins_the_run_in_a_folder_of_an_accelerator_with_its_bits(case):
    store, digests = ObjectStore(), {}
    for device in ("toy", "cpu"):
        model, optimizer = train(demopt.FolderExchange(store, patience=0.0), device, case, steps=0)
        optimizer.join()
        if device == "toy":
            steps_on(model, optimizer, 0, range(4))
            optimizer.replicator.session.exchange.wait_for_uploads()
        digests[device] = weights_digest(optimizer.replicator)
    assert digests["toy"] == digests["cpu"]


TABLES = 9 << 19  # bytes of the codec's own tables, for any model
#: In units of all parameters: the known holdings (parameters, gradients, momentum or error, global weights, the owner's
#: errors); then the most beyond them, at rest (places of lines) and in a step (two tensors of a block, one of its
#: directions, and small ones; for an owner, instead, the sums of its share, and their magnitudes).
MOST = {
    "DeMo": (3, 0.05, 3.5), "DeMo, muon": (3, 0.05, 3.5), "LocalDeMo": (4, 0.05, 3.5), "LocalDeMo, owner": (5, 0.05, 4),
    **{f"LocalDeMo, host{more}": (2, 0.0, 0.0) for more in ("", ", owner", ", top-k", ", delay")},
}  # fmt: skip


@pytest.mark.parametrize("kind", MOST)
@toy.each(1)
def test_extra_memory_stays_in_bounds(kind):
    before, _ = toy.memory()  # of other tests in this process
    params = [nn.Parameter(torch.zeros(1024, 1024, device="toy")) for _ in range(4)]
    on_host, (held, at_rest, in_a_step) = "host" in kind, MOST[kind]
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    if kind.startswith("DeMo"):
        rule = "muon" if "muon" in kind else "signum"
        optimizer = demopt.DeMo(params, update=rule, process_group=SingleRank())
    else:
        inner = torch.optim.SGD(params, lr=0.1, foreach=True)
        optimizer = demopt.LocalDeMo(inner, sync_every=1, process_group=SingleRank(), **CASES[kind])
    weights = 4 * (1 << 20) * 4
    known = before + weights * held + (0 if on_host else TABLES)
    with mock.patch("demopt.codec.steps._BATCH_ELEMENTS", 1 << 20):  # a matrix
        for _ in range(3):
            toy.memory()
            optimizer.step()
    if on_host:
        optimizer.flush()
        with optimizer.shared():
            optimizer.fingerprint()
    now, peak = toy.memory()
    assert (now - known) / weights <= at_rest
    assert (peak - known) / weights <= in_a_step


def uncounted(threads, combine=Threads._combine):
    with toy.counting(False):
        combine(threads)


WAITS = {"DeMo": 2, "DeMo, muon": 2, "LocalDeMo": 2, "LocalDeMo, owner": 3}


@pytest.mark.parametrize("case", WAITS)
@toy.each(1)
def test_a_step_waits_for_the_device_where_its_message_leaves_and_messages_arrive(case):
    """An owner waits once more: before it answers, its host must know that all parts are whole, and their weights."""

    def work(exchange):
        model, optimizer = train(exchange, "toy", case, steps=3, fingerprint_every=0)
        fill(model, exchange.rank, 3)
        with toy.counting() as found:
            optimizer.step()
        assert found["launches"] > 10  # otherwise nothing was counted
        return found.get("syncs", 0)

    with mock.patch.object(Threads, "_combine", uncounted):
        assert max(Threads(2, timeout=300.0).run(work)) <= WAITS[case]


LAUNCHES = {"DeMo": 156, "DeMo, muon": 715, "LocalDeMo": 183, "Muon": 1127}  # as docs/design-notes.md has them


@pytest.mark.nightly
@pytest.mark.parametrize("case", LAUNCHES)
@toy.each(1)
def test_third_step_of_124_million_parameters_takes_as_many_launches_as_documented(case):
    def made(model, exchange):
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        if case == "Muon":
            return torch.optim.Muon([each for each in model.rest if each.dim() == 2])
        if case == "LocalDeMo":
            return demopt.LocalDeMo(inner, sync_every=1, process_group=exchange)
        groups = demopt.muon_groups(model, lr=0.01) if "muon" in case else model.named_parameters()
        return demopt.DeMo(groups, process_group=exchange)

    def work(exchange):
        model = bench.Parameters(bench.shapes_of("gpt2"), torch.device("toy"))
        for parameter in model.parameters():
            parameter.data.fill_(0.01)
        optimizer = made(model, exchange)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            with toy.counting() as found:
                optimizer.step()
        return found["launches"]

    with mock.patch.object(Threads, "_combine", uncounted):
        counted = Threads(2, timeout=300.0).run(work)
    assert counted == [LAUNCHES[case] + (32 if case == "LocalDeMo" else 0)] * 2, counted


def _kernels(counts):
    """The counts of everything but copies, and waits for them."""
    copies = {"to host", "to device", "syncs"}
    return {key: n for key, n in counts.items() if key not in copies and not key.startswith("sync ")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [case for case in MOST if "host" in case])
@toy.each(1)
def test_with_its_state_on_the_host_local_demo_runs_nothing_but_copies_on_the_device(case, dtype):
    """In four steps, a look at the weights, and saving, compared with steps of only the inner optimizer."""

    def counts_of_steps(model, optimizer, rank):
        counts = []
        for step in range(4):
            fill(model, rank, step)
            with toy.counting() as found:
                optimizer.step()
            counts.append(found)
        return counts

    def work(exchange):
        model, other = small("toy", dtype), small("toy", dtype)
        between = gpu.ThroughHost(exchange) if "delay" in case else exchange
        with toy.counting() as built:
            optimizer = optimizer_of(case, model, between, kernels="auto")
        steps = counts_of_steps(model, optimizer, exchange.rank)
        with toy.counting() as looks:
            optimizer.flush()
            with optimizer.shared():
                optimizer.fingerprint()
            optimizer.state_dict()
        alone = counts_of_steps(other, adamw(other.parameters()), exchange.rank)
        assert [*map(_kernels, (built, *steps, looks))] == [*map(_kernels, ({}, *alone, {}))]
        assert min(steps[1]["to host"], steps[1]["to device"], alone[1]["launches"]) > 0

    toy.races()
    ranks.threads(work, 2)
    assert toy.races() == set()
