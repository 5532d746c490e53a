"""Ranks of a node: the recipes of docs/parallelism.md, on 2 x 2 gloo ranks; copies that drift; sharded matrices."""

import copy
import re
import warnings
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Parameter

import demopt
import forked
import problems
import ranks
from demopt import DeMo, DriftError, LocalDeMo
from demopt.codec.hyperparameters import Codec
from demopt.exchange.dtensor import shard_of
from demopt.optim.local_weights import LocalWeights
from demopt.optim.muon import BatchedMuon

STEPS = 12
EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2.py"


def make():
    """A model whose first layer has shards of 17 and 16 rows."""
    torch.manual_seed(0)
    up, middle, head = nn.Linear(16, 33), nn.Linear(33, 32), nn.Linear(32, 4)
    return nn.Sequential(OrderedDict(up=up, tanh=nn.Tanh(), middle=middle, tanh_=nn.Tanh(), head=head))


def cut(model, recipe):
    """Cuts the model over the ranks of a replica; returns the mesh."""
    if recipe in ("FSDP2", "HSDP"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for module in (model.up, model.middle, model.head, model):
            fully_shard(module, mesh=mesh if recipe == "HSDP" else mesh["shard"])
        demopt.unsync(model)
        return mesh
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    plan = {"middle": ColwiseParallel(), "head": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)  # `up` stays whole on each rank
    if recipe == "FSDP2 and tensor parallel":
        for module in (model.up, model.middle, model.head, model):
            fully_shard(module, mesh=mesh["shard"])
    return mesh


def _sequence(group):
    """The number of collectives that a group has begun so far."""
    return int(group._get_backend(torch.device("cpu"))._get_sequence_number_for_group())


@pytest.mark.parametrize("recipe", ["FSDP2", "HSDP"])
@pytest.mark.parametrize("kind", ["LocalDeMo", "LocalDeMo, delay"])
@ranks.each(4)
def test_shards_have_the_same_bits_with_the_state_on_the_host(rank, kind, recipe):
    """With parameters treated as an accelerator's."""
    with mock.patch.object(LocalWeights, "_is_here", return_value=False):
        on_host = _run(rank, f"{kind}, host", recipe)
    assert on_host == _run(rank, kind, recipe)


def _run(rank, kind, recipe):
    """The losses before and after, on the same data for all; the whole parameters' bits; steps' collectives and bytes.

    Collectives are those between replicas.
    """
    model = make()
    mesh = cut(model, recipe)
    if kind == "DeMo":
        optimizer = demopt.DeMo(model.parameters(), lr=0.01, process_group=mesh["replicate"])
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        settings = {"state_device": "cpu" if "host" in kind else None, "delay": int("delay" in kind)}
        optimizer = demopt.LocalDeMo(inner, sync_every=2, **settings, process_group=mesh["replicate"])
    teacher = problems.draw((16, 4), 77) / 4

    def loss_on(*seeds):
        inputs = problems.draw((64, 16), *seeds)
        return (model(inputs) - (inputs @ teacher).tanh()).square().mean()

    # ranks that hold parts of the same tensor-parallel layer see the same data
    reader = rank if recipe in ("FSDP2", "HSDP") else mesh.get_local_rank("replicate")
    between = [dist.group.WORLD, mesh["replicate"].get_group()]
    between_replicas, sent = [], []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        losses = [float(loss_on(1000).detach())]
        for step in range(STEPS):
            before = sum(map(_sequence, between))
            optimizer.zero_grad()
            loss_on(reader, step).backward()
            optimizer.step()
            between_replicas.append(sum(map(_sequence, between)) - before)
            sent.append(optimizer.stats.sent_bytes)
        if "delay" in kind:
            optimizer.flush()
        losses.append(float(loss_on(1000).detach()))
    return losses, problems.bits(model.parameters()), between_replicas, sent


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
@pytest.mark.parametrize("recipe", ["FSDP2", "HSDP", "tensor parallel", "FSDP2 and tensor parallel"])
@ranks.each(4)
def test_recipe_trains_and_replicas_exchange_messages_alone(rank, kind, recipe):
    (before, after), parameters, between_replicas, sent = _run(rank, kind, recipe)
    assert after < 0.75 * before
    rounds = [1] * STEPS if kind == "DeMo" else [0, 3, *[0, 1] * (STEPS // 2 - 1)]  # 3: gradients are compared
    assert between_replicas[1:] == rounds[1:]  # the first step also compares settings
    assert [each > 0 for each in sent] == [bool(number) for number in rounds]
    assert max(sent) < 0.3 * 4 * sum(parameter.numel() for parameter in make().parameters())
    return parameters


@pytest.mark.parametrize("how", ["shared", "finish_round", "load_state_dict", "resync", "DeMo's resync"])
@ranks.each(4)
def test_forward_passes_of_shards_see_weights_that_came_after_another_one(rank, how):
    """After a pass without backward, FSDP2 keeps the parameters of the outermost module whole."""
    model = make()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    kind = "DeMo" if "DeMo" in how else "LocalDeMo"
    optimizer = problems.optimizer_of(kind, model.parameters(), process_group=mesh["replicate"])
    weights, inputs = [*model.parameters()], problems.draw((8, 16), 99)  # taken now: later some are whole

    def check():
        """Compares the model's pass with that of a model that was never sharded."""
        plain = make()
        for whole, weight in zip(plain.parameters(), weights, strict=True):
            whole.data = weight.detach().full_tensor()
        shown = plain(inputs)
        with torch.no_grad():
            assert torch.equal(model(inputs), shown)

    def step():
        optimizer.zero_grad()
        model(problems.draw((8, 16), rank, 1)).square().mean().backward()
        optimizer.step()

    step()
    step()
    saved = copy.deepcopy(optimizer.state_dict())  # right after a round
    step()
    with torch.no_grad():
        if kind == "DeMo" and mesh.get_local_rank("replicate") == 1:
            for weight in weights:
                weight.to_local().zero_()
        model(inputs)
    if how == "load_state_dict":
        optimizer.load_state_dict(saved)
    elif how == "shared":
        with optimizer.shared():
            check()
    else:
        getattr(optimizer, how.split()[-1])()
    check()


def test_example_of_fsdp2_trains_on_two_nodes_of_two_ranks():
    """Run as its first lines say."""
    done = forked.torchrun(EXAMPLE, "--nodes", "2", "--steps", "20", ranks=4, cwd=Path.cwd())
    lines = re.findall(r"loss ([0-9.]+), ([0-9,]+) bytes sent; the gradient of a shard has ([0-9,]+)", done.stdout)
    assert len(lines) == 2, done.stdout
    losses = [float(loss) for loss, _, _ in lines]
    assert losses[1] < losses[0]
    sent, gradient = (int(number.replace(",", "")) for number in lines[1][1:])
    assert 0 < 20 * sent < gradient


def block():
    """A norm whose input is cut along the sequence, and an MLP whose features are cut."""
    torch.manual_seed(0)
    layers = {"norm": nn.LayerNorm(16), "up": nn.Linear(16, 32), "relu": nn.ReLU(), "down": nn.Linear(32, 16)}
    return nn.Sequential(OrderedDict(layers))


#: The block's plan over one dimension of a mesh: `norm` is replicated, and its gradients are Partial.
SEQUENCE_PARALLEL = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


def backward(model, rank, step):
    """Each rank has its own part of a sequence."""
    model.zero_grad()
    out = model(problems.draw((2, 6, 16), rank, step))
    (out - problems.draw((2, 6, 16), rank, step, 1)).square().mean().backward()


@pytest.mark.parametrize("where", ["tensor parallel", "two levels"])
@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
@ranks.each(4)
def test_drift_inside_a_node_is_named_there_and_resync_ends_it(rank, kind, where):
    """A copy changes on rank 3 after step 3."""
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "inside")), block()
    group = mesh
    if where == "tensor parallel":
        group, model = mesh["replicate"], parallelize_module(model, mesh["inside"], SEQUENCE_PARALLEL)
    optimizer = problems.optimizer_of(kind, model.parameters(), process_group=group, fingerprint_every=2)
    for step in range(5 if kind == "DeMo" else 6):
        backward(model, rank, step)
        if step == 3 and rank == 3:
            with torch.no_grad():
                held = optimizer.param_groups[0]["params"][0] if kind == "DeMo" else optimizer.replicator.parameters[0]
                (held.to_local() if isinstance(held, DTensor) else held)[5] += 1e-6
        if step < (4 if kind == "DeMo" else 5):
            optimizer.step()
    inside = r"param_groups\[0\]\['params'\]\[0\] \(shape \[16\]\) differs between ranks 0 and 1 of those in a node"
    with pytest.raises(DriftError, match=inside if rank > 1 else "rank 1 differ from those of rank 0"):
        optimizer.step()
    optimizer.resync()
    for step in range(4):
        backward(model, rank, step)
        optimizer.step()
    return problems.bits(model.parameters())


def test_shard_of_counts_cuts_of_fsdp2_over_tensor_parallelism():
    """On the third of 2 x 2 ranks."""
    mesh = SimpleNamespace(size=(2, 2).__getitem__, get_local_rank=(1, 0).__getitem__)
    placements = (_StridedShard(0, split_factor=2), Shard(0))  # is_shard() is False for the first
    assert shard_of(SimpleNamespace(device_mesh=mesh, placements=placements)) == (2, 4)


#: Shards of 2 ranks: even, uneven, and none left for the second rank.
SHAPES = [(32, 16), (33, 7), (1, 16), (16, 33)]


@problems.NEEDS_MUON
@pytest.mark.parametrize("cuts", [(0,), (1,), (0, 1), (0, 0)], ids=["FSDP2", "columns", "both", "rows twice"])
@ranks.each(4)
def test_muon_on_shards_equals_that_of_the_whole_matrix(cuts):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("first", "second"))
    mesh = mesh if len(cuts) == 2 else mesh["second"]

    def stepped(place):
        parameters = [Parameter(place(problems.draw(shape, number))) for number, shape in enumerate(SHAPES)]
        for number, parameter in enumerate(parameters):
            parameter.grad = place(problems.draw(parameter.shape, 7, number))
        BatchedMuon(parameters, lr=0.5).step()
        return problems.bits(parameters)

    whole = stepped(lambda tensor: tensor)
    assert stepped(lambda tensor: distribute_tensor(tensor, mesh, [*map(Shard, cuts)])) == whole


