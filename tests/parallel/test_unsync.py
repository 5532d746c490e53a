"""demopt.unsync: dense gradients no longer travel between replicas, and each replica has only its own."""

import contextlib
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import demopt
import problems
import ranks


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 6))


def backward(model, *seeds):
    model(problems.draw((5, 16), *seeds)).square().mean().backward()


class Collectives(TorchDispatchMode):
    """Counts the collectives of torch.distributed inside it by name, including those that DDP and FSDP2 start in C++.

    torch's profiler could do so too, but it sometimes crashes the process: DDP waits for the future of an all-reduce,
    and gloo's thread closes the profiler's event only after that.
    """

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.found[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class Branches(nn.Module):
    """A model with a buffer that changes, and two branches: both, or one of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.rare = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, inputs, branches=3):
        self.steps.add_(1.0)
        hidden = self.first(inputs).tanh()
        found = torch.zeros(len(inputs), 16)
        found = found + self.second(hidden) if branches & 1 else found
        return self.norm(found + self.rare(hidden) if branches & 2 else found)


WRAPS = {
    "defaults": {},
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "bucket views": {"gradient_as_bucket_view": True},
    "no buffers": {"broadcast_buffers": False},  # newer torch deprecates the name
    "small buckets": {"bucket_cap_mb": 0.001},
}
LOOPS = ("plain", "the flag", "no_sync", "GradScaler", "autocast", "checkpoint of .module")
COMPILED = ("inside", "outside")


def _options(rank, how, loop, kind):
    """The fingerprint after 6 steps of 2 passes, and DDP's collectives since the first step."""
    model, mode, wrapped = Branches(), Collectives(), how is not None
    if how == "inside":
        model = torch.compile(model, backend="eager")
    if wrapped:
        with mode, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model = DistributedDataParallel(model, **WRAPS.get(how, {}))
            model = model if how == "synchronised" else demopt.unsync(demopt.unsync(model))
    if how == "outside":
        model = torch.compile(model, backend="eager")
    if kind == "DeMo":
        optimizer = demopt.DeMo(demopt.muon_groups(model, lr=0.02))
    else:
        optimizer = demopt.LocalDeMo(demopt.muon_adamw(model, lr=0.02), sync_every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=loop == "GradScaler")
    for step in range(6):
        optimizer.zero_grad()
        for part in range(2):
            quiet = wrapped and loop == "no_sync" and part == 0
            if wrapped and loop == "the flag":
                model.require_backward_grad_sync = part == 1
            if step == 1:
                mode.found.clear()  # DDP's agreement on its buckets, which comes once
            with (
                mode if step else contextlib.nullcontext(),
                model.no_sync() if quiet else contextlib.nullcontext(),
                torch.autocast("cpu", torch.bfloat16, enabled=loop == "autocast"),
            ):
                branches = 1 + step % 2 if kind == "one branch" else 3
                loss = model(problems.draw((5, 16), rank, step, part), branches).float().square().sum(1).sqrt().mean()
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if loop == "checkpoint of .module" and wrapped and step == 3:
            inner = getattr(model, "_orig_mod", model)
            inner.module.load_state_dict({name: value.clone() for name, value in inner.module.state_dict().items()})
    return optimizer.fingerprint(), mode.found["c10d::allreduce_"] + mode.found["c10d::broadcast_"]


@pytest.mark.parametrize(
    ("how", "loop", "kind"),
    [
        *((how, loop, "LocalDeMo") for how in (*WRAPS, *COMPILED) for loop in LOOPS[: 1 + (how != "static graph")]),
        *(("defaults", loop, "LocalDeMo") for loop in LOOPS[2:]),
        *(("unused parameters", loop, "one branch") for loop in LOOPS[:2]),
        *((how, "plain", "DeMo") for how in ("defaults", "static graph")),
        ("defaults", "the flag", "DeMo"),
    ],
)
@ranks.each(2)
def test_unsync_of_ddp_equals_the_plain_model_under_all_its_options(rank, how, loop, kind):
    plain, _ = _options(rank, None, loop, kind)
    bits_of_unused = 5 * ((how, loop) == ("unused parameters", "the flag"))  # DDP's, one per parameter, in each step
    assert _options(rank, how, loop, kind) == (plain, bits_of_unused)
    return plain


@ranks.each(2)
def test_ddp_without_unsync_sends_gradients_and_causes_a_warning(rank):
    sent = []
    told = problems.warned(lambda: sent.append(_options(rank, "synchronised", "plain", "DeMo")[1]))
    assert sent[0] >= 5
    assert ["demopt.unsync(model)" in text for text in told].count(True) == (rank == 0)


@ranks.each(2)
def test_unsynced_ddp_is_saved_whole_and_refuses_join_before_it_waits_for_all_reduces(rank):
    model = demopt.unsync(DistributedDataParallel(make()))
    assert torch.equal(problems.by_pickle(model).module[0].weight, model.module[0].weight)
    for context in (model.join(enable=False), Join([model], enable=False)):  # as Accelerate's join_uneven_inputs
        with context:
            backward(model, rank)
    for context in (model.join(), Join([model])):
        with pytest.raises(ValueError, match=r"rounds need all ranks.*same number of steps"), context:
            backward(model, rank)


REFUSED = r"the model went through replicate\(\), which only synchronises; leave that call out"
HOOK = "this DistributedDataParallel has a communication hook already, which would be lost; make it without"


@pytest.mark.parametrize(("kind", "says"), [("replicate", REFUSED), ("replicate of FSDP2", REFUSED), ("a hook", HOOK)])
@ranks.each(1)
def test_unsync_refuses_what_it_cannot_change(kind, says):
    """In the second half of a model; for replicate, it refuses before anything has changed."""
    mesh, half = init_device_mesh("cpu", (1,), mesh_dim_names=("replicate",)), make()
    if kind == "a hook":
        half = DistributedDataParallel(half)
        half.register_comm_hook(None, noop_hook)
    else:
        half = replicate(half) if kind == "replicate" else replicate_with_fsdp(half, mesh=mesh)
    model = nn.Sequential(DistributedDataParallel(make()), half)
    with pytest.raises((TypeError, ValueError), match=f"^{says}$"):
        demopt.unsync(model)
    assert model[0].require_backward_grad_sync or kind == "a hook"


@pytest.mark.parametrize(
    ("unsync", "reduce", "tolerance"), [(True, None, 1e-6), (True, torch.float16, 1e-3), (False, None, 1e-2)]
)
@ranks.each(4)
def test_unsync_alone_leaves_fsdp2_the_mean_gradient_of_its_replica(rank, unsync, reduce, tolerance):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, plain = make(), make()
    policy = MixedPrecisionPolicy(reduce_dtype=reduce)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    if unsync:
        assert demopt.unsync(demopt.unsync(model)) is model
    backward(model, rank, 0)  # accumulates: two passes are added
    with Collectives() as mode:
        backward(model, rank, 1)
    for other in range(rank // 2 * 2, rank // 2 * 2 + 2):  # the ranks of this node
        for part in range(2):
            backward(plain, other, part)
    both = zip(model.parameters(), plain.parameters(), strict=True)
    pairs = [(sharded.grad.full_tensor(), whole.grad / 2) for sharded, whole in both]
    assert all(torch.allclose(*pair, rtol=tolerance, atol=tolerance) for pair in pairs) == unsync
    assert (mode.found["c10d::allreduce_"] == 0) == unsync
    assert mode.found["c10d::_reduce_scatter_base_"] >= 1


def test_unsync_returns_a_plain_module_unchanged():
    model = make()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert demopt.unsync(model) is model
    assert {name: vars(module) for name, module in model.named_modules()} == before


@ranks.each(2)
def test_broadcast_buffers_takes_those_of_src_in_one_broadcast(rank):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model.register_buffer("mask", torch.tensor([rank == 0, True, False]))
    model.register_buffer("wide", torch.tensor(float(rank)).expand(2, 3))
    model.register_buffer("conjugate", torch.tensor([1 + 1j * rank, 2]).conj())
    model.register_buffer("pair", TwoTensor(torch.ones(2), torch.ones(2) * rank))
    for step in range(rank + 1):
        model(problems.draw((8, 3), rank, step))
    before = problems.bits(model[:2].buffers())
    with Collectives() as mode:
        demopt.broadcast_buffers(model, src=1)
    assert mode.found["c10d::broadcast_"] == 1
    assert model[0].num_batches_tracked == 2
    assert model.conjugate.tolist() == [1 - 1j, 2]
    assert model.pair.b.tolist() == [1.0, 1.0]
    model.pair = None
    assert (problems.bits(model[:2].buffers()) == before) == (rank == 1)
    return problems.bits(model.buffers())


@ranks.each(2)
def test_broadcast_buffers_refuses_a_src_that_is_no_rank_and_unlike_buffers(rank):
    unlike = r"rank 1 has buffer running_mean = torch.float32 \[3\] where rank 0 has torch.float32 \[2\]"
    for src, said in ((2, "src is 2; there are ranks 0 to 1"), (0, unlike)):
        with pytest.raises((ValueError, demopt.SettingsError), match=f"^{said}$"):
            demopt.broadcast_buffers(nn.BatchNorm1d(2 + rank), src=src)


def _quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch deprecates them
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


@pytest.mark.parametrize(
    ("made", "is_so"),
    [
        (_quantized, "quantized"),
        (torch.ones(3).to_sparse, "torch.sparse_coo"),
        (torch.ones(3).to_mkldnn, "torch._mkldnn"),
    ],
)
@pytest.mark.parametrize("alike", [False, True])
@ranks.each(2)
def test_buffer_without_bytes_is_refused_on_all_ranks(rank, alike, made, is_so):
    model = nn.Module()
    model.register_buffer("odd", made() if rank or alike else torch.ones(3))
    said = (
        f"buffer odd is {is_so}; only dense ones"
        if alike
        else f"rank 1 has buffer odd = {is_so} where rank 0 has torch.f"
    )
    with pytest.raises((TypeError, demopt.SettingsError), match=said):
        demopt.broadcast_buffers(model)
    with pytest.raises(TypeError, match=r"a frozen parameter of shape .* leave it out"):
        demopt.DeMo([nn.Parameter(made(), requires_grad=False)])
