"""The recipes of docs/parallelism.md, on 2 x 2 gloo ranks: two replicas, each over two ranks; and examples/fsdp2.py."""

import re
import warnings
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import demopt
import forked
import problems
import ranks
from demopt.optim.local_weights import LocalWeights

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
@ranks.each(4)
def test_shards_have_the_same_bits_with_the_state_on_the_host(rank, recipe):
    """Where parameters count as those of an accelerator."""
    with mock.patch.object(LocalWeights, "_is_here", return_value=False):
        on_host = _run(rank, "LocalDeMo, host", recipe)
    assert on_host == _run(rank, "LocalDeMo", recipe)


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
        where = "cpu" if "host" in kind else None
        optimizer = demopt.LocalDeMo(inner, sync_every=2, state_device=where, process_group=mesh["replicate"])
    teacher = problems.draw((16, 4), 77) / 4

    def loss_on(*seeds):
        inputs = problems.draw((64, 16), *seeds)
        return (model(inputs) - (inputs @ teacher).tanh()).square().mean()

    # ranks that cut the same layer see the same data
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


def test_example_of_fsdp2_trains_on_two_nodes_of_two_ranks():
    """As its first lines say to run it."""
    done = forked.torchrun(EXAMPLE, "--nodes", "2", "--steps", "20", ranks=4, cwd=Path.cwd())
    lines = re.findall(r"loss ([0-9.]+), ([0-9,]+) bytes sent; the gradient of a shard has ([0-9,]+)", done.stdout)
    assert len(lines) == 2, done.stdout
    losses = [float(loss) for loss, _, _ in lines]
    assert losses[1] < losses[0]
    sent, gradient = (int(number.replace(",", "")) for number in lines[1][1:])
    assert 0 < 20 * sent < gradient