def _training(rank, world_size, cut):
    """Six steps of a model whose shards end where chunks end, on 2 x 2 ranks, or on 2 with whole matrices."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))

    def given(shape, *seeds):
        whole = problems.draw(shape, *seeds)
        return distribute_tensor(whole, mesh["shard"], [Shard(0)]) if cut else whole

    shapes = [(64, 32), (32, 64), (32,), (32, 32)]
    parameters = [Parameter(given(shape, index)) for index, shape in enumerate(shapes)]
    matrices, others = ([each for each in parameters if each.dim() == dim] for dim in (2, 1))
    with pytest.raises(ValueError, match="take LocalDeMo around") if cut else nullcontext():
        DeMo(matrices, update="muon", process_group=mesh["replicate"])
    inner = [BatchedMuon(matrices), torch.optim.AdamW(others, lr=0.01)]
    optimizer = LocalDeMo(inner, sync_every=2, process_group=mesh["replicate"], codec=Codec(chunk=16))
    sent = 0
    for step in range(6):
        for index, parameter in enumerate(parameters):
            parameter.grad = given(shapes[index], 9, step, mesh.get_local_rank("replicate"), index)
        optimizer.step()
        sent = max(sent, optimizer.stats.sent_bytes)
    return problems.bits(parameters), sent


def test_muon_on_shards_trains_as_without_them_bit_for_bit_and_demos_refuses_them():
    (whole, most), *_ = ranks.run(_training, 2, False)
    for parameters, sent in ranks.run(_training, 4, True):
        assert parameters == whole
        assert sent < 0.6 * most + 64  # half of the coefficients, and a header


@problems.NEEDS_MUON
@ranks.each(2)
def test_local_demo_says_what_torchs_muon_does_on_shards():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh["shard"])
    with pytest.warns(UserWarning, match="torch.optim.Muon got sharded matrices"):
        LocalDeMo(torch.optim.Muon([model.weight]), process_group=mesh["replicate"])
    LocalDeMo(demopt.muon_adamw(model, lr=0.1), process_group=mesh["replicate"])  # a warning would be an error


@ranks.each(2)
def test_loaded_state_of_shards_may_be_loaded_again():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(8, 8), mesh=mesh["shard"])
    optimizer = LocalDeMo(torch.optim.AdamW(model.parameters()), 1, process_group=mesh["replicate"])
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    moments = saved["state"][0]["exp_avg"].to_local()
    kept = moments.clone()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert torch.equal(moments, kept)


@problems.NEEDS_MUON
@ranks.each(2)
def test_muon_adamw_trains_a_model_of_which_tensor_parallelism_cuts_a_part():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "tensor"))
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16))
    parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = LocalDeMo(demopt.muon_adamw(model, lr=0.01), sync_every=1, process_group=mesh["replicate"])
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer.step()
    assert optimizer.stats.kept > 0


def _file(rank, world_size, folder, save):
    """Trains a sharded layer and saves a file per rank, or goes on from the resharded files of more or fewer nodes."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(8, 8), mesh=mesh["shard"])
    optimizer = LocalDeMo(torch.optim.AdamW(model.parameters()), 2, process_group=mesh["replicate"])
    if not save:
        files = [torch.load(folder / f"{2 * old + rank % 2}", weights_only=True) for old in range(3 - world_size // 2)]
        optimizer.load_state_dict(demopt.reshard(files, world_size // 2)[rank // 2])
    for _ in range(2):
        optimizer.zero_grad()
        model(problems.draw((4, 8), rank)).square().sum().backward()
        optimizer.step()
    if save:
        torch.save(optimizer.state_dict(), folder / f"{rank}")


@pytest.mark.parametrize("before", [4, 2])
def test_files_of_shards_train_on_among_more_or_fewer_nodes(before, tmp_path):
    ranks.run(_file, before, tmp_path, True)
    ranks.run(_file, 6 - before, tmp_path, False)
